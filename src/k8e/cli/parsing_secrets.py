"""The commands about secrets, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
"""How the parser adds a command: group, name, text, example, handler, flags shared with others."""


def add(commands: Any, common: argparse.ArgumentParser, command: Command) -> None:
    """Add ``k8e secret``: values that sessions get as variables."""
    secret = command(
        commands,
        "secret",
        "keep secrets that sessions get as variables; no command shows a value again",
        'printf %s "$TOKEN" | k8e secret set github\n'
        "         k8e sandbox create --secret GITHUB_TOKEN=github",
        "secrets.listing",
        common,
    )
    below = secret.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=type(secret)
    )
    setting = command(
        below,
        "set",
        "keep a secret, whose value is read from stdin",
        "k8e secret set github < token.txt\n         k8e secret set db password < password.txt",
        "secrets.set_value",
        common,
    )
    listing = command(
        below,
        "list",
        "list your secrets by name",
        "k8e secret list",
        "secrets.listing",
        common,
    )
    listing.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    listing.add_argument("--tenant", metavar="NAME", help="only this tenant's")
    delete = command(
        below,
        "delete",
        "delete a secret, or one of its values; sessions that have it keep it until they end",
        "k8e secret delete github",
        "secrets.delete",
        common,
    )
    for parser, meaning in ((setting, "without it: value"), (delete, "without it: all values")):
        parser.add_argument("name", metavar="NAME")
        parser.add_argument("key", metavar="KEY", nargs="?", default="", help=meaning)
        parser.add_argument(
            "--tenant", metavar="NAME", help="whose sessions can get it [K8E_SANDBOX_TENANT]"
        )
