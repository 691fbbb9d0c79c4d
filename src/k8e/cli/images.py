"""``k8e image …``: fetch with a progress bar, list, remove and prune."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Iterator
from typing import Any

from k8e.cli import output, sessions
from k8e.cli.parser import Commands
from k8e.cli.snapshots import watched
from k8e.client import images


def pull(options: argparse.Namespace) -> int:
    output.answer(_shown(watched(options, images.pull(options.reference))))
    return 0


def listing(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.list_images()
    if options.json or not os.isatty(1):
        output.answer({"images": [_shown(item) for item in found]})
    else:
        output.write_lines(image_table(found))
    return 0


def image_table(found: list[images.Image]) -> Iterator[str]:
    """The images as a table."""
    rows = [("NAME", "DIGEST", "SIZE", "PULLED")]
    for item in found:
        shown = _shown(item)
        digest = item.digest.removeprefix("sha256:")[:12]
        rows.append((item.name, digest, output.size(item.size), shown["pulled_at"]))
    return output.table(rows)


def remove(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        gone = client.remove_image(options.reference)
    output.answer({"ok": True, "removed_layers": gone})
    return 0


def prune(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        gone = client.prune_images()
    output.answer({"ok": True, "removed_layers": gone})
    return 0


def _shown(item: images.Image) -> dict[str, Any]:
    when = datetime.datetime.fromtimestamp(item.pulled_at, datetime.UTC)
    return {
        "digest": item.digest,
        "layers": list(item.layers),
        "name": item.name,
        "platform": item.platform,
        "pulled_at": when.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "size_bytes": item.size,
        "workdir": item.workdir,
    }


def add_image(commands: Commands) -> None:
    image = commands.add(
        "image",
        "fetch, list and remove the images that sandboxes can have as their root file system",
        "k8e image pull registry.example.com/tools:1.2",
        remote=True,
    )
    below = image.commands(required=True)
    pull_parser = below.add(
        "pull",
        "fetch an image from its registry, and unpack it; again if its tag has moved",
        "k8e image pull registry.example.com/tools:1.2",
        pull,
        remote=True,
    )
    listing_parser = below.add(
        "list",
        "list the images",
        "k8e image list",
        listing,
        remote=True,
    )
    listing_parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    remove_parser = below.add(
        "remove",
        "forget an image; sandboxes that use it keep it until they end",
        "k8e image remove registry.example.com/tools:1.2",
        remove,
        remote=True,
        answers_ok=True,
    )
    below.add(
        "prune",
        "remove the layers that no image and no sandbox uses any more",
        "k8e image prune",
        prune,
        remote=True,
        answers_ok=True,
    )
    for parser in (pull_parser, remove_parser):
        parser.add_argument(
            "reference",
            metavar="REF",
            help="host[:port]/name[:tag][@digest]; without a host, that of K8E_DEFAULT_REGISTRY",
        )
