"""The commands for files and for the network, as the parser knows them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]


def add(group: Any, common: Any, command: Command) -> None:
    """Add them to ``k8e sandbox``; ``command`` adds one."""
    _add_egress(group, common, command)
    _add_files(group, common, command)


def _add_egress(group: Any, common: Any, command: Command) -> None:
    allow = command(
        group,
        "allow-hosts",
        "replace what a session may reach; open connections are judged anew",
        "k8e sandbox allow-hosts ID default api.example.org:443\n"
        "         k8e sandbox allow-hosts ID --add '*.example.net' --remove api.example.org:443\n"
        "         k8e sandbox allow-hosts ID --clear",
        "egress.allow_hosts",
        common,
    )
    egress = command(
        group,
        "egress",
        "show what a session may reach, and what it was refused: a table on a terminal, else JSON",
        "k8e sandbox egress ID",
        "egress.egress",
        common,
    )
    for parser in (allow, egress):
        parser.add_argument("session_id", metavar="ID")
    allow.add_argument(
        "hosts", nargs="*", metavar="HOST", help="a word of the policy, or a comma list of them"
    )
    # K8E's own way to say the same.
    allow.add_argument("--hosts", dest="list", action="append", help=argparse.SUPPRESS)
    for flag, text in (("--add", "allow these too"), ("--remove", "take these words out")):
        allow.add_argument(
            flag, action="append", metavar="HOSTS", help=f"{text}; a comma list, repeatable"
        )
    allow.add_argument("--clear", action="store_true", help="allow nothing, like the word none")
    egress.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def _add_files(group: Any, common: Any, command: Command) -> None:
    write = command(
        group,
        "write",
        "write stdin to a file of a sandbox",
        "k8e sandbox write ID data.csv < data.csv",
        "sandbox.write",
        common,
    )
    read = command(
        group,
        "read",
        "read a file of a sandbox",
        "k8e sandbox read --raw ID data.csv > data.csv",
        "sandbox.read",
        common,
    )
    listing = command(
        group,
        "list",
        "list the files in /workspace",
        "k8e sandbox list ID",
        "sandbox.list_files",
        common,
    )
    for parser in (write, read, listing):
        parser.add_argument("session_id", metavar="ID")
    for parser in (write, read):
        parser.add_argument("path", help="absolute, or relative to /workspace")
    write.add_argument("--mode", choices=["w", "a"], default="w", help="replace (w) or append (a)")
    read.add_argument("--raw", action="store_true", help="print the file's bytes and nothing else")
    listing.add_argument(
        "--since", type=float, default=0, metavar="SECONDS", help="only what changed after this"
    )
