"""The commands about images, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
"""How the parser adds a command: group, name, text, example, handler, flags shared with others."""


def add(commands: Any, common: argparse.ArgumentParser, command: Command) -> None:
    """Add ``k8e image``: what root file systems are made of."""
    image = command(
        commands,
        "image",
        "fetch, list and remove the images that sandboxes can have as their root file system",
        "k8e image pull registry.example.com/tools:1.2",
        "images.listing",
        common,
    )
    below = image.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=type(image)
    )
    pull = command(
        below,
        "pull",
        "fetch an image from its registry, and unpack it; also when its tag has moved",
        "k8e image pull registry.example.com/tools:1.2",
        "images.pull",
        common,
    )
    listing = command(below, "list", "list the images", "k8e image list", "images.listing", common)
    listing.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    remove = command(
        below,
        "remove",
        "forget an image; sandboxes that have it keep it until they end",
        "k8e image remove registry.example.com/tools:1.2",
        "images.remove",
        common,
    )
    command(
        below,
        "prune",
        "remove the layers that no image and no sandbox uses any more",
        "k8e image prune",
        "images.prune",
        common,
    )
    for parser in (pull, remove):
        parser.add_argument(
            "reference",
            metavar="REF",
            help="host[:port]/name[:tag][@digest]; without a host, that of K8E_DEFAULT_REGISTRY",
        )
