"""``k8e sandbox confirm|approve|approvals`` and ``k8e approver``: ask before acting, and decide."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.cli import fast, output, sessions
from k8e.cli.parser import Commands
from k8e.client import approvals as client_approvals
from k8e.client.approvals import BINDING_NOTE, Approval, visible
from k8e.client.endpoints import Endpoint

SECRET_VARIABLE = "K8E_APPROVER_SECRET"  # noqa: S105 - a name
REJECTED = 1
"""Exit code, so that ``k8e sandbox confirm … && …`` does what it reads like."""
_PREFIX = "[k8e-sandbox]"
_MAX_SECRET_FILE = 4096


def confirm(options: argparse.Namespace) -> int:
    """Ask for approval, tell the people at the terminal, and wait."""
    with sessions.connect(options) as client:
        approval_id = options.approval_id
        if not approval_id:
            asked = client.confirm_action(
                options.session_id, options.action, wait=False, expires=options.expires
            )
            _prompt(asked, sessions.endpoint(options))
            if options.no_wait:
                _answer(asked)
                return 0
            approval_id = asked.approval_id
        found = client.confirm_action(
            options.session_id, options.action, options.timeout, approval_id=approval_id
        )
    _answer(found)
    return 0 if found.approved else REJECTED


def _prompt(asked: Approval, where: Endpoint) -> None:
    """Print the action that needs approval, with commands to paste."""
    _tell(
        f"approval {asked.approval_id} is needed for session {asked.session_id}",
        f"action: {visible(asked.action)}",
        f"to approve: {client_approvals.command(asked.approval_id, where)}",
        f"to reject:  {client_approvals.command(asked.approval_id, where, reject=True)}",
        *(() if asked.advisory else (BINDING_NOTE,)),
    )


def _tell(*lines: str) -> None:
    text = "".join(f"{_PREFIX} {line}\n" for line in lines)
    fast.write(2, text.encode("utf-8", "backslashreplace"))


def _answer(found: Approval) -> None:
    told: dict[str, Any] = {
        "advisory": found.advisory,
        "approval_id": found.approval_id,
        "approved": found.approved,
        "status": found.status,
    }
    if found.reason:
        told["reason"] = found.reason
    output.answer(told)


def approve(options: argparse.Namespace) -> int:
    """Show the action, then decide on it."""
    with sessions.connect(options) as client:
        asked = client.get_approval(options.approval_id)
        _tell(f"session: {asked.session_id}", f"action: {visible(asked.action)}")
        # A caller with the approver's role needs no secret; without any role the gateway refuses.
        needed = not asked.advisory and "admin" in client.status()["roles"]
        decided = client.approve_action(
            options.approval_id,
            not options.reject,
            options.reason,
            secret=secret(options, "the approver's secret: ") if needed else "",
        )
    output.answer({"advisory": decided.advisory, "ok": True})
    return 0


def approvals(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.list_approvals(options.session_id)
    shown = "action advisory approval_id created_at expires_at session_id".split()
    items = [{name: getattr(item, name) for name in shown} for item in found]
    output.answer({"approvals": [item | {"action": visible(item["action"])} for item in items]})
    return 0


# The approver.


def init(options: argparse.Namespace) -> int:
    """Choose a secret, or take a passphrase; it is printed once and stored nowhere."""
    with sessions.connect(options) as client:
        if client.has_approver() and not options.replace:
            raise errors.Conflict(
                "there is an approver already",
                hint="k8e approver init --replace asks for the current secret",
            )
        current = secret(options, "the current secret: ") if options.replace else ""
        if options.passphrase:
            client.set_approver(_new_passphrase(), current=current)
            output.answer({"ok": True})
            return 0
        chosen = secrets.token_urlsafe(32)
        if options.file:
            # Before the gateway learns it: without the file, no caller could approve.
            _write(Path(options.file), chosen)
        client.set_approver(chosen, current=current)
    output.answer({"file": options.file} if options.file else {"secret": chosen})
    return 0


def status(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        output.answer({"configured": client.has_approver()})
    return 0


def _write(path: Path, secret: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the file {path} cannot be made: {error.strerror}",
            hint=errors.folder_hint(error, "name a new file"),
        ) from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{secret}\n")


def secret(options: argparse.Namespace, prompt: str) -> str:
    """The secret from a file, the environment or the terminal; never from an argument."""
    if options.secret_file:
        try:
            with open(options.secret_file, encoding="utf-8") as file:
                return file.read(_MAX_SECRET_FILE).rstrip("\n")
        except (OSError, ValueError) as error:
            raise errors.InvalidRequest(
                f"the secret cannot be read from {options.secret_file}: {error}"
            ) from None
    return os.environ.get(SECRET_VARIABLE) or _ask(prompt)


def _ask(prompt: str) -> str:
    if not os.isatty(0):
        raise errors.Denied(
            "this needs the approver's secret",
            hint=f"set {SECRET_VARIABLE}, use --secret-file, or answer on a terminal",
        )
    import getpass

    return getpass.getpass(f"{_PREFIX} {prompt}", stream=sys.stderr)


def _new_passphrase() -> str:
    """A passphrase: typed twice on a terminal, or one line of stdin."""
    if not os.isatty(0):
        return sys.stdin.readline(_MAX_SECRET_FILE).rstrip("\n")
    chosen = _ask("new passphrase: ")
    if _ask("the same again: ") != chosen:
        raise errors.InvalidRequest("the two passphrases differ", hint="try again")
    return chosen


def add_confirm(commands: Commands) -> None:
    parser = commands.add(
        "confirm",
        "ask for approval of an action, and wait for the decision; exits with 1 if it is refused",
        "k8e sandbox confirm ID 'delete the table users'\n"
        "         k8e sandbox confirm --no-wait ID 'delete the table users'",
        confirm,
        remote=True,
    )
    parser.add_argument("session_id", metavar="ID")
    parser.add_argument("action", metavar="ACTION", help="the action, in words")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30,
        metavar="SECONDS",
        help="give up waiting after this long (default 30); it can still be approved then",
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="print the approval's id and leave at once"
    )
    parser.add_argument(
        "--approval-id",
        default="",
        metavar="ID",
        help="wait again for an approval that was asked for before",
    )
    parser.add_argument(
        "--expires",
        type=float,
        default=0,
        metavar="SECONDS",
        help="how long it can be approved and acted on (default 3600)",
    )


def add_approve(commands: Commands) -> None:
    parser = commands.add(
        "approve",
        "allow an action, or refuse it; where there is an approver, with the approver's secret",
        "k8e sandbox approve APPROVAL\n"
        "         k8e sandbox approve APPROVAL --reject --reason 'not on a Friday'",
        approve,
        remote=True,
        answers_ok=True,
    )
    parser.add_argument("approval_id", metavar="APPROVAL", help="its id")
    parser.add_argument("--reject", action="store_true", help="say no")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the asker")
    _add_secret_file(parser)


def add_approvals(commands: Commands) -> None:
    parser = commands.add(
        "approvals",
        "list the actions that wait for a decision",
        "k8e sandbox approvals",
        approvals,
        remote=True,
    )
    parser.add_argument("--session-id", default="", metavar="ID", help="only of this session")


def add_approver(commands: Commands) -> None:
    approver = commands.add(
        "approver",
        "choose who decides on approvals",
        "k8e approver init",
    )
    group = approver.commands(required=True)
    init_parser = group.add(
        "init",
        "make a secret that approving requires from now on, and print it once",
        "k8e approver init --passphrase\n         k8e approver init --file /root/approver.secret",
        init,
        remote=True,
    )
    init_parser.add_argument(
        "--passphrase",
        action="store_true",
        help="take a passphrase instead, from the terminal or a line of stdin",
    )
    init_parser.add_argument(
        "--file", metavar="PATH", help="write it to a new file that only we can read"
    )
    init_parser.add_argument("--replace", action="store_true", help="replace the current secret")
    _add_secret_file(init_parser)
    group.add(
        "status",
        "print whether there is an approver",
        "k8e approver status",
        status,
        remote=True,
    )


def _add_secret_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="read the approver's secret from a file [K8E_APPROVER_SECRET holds it itself]",
    )
