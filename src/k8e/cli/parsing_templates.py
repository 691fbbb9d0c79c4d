"""``k8e template``: its commands, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]


def add(command: Command, commands: Any, common: argparse.ArgumentParser) -> None:
    """Add ``template`` to ``k8e``; ``common`` are the flags for a gateway elsewhere."""
    template = command(
        commands,
        "template",
        "show and change the named recipes that sessions are made from",
        "k8e template list",
        "templates.listing",
    )
    group = template.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=type(template)
    )
    listing = command(
        group,
        "list",
        "list all templates, those that cannot be used too; as JSON, on a terminal as a table",
        "k8e template list\n         k8e template list --json",
        "templates.listing",
        common,
    )
    listing.add_argument("--json", action="store_true", help="JSON on a terminal too")
    show = command(
        group,
        "show",
        "print a template as it can be applied again",
        "k8e template show default\n         k8e template show data > data.yaml",
        "templates.show",
        common,
    )
    show.add_argument("--json", action="store_true", help="all that is known of it, on one line")
    apply = command(
        group,
        "apply",
        "keep the template of a file under its name, in the place of the one before",
        "k8e template apply data.yaml\n         k8e template show data | k8e template apply -",
        "templates.apply",
        common,
    )
    apply.add_argument(
        "file", metavar="FILE", help="YAML or TOML (NAME.toml); - for YAML from stdin"
    )
    delete = command(
        group,
        "delete",
        "delete a template that was applied; sessions that were made from it stay",
        "k8e template delete data",
        "templates.delete",
        common,
    )
    for parser in (show, delete):
        parser.add_argument("template", metavar="NAME")
