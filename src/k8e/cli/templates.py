"""``k8e template …``: list, show, apply and delete."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k8e import errors, templates
from k8e.cli import fast, output, sessions
from k8e.cli.parser import Commands
from k8e.client.approvals import visible
from k8e.client.templates import Template

_TOLD = ("source", "digest", "error")  # by the gateway, and no part of a recipe


def listing(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.list_templates()
    if options.json or not os.isatty(1):
        output.answer({"templates": [_fields(item) for item in found]})
    else:
        output.write_lines(template_table(found))
    return 0


def template_table(found: list[Template]) -> Iterator[str]:
    """A line for each template: its settings, or why it cannot be used."""
    rows = [("NAME", "FROM", "ROOTFS", "DESCRIPTION")]
    for item in found:
        text = f"cannot be used: {item.error}" if item.error else item.description
        rows.append((visible(item.name), item.source, visible(item.rootfs) or "-", visible(text)))
    return output.table(rows)


def show(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.get_template(options.template)
    if options.json:
        output.answer(_fields(found))
        return 0
    if found.error:
        raise errors.InvalidRequest(
            f"template {found.name!r} cannot be used: {found.error}", hint="fix it, and try again"
        )
    import yaml  # only where it is printed

    recipe = {key: value for key, value in _fields(found).items() if key not in _TOLD}
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    fast.write(1, text.encode("utf-8", "replace"))
    return 0


def apply(options: argparse.Namespace) -> int:
    recipe = _read(options.file)
    with sessions.connect(options) as client:
        applied = client.apply_template(recipe)
    output.answer({"digest": applied.digest, "name": applied.name, "ok": True})
    return 0


def delete(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        client.delete_template(options.template)
    output.answer({"name": options.template, "ok": True})
    return 0


def _read(name: str) -> dict[str, Any]:
    """The recipe in a file, checked before a gateway is called."""
    path = Path(name)
    if name == "-":
        data = sys.stdin.buffer.read(templates.MAX_FILE + 1)
        return templates.parse(templates.load(data, "stdin"), "", "stdin").to_json()
    if path.suffix not in templates.ENDINGS:
        raise errors.InvalidRequest(
            f"the name {path.name!r} of the file has none of the endings of templates",
            hint=f"they are {', '.join(templates.ENDINGS)}",
        )
    with open(path, "rb") as file:
        data = file.read(templates.MAX_FILE + 1)
    return templates.parse(templates.load(data, path.name), path.stem, path.name).to_json()


def _fields(item: Template) -> dict[str, Any]:
    """The fields of a template that are set."""
    fields = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    kept = {"warm"} if not item.error else set[str]()
    if item.allowed_hosts is not None:  # an empty list says something: nothing is allowed
        kept.add("allowed_hosts")
    return {key: value for key, value in fields.items() if value or key in kept}


def add_template(commands: Commands) -> None:
    template = commands.add(
        "template",
        "show and change the named recipes that sessions are made from",
        "k8e template list",
    )
    group = template.commands(required=True)
    listing_parser = group.add(
        "list",
        "list all templates, including unusable ones; as JSON, on a terminal as a table",
        "k8e template list\n         k8e template list --json",
        listing,
        remote=True,
    )
    listing_parser.add_argument("--json", action="store_true", help="JSON on a terminal too")
    show_parser = group.add(
        "show",
        "print a template in a form that can be applied again",
        "k8e template show default\n         k8e template show data > data.yaml",
        show,
        remote=True,
    )
    show_parser.add_argument("--json", action="store_true", help="all its fields, on one line")
    apply_parser = group.add(
        "apply",
        "store the template of a file under its name, in place of the one before",
        "k8e template apply data.yaml\n         k8e template show data | k8e template apply -",
        apply,
        remote=True,
        answers_ok=True,
    )
    apply_parser.add_argument(
        "file", metavar="FILE", help="YAML or TOML (NAME.toml); - for YAML from stdin"
    )
    delete_parser = group.add(
        "delete",
        "delete a template that was applied; sessions that were made from it stay",
        "k8e template delete data",
        delete,
        remote=True,
        answers_ok=True,
    )
    for parser in (show_parser, delete_parser):
        parser.add_argument("template", metavar="NAME")
