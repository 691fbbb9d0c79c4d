"""``k8e image …``: fetch with a bar where somebody looks, list, remove and prune."""

from __future__ import annotations

import argparse
import datetime
import os
from typing import Any

from k8e.cli import fast, printing, progress, sandbox
from k8e.cli.snapshots import watched
from k8e.client import imaging


def pull(options: argparse.Namespace) -> int:
    printing.answer(_shown(watched(options, imaging.pull(options.reference))))
    return 0


def listing(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.list_images()
    if options.json or not os.isatty(1):
        printing.answer({"images": [_shown(item) for item in found]})
    else:
        fast.write(1, "".join(f"{line}\n" for line in table(found)).encode())
    return 0


def table(found: list[imaging.Image]) -> list[str]:
    """The images for people."""
    rows = [("NAME", "DIGEST", "SIZE", "PULLED")]
    for item in found:
        shown = _shown(item)
        digest = item.digest.removeprefix("sha256:")[:12]
        rows.append((item.name, digest, progress.size(item.size), shown["pulled_at"]))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    return ["  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows]


def remove(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        gone = client.remove_image(options.reference)
    printing.answer({"ok": True, "removed_layers": gone})
    return 0


def prune(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        gone = client.prune_images()
    printing.answer({"ok": True, "removed_layers": gone})
    return 0


def _shown(item: imaging.Image) -> dict[str, Any]:
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
