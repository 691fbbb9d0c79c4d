"""The commands about approvals, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
"""How the parser adds a command: group, name, text, example, handler, flags shared with others."""


def add_to_sandbox(command: Command, group: Any, common: argparse.ArgumentParser) -> None:
    confirm = command(
        group,
        "confirm",
        "ask for leave to do something, and wait for the decision; exits with 1 if it is a no",
        "k8e sandbox confirm ID 'delete the table users'\n"
        "         k8e sandbox confirm --no-wait ID 'delete the table users'",
        "approvals.confirm",
        common,
    )
    confirm.add_argument("session_id", metavar="ID")
    confirm.add_argument("action", metavar="ACTION", help="what is to be done, in words")
    confirm.add_argument(
        "--timeout",
        type=float,
        default=30,
        metavar="SECONDS",
        help="give up waiting after this long (default 30); it can still be approved then",
    )
    confirm.add_argument(
        "--no-wait", action="store_true", help="print the approval's id and leave at once"
    )
    confirm.add_argument(
        "--approval-id", default="", metavar="ID", help="wait again for what was asked before"
    )
    confirm.add_argument(
        "--expires",
        type=float,
        default=0,
        metavar="SECONDS",
        help="how long it can be approved and acted on (default 3600)",
    )
    approve = command(
        group,
        "approve",
        "allow an action, or refuse it; where there is an approver, with the approver's secret",
        "k8e sandbox approve APPROVAL\n"
        "         k8e sandbox approve APPROVAL --reject --reason 'not on a Friday'",
        "approvals.approve",
        common,
    )
    approve.add_argument("approval_id", metavar="APPROVAL", help="its id")
    approve.add_argument("--reject", action="store_true", help="say no")
    approve.add_argument("--reason", default="", metavar="TEXT", help="why, for the asker")
    _add_secret_file(approve)
    listing = command(
        group,
        "approvals",
        "list the actions that wait for a decision",
        "k8e sandbox approvals",
        "approvals.approvals",
        common,
    )
    listing.add_argument("--session-id", default="", metavar="ID", help="only of this session")


def add_approver(command: Command, commands: Any, common: argparse.ArgumentParser) -> None:
    approver = command(
        commands,
        "approver",
        "choose who decides on approvals",
        "k8e approver init",
        "approvals.status",
    )
    group = approver.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=type(approver)
    )
    init = command(
        group,
        "init",
        "make a secret that approving needs from now on, and print it once",
        "k8e approver init --passphrase\n         k8e approver init --file /root/approver.secret",
        "approvals.init",
        common,
    )
    init.add_argument(
        "--passphrase",
        action="store_true",
        help="take a passphrase instead, from the terminal or a line of stdin",
    )
    init.add_argument("--file", metavar="PATH", help="write it to a new file that only we can read")
    init.add_argument("--replace", action="store_true", help="replace the secret of before")
    _add_secret_file(init)
    command(
        group,
        "status",
        "tell whether there is an approver",
        "k8e approver status",
        "approvals.status",
        common,
    )


def _add_secret_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="read the approver's secret from a file [K8E_APPROVER_SECRET holds it itself]",
    )
