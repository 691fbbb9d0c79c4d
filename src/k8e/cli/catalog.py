"""``k8e sandbox catalog``: what the command can do, for programs; made from the parser itself."""

from __future__ import annotations

import argparse
from typing import Any

from k8e.cli import completing, parsing, printing

VERSION = 1
_ROOT = "k8e sandbox "


def show(_: argparse.Namespace) -> int:
    printing.answer(build())
    return 0


def build() -> dict[str, Any]:
    """Every command below ``k8e sandbox`` in K8E's form, with flags as they are without hyphens."""
    known = list(completing.walk(parsing.build(), "k8e"))
    texts = {f"{item.path} {name}": text for item in known for name, text in item.below.items()}
    commands = [
        {
            "flags": [
                {"name": flag.removeprefix("--"), "usage": text}
                for flag, text in item.flags.items()
                if flag.startswith("--") and flag != "--help"
            ],
            "name": item.path.removeprefix(_ROOT),
            "usage": texts[item.path],
        }
        for item in known
        if item.path.startswith(_ROOT) and not item.below
    ]
    return {"catalog_version": VERSION, "commands": commands}
