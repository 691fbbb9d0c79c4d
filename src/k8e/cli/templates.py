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
from k8e.cli import fast, printing, sandbox
from k8e.client.approving import visible
from k8e.client.templating import Template

_TOLD = ("source", "digest", "error")  # by the gateway, and no part of a recipe


def listing(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.list_templates()
    if options.json or not os.isatty(1):
        printing.answer({"templates": [_fields(item) for item in found]})
    else:
        text = "".join(f"{line}\n" for line in table(found))
        fast.write(1, text.encode("utf-8", "backslashreplace"))
    return 0


def table(found: list[Template]) -> Iterator[str]:
    """A line for each template: what it is for, or why it cannot be used."""
    rows = [("NAME", "FROM", "ROOTFS", "DESCRIPTION")]
    for item in found:
        text = f"cannot be used: {item.error}" if item.error else item.description
        rows.append((visible(item.name), item.source, visible(item.rootfs) or "-", visible(text)))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    for row in rows:
        padded = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*padded, row[3]]).rstrip()


def show(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.get_template(options.template)
    if options.json:
        printing.answer(_fields(found))
        return 0
    if found.error:
        raise errors.InvalidRequest(
            f"template {found.name!r} cannot be used: {found.error}", hint="mend it, and try again"
        )
    import yaml  # only where it is printed

    recipe = {key: value for key, value in _fields(found).items() if key not in _TOLD}
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    fast.write(1, text.encode("utf-8", "replace"))
    return 0


def apply(options: argparse.Namespace) -> int:
    recipe = _read(options.file)
    with sandbox.connect(options) as client:
        applied = client.apply_template(recipe)
    printing.answer({"digest": applied.digest, "name": applied.name, "ok": True})
    return 0


def delete(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        client.delete_template(options.template)
    printing.answer({"name": options.template, "ok": True})
    return 0


def _read(name: str) -> dict[str, Any]:
    """The recipe in a file, checked before a gateway is bothered with it."""
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
    """What a template says, without what it does not."""
    fields = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    kept = {"warm"} if not item.error else set[str]()
    if item.allowed_hosts is not None:  # an empty list says something: nothing is allowed
        kept.add("allowed_hosts")
    return {key: value for key, value in fields.items() if value or key in kept}
