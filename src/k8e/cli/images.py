"""``k8e image …``: fetch with a bar where somebody looks, list, remove and prune."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from k8e.cli import printing, sandbox
from k8e.cli.snapshots import watched
from k8e.client import imaging


def pull(options: argparse.Namespace) -> int:
    printing.answer(_shown(watched(options, imaging.pull(options.reference))))
    return 0


def listing(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.list_images()
    printing.answer({"images": [_shown(item) for item in found]})
    return 0


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
