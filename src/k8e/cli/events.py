"""``k8e sandbox events``: what happened in a session, as JSON or, on a terminal, as a table."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from k8e.cli import fast, sandbox
from k8e.client import events
from k8e.client.approving import visible
from k8e.client.events import Event

_HTML = str.maketrans({"&": "\\u0026", "<": "\\u003c", ">": "\\u003e"})


def show(options: argparse.Namespace) -> int:
    """Print the events; the gateway's own lines unless somebody is to read them."""
    one = bool(options.session_id)
    found: list[str] = sandbox.ask(options, events.lines(options.session_id, options.limit))
    if options.json or not os.isatty(1):
        text = "".join(f"{line.translate(_HTML)}\n" for line in found)
    else:
        rows = table([events.parse(line) for line in found], one=one)
        text = "".join(f"{row}\n" for row in rows)
    fast.write(1, text.encode("utf-8", "backslashreplace"))
    return 0


def table(found: list[Event], *, one: bool = True) -> Iterator[str]:
    """A line for each event; nothing of what a sandbox or a client wrote acts on the terminal."""
    if one and found and found[0].seq > 1:
        yield f"({found[0].seq - 1} older events are not shown)"
    width = max((len(item.kind) for item in found), default=0)
    for item in found:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.at))
        fields = item.fields if one else {"session_id": item.session_id, **item.fields}
        told = "  ".join(f"{key}={_value(value)}" for key, value in fields.items())
        yield f"{at}  {item.kind:{width}}  {told}".rstrip()


def _value(value: Any) -> str:
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
