"""``k8e manifests``: the controller's own manifests, and old ones in today's form."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.cli import fast
from k8e.cli.parser import Commands


def add_manifests(commands: Commands) -> None:
    group = commands.add(
        "manifests",
        "print the manifests of k8e controller, or old ones of agent-sandbox in today's form",
        "k8e manifests render core | kubectl apply --server-side -f -",
    )
    below = group.commands(required=True)
    render_parser = below.add(
        "render",
        "print those for Sandbox (core), for claims, templates and warm pools (extensions), "
        "the kinds of early write-ups (extensions-legacy), or for the way into sandboxes (router)",
        "k8e manifests render extensions",
        render,
    )
    render_parser.add_argument(
        "part",
        choices=("core", "extensions", "extensions-legacy", "router"),
        help="what to print",
    )
    render_parser.add_argument("--image", metavar="IMAGE", help="of the Deployment")
    upgrade_parser = below.add(
        "upgrade",
        "print old manifests of agent-sandbox in today's form",
        "k8e manifests upgrade -f old.yaml",
        upgrade,
    )
    upgrade_parser.add_argument(
        "-f", "--filename", metavar="PATH", required=True, help="a file; - is stdin"
    )


def render(options: argparse.Namespace) -> int:
    from k8e.controller import deployment, router_deployment

    image = options.image or deployment.IMAGE
    if options.part == router_deployment.PART:
        text = router_deployment.render(image)
    else:
        text = deployment.render(options.part, image)
    fast.write(1, text.encode())
    return 0


def upgrade(options: argparse.Namespace) -> int:
    import yaml

    from k8e.controller import upgrade as upgrades

    try:
        data = (
            sys.stdin.buffer.read()
            if options.filename == "-"
            else Path(options.filename).read_bytes()
        )
        found: list[Any] = [item for item in yaml.safe_load_all(data) if item is not None]
    except OSError as error:
        raise errors.InvalidRequest(f"{options.filename} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise errors.InvalidRequest(f"{options.filename} is not YAML: {error}") from None
    if not all(isinstance(item, dict) for item in found):
        raise errors.InvalidRequest(f"{options.filename} has a document that is not an object")
    made, notes = upgrades.upgrade(found)
    for note in notes:
        fast.write(2, f"{note}\n".encode())
    fast.write(1, yaml.safe_dump_all(made, sort_keys=False, width=100).encode())
    return 0
