"""``k8e sandbox confirm|approve|approvals`` and ``k8e approver``: ask before acting, and decide."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.cli import fast, printing, sandbox
from k8e.client import approving
from k8e.client.approving import BINDING_NOTE, Approval, visible
from k8e.client.endpoints import Endpoint

SECRET_VARIABLE = "K8E_APPROVER_SECRET"  # noqa: S105 - a name
REJECTED = 1
"""Exit code, so that ``k8e sandbox confirm … && …`` does what it reads like."""
_PREFIX = "[k8e-sandbox]"
_MAX_SECRET_FILE = 4096


def confirm(options: argparse.Namespace) -> int:
    """Ask, tell the people at the terminal, and wait."""
    with sandbox.connect(options) as client:
        approval_id = options.approval_id
        if not approval_id:
            asked = client.confirm_action(
                options.session_id, options.action, wait=False, expires=options.expires
            )
            _prompt(asked, sandbox.endpoint(options))
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
    """Say what is asked, with commands to paste."""
    _tell(
        f"approval {asked.approval_id} is needed for session {asked.session_id}",
        f"action: {visible(asked.action)}",
        f"to approve: {approving.command(asked.approval_id, where)}",
        f"to reject:  {approving.command(asked.approval_id, where, reject=True)}",
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
    printing.answer(told)


def approve(options: argparse.Namespace) -> int:
    """Show what is decided on, then decide."""
    with sandbox.connect(options) as client:
        asked = client.get_approval(options.approval_id)
        _tell(f"session: {asked.session_id}", f"action: {visible(asked.action)}")
        # Who has the approver's role needs no secret; whoever may not approve is told so at once.
        needed = not asked.advisory and "admin" in client.status()["roles"]
        decided = client.approve_action(
            options.approval_id,
            not options.reject,
            options.reason,
            secret=secret(options, "the approver's secret: ") if needed else "",
        )
    printing.answer({"advisory": decided.advisory, "ok": True})
    return 0


def approvals(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.list_approvals(options.session_id)
    shown = "action advisory approval_id created_at expires_at session_id".split()
    items = [{name: getattr(item, name) for name in shown} for item in found]
    printing.answer({"approvals": [item | {"action": visible(item["action"])} for item in items]})
    return 0


# The approver.


def init(options: argparse.Namespace) -> int:
    """Choose a secret, or take a passphrase; it is shown once and kept nowhere."""
    with sandbox.connect(options) as client:
        if client.has_approver() and not options.replace:
            raise errors.Conflict(
                "there is an approver already",
                hint="k8e approver init --replace asks for the secret of before",
            )
        current = secret(options, "the secret of before: ") if options.replace else ""
        if options.passphrase:
            client.set_approver(_new_passphrase(), current=current)
            printing.answer({"ok": True})
            return 0
        chosen = secrets.token_urlsafe(32)
        if options.file:
            # Before the gateway knows it: a secret that nobody has locks everybody out.
            _write(Path(options.file), chosen)
        client.set_approver(chosen, current=current)
    printing.answer({"file": options.file} if options.file else {"secret": chosen})
    return 0


def status(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        printing.answer({"configured": client.has_approver()})
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
