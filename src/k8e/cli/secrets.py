"""``k8e secret …``: set from stdin, list names, delete. Values go in and never come out."""

from __future__ import annotations

import argparse
import datetime
import getpass
import os
import sys
from typing import Any

from k8e import errors
from k8e.cli import fast, parsing, printing, sandbox
from k8e.client.secrets import SecretInfo

MAX_INPUT = 1 << 20  # bytes; the gateway says how long a value may be


def set_value(options: argparse.Namespace) -> int:
    value = _read()
    with sandbox.connect(options) as client:
        made = client.set_secret(
            options.name, value, key=options.key, tenant_id=parsing.tenant(options)
        )
    printing.answer({"ok": True, **_shown(made)})
    return 0


def _read() -> str:
    """A value from stdin: typed unseen, or all that is piped, without the last line's end."""
    if os.isatty(0):
        return getpass.getpass("value (is not shown): ")
    data = sys.stdin.buffer.read(MAX_INPUT + 1)
    if len(data) > MAX_INPUT:
        raise errors.LimitExceeded("the value is larger than any that is kept")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise errors.InvalidRequest(
            "the value is no text in UTF-8", hint="encode it, for example with base64"
        ) from None


def listing(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.list_secrets(options.tenant or "")
    if options.json or not os.isatty(1):
        printing.answer({"secrets": [_shown(item) for item in found]})
    else:
        fast.write(1, "".join(f"{line}\n" for line in table(found)).encode())
    return 0


def table(found: list[SecretInfo]) -> list[str]:
    """The secrets for people."""
    rows = [("NAME", "KEY", "TENANT", "SET")]
    rows += [(item.name, item.key, item.tenant_id, _when(item.updated_at)) for item in found]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    return ["  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows]


def delete(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        gone = client.delete_secret(
            options.name, key=options.key, tenant_id=parsing.tenant(options)
        )
    printing.answer({"ok": True, "deleted": gone, "name": options.name})
    return 0


def _shown(item: SecretInfo) -> dict[str, Any]:
    return {
        "created_at": _when(item.created_at),
        "key": item.key,
        "name": item.name,
        "tenant_id": item.tenant_id,
        "updated_at": _when(item.updated_at),
    }


def _when(at: float) -> str:
    when = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")
