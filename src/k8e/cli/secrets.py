"""``k8e secret …``: set from stdin, list names, delete. Values go in and never come out."""

from __future__ import annotations

import argparse
import datetime
import getpass
import os
import sys
from collections.abc import Iterator
from typing import Any

from k8e import errors
from k8e.cli import output, sessions
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands
from k8e.client.secrets import SecretInfo

MAX_INPUT = 1 << 20  # bytes; the gateway checks the exact limit


def set_value(options: argparse.Namespace) -> int:
    value = _read()
    with sessions.connect(options) as client:
        made = client.set_secret(
            options.name, value, key=options.key, tenant_id=cli_parser.tenant(options)
        )
    output.answer({"ok": True, **_shown(made)})
    return 0


def _read() -> str:
    """A value from stdin: typed without echo, or everything piped in, without the last newline."""
    if os.isatty(0):
        return getpass.getpass("value (not shown): ")
    data = sys.stdin.buffer.read(MAX_INPUT + 1)
    if len(data) > MAX_INPUT:
        raise errors.LimitExceeded("the value is too large")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise errors.InvalidRequest(
            "the value is not UTF-8 text", hint="encode it, for example with base64"
        ) from None


def listing(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.list_secrets(options.tenant or "")
    if options.json or not os.isatty(1):
        output.answer({"secrets": [_shown(item) for item in found]})
    else:
        output.write_lines(secret_table(found))
    return 0


def secret_table(found: list[SecretInfo]) -> Iterator[str]:
    """The secrets as a table, without their values."""
    rows = [("NAME", "KEY", "TENANT", "SET")]
    rows += [(item.name, item.key, item.tenant_id, _when(item.updated_at)) for item in found]
    return output.table(rows)


def delete(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        gone = client.delete_secret(
            options.name, key=options.key, tenant_id=cli_parser.tenant(options)
        )
    output.answer({"ok": True, "deleted": gone, "name": options.name})
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


def add_secret(commands: Commands) -> None:
    secret = commands.add(
        "secret",
        "store secrets that sessions get as variables; no command shows a value again",
        'printf %s "$TOKEN" | k8e secret set github\n'
        "         k8e sandbox create --secret GITHUB_TOKEN=github",
        remote=True,
    )
    below = secret.commands(required=True)
    setting = below.add(
        "set",
        "store a secret, with its value from stdin",
        "k8e secret set github < token.txt\n         k8e secret set db password < password.txt",
        set_value,
        remote=True,
    )
    listing_parser = below.add(
        "list",
        "list your secrets by name",
        "k8e secret list",
        listing,
        remote=True,
    )
    listing_parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    listing_parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")
    delete_parser = below.add(
        "delete",
        "delete a secret, or one of its values; sessions that have it keep it until they end",
        "k8e secret delete github",
        delete,
        remote=True,
    )
    for parser, meaning in (
        (setting, "without it: value"),
        (delete_parser, "without it: all values"),
    ):
        parser.add_argument("name", metavar="NAME")
        parser.add_argument("key", metavar="KEY", nargs="?", default="", help=meaning)
        parser.add_argument(
            "--tenant", metavar="NAME", help="whose sessions can get it [K8E_SANDBOX_TENANT]"
        )
