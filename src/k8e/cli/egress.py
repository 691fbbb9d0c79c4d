"""``k8e sandbox allow-hosts`` and ``egress``: what a session may reach, and what it was refused."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

from k8e import errors
from k8e.cli import denials, fast, printing, sandbox
from k8e.client import operations, requests


def allow_hosts(options: argparse.Namespace) -> int:
    """Replace a session's policy, or change it by words."""
    found: dict[str, Any] = sandbox.ask(options, operations.call(_change(options)))["session"]
    shown = ("allowed_hosts", "session_id")
    printing.answer({name: found[name] for name in shown})
    return 0


def _change(options: argparse.Namespace) -> dict[str, Any]:
    """What is asked of the gateway, which alone can change a list that others change too."""
    given = fast.split_hosts([*options.hosts, *(options.list or ())])
    changes = bool(options.add or options.remove)
    if bool(given) + changes + options.clear > 1:
        raise errors.InvalidRequest(
            "hosts replace the list, --add and --remove change it, --clear empties it",
            hint="use one of the three; separate hosts of --add and --remove with commas",
        )
    if changes:
        add, remove = fast.split_hosts(options.add or []), fast.split_hosts(options.remove or [])
        return requests.change_call(options.session_id, add, remove)
    if not given and not options.clear:
        raise errors.InvalidRequest(
            "no hosts are named",
            hint="--clear allows nothing; k8e sandbox egress ID shows what is allowed",
        )
    return requests.allow_call(options.session_id, given)


def egress(options: argparse.Namespace) -> int:
    """Print what is allowed and what was refused."""
    with sandbox.connect(options) as client:
        found = client.egress(options.session_id)
    if options.json or not os.isatty(1):
        told = asdict(found) | {"denials": [denials.fields(item) for item in found.denials]}
        printing.answer(told)
    else:
        fast.write(1, "".join(f"{line}\n" for line in denials.table(found)).encode())
    return 0
