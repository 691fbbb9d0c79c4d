"""``k8e token``: tokens with which machines join the cluster of this server."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k8e.cli import output
from k8e.cli.parser import Commands

if TYPE_CHECKING:
    from k8e.distro.layout import Layout
    from k8e.kubernetes.api import Api


def add_token(commands: Commands) -> None:
    group = commands.add(
        "token",
        "manage the tokens with which machines join the cluster of this server",
        "k8e token create --ttl 1h",
    )
    below = group.commands(required=True)
    create_parser = below.add(
        "create",
        "make a token and print it",
        "k8e token create --ttl 1h --description laptop",
        create,
    )
    create_parser.add_argument(
        "--ttl", default="24h", metavar="TIME", help="how long it lives: 30m, 24h, 7d; 0: for ever"
    )
    create_parser.add_argument("--description", default="", metavar="TEXT", help="what it is for")
    listing_parser = below.add(
        "list", "list tokens, without their secrets", "k8e token list", listing
    )
    delete_parser = below.add(
        "delete",
        "delete a token; nodes that have joined with it stay",
        "k8e token delete ID",
        delete,
    )
    delete_parser.add_argument("id", metavar="ID", help="its first six characters")
    rotate_parser = below.add(
        "rotate",
        "replace the token in server/node-token; the old one is invalid within ten seconds",
        "k8e token rotate",
        rotate,
    )
    for parser in (create_parser, listing_parser, delete_parser, rotate_parser):
        parser.add_argument("--data-dir", metavar="PATH", help="of the server (/var/lib/k8e)")


def create(options: argparse.Namespace) -> int:
    from k8e.distro import tokens

    lifetime = tokens.parse_lifetime(options.ttl)

    async def make(api: Api, layout: Layout) -> dict[str, Any]:
        authority = tokens.own_authority(layout)
        made = await tokens.create(
            api, authority, lifetime=lifetime, description=options.description
        )
        return {"id": made.id, "token": str(made)}

    return _answer(options, make)


def listing(options: argparse.Namespace) -> int:
    from k8e.distro import tokens

    async def read(api: Api, layout: Layout) -> dict[str, Any]:
        del layout
        return {"tokens": await tokens.listing(api)}

    return _answer(options, read)


def delete(options: argparse.Namespace) -> int:
    from k8e.distro import tokens

    async def remove(api: Api, layout: Layout) -> dict[str, Any]:
        del layout
        await tokens.delete(api, options.id)
        return {"ok": True}

    return _answer(options, remove)


def rotate(options: argparse.Namespace) -> int:
    from k8e.distro import tokens

    async def replace(api: Api, layout: Layout) -> dict[str, Any]:
        made = await tokens.rotate(api, layout)
        return {"id": made.id, "token": str(made)}

    return _answer(options, replace)


def _answer(
    options: argparse.Namespace, work: Callable[[Api, Layout], Awaitable[dict[str, Any]]]
) -> int:
    from k8e.distro import configuration
    from k8e.distro import layout as places
    from k8e.kubernetes.api import by_kubeconfig

    layout = (
        places.Layout(Path(options.data_dir)) if options.data_dir else configuration.last_layout()
    )

    async def run() -> dict[str, Any]:
        api = by_kubeconfig(places.own_identity(layout))
        try:
            return await work(api, layout)
        finally:
            api.close()

    output.answer(asyncio.run(run()))
    return 0
