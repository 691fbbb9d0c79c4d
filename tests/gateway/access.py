"""Every call that there is, who may make it, and what of somebody else's it could name.

A call of the gateway that has no row here fails ``test_who_may.py``: whoever adds one says here
which roles may make it, and how a stranger would try to reach another one's things with it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from k8e.model import new_id


@dataclass(frozen=True)
class Things:
    """What an owner has; each has a name that a stranger could learn somehow."""

    session: str
    run: str
    terminal: str
    context: str
    approval: str
    snapshot: str
    exec: str
    port: int = 8123
    secret: str = "treasured-secret"

    def pretended(self) -> Things:
        """Things of the same shape that nobody has."""
        session = new_id("sess")
        return Things(
            session,
            self.run.replace(self.session, session),
            self.terminal.replace(self.session, session),
            "nocontext",
            new_id("approval"),
            "nobodys",
            self.exec,
            secret="nobodys-secret",
        )

    def hide(self, text: str) -> str:
        """``text`` with the names of these things made the same for all."""
        for item in sorted(fields(self), key=lambda item: -len(str(getattr(self, item.name)))):
            if isinstance(value := getattr(self, item.name), str):
                text = text.replace(value, f"<{item.name}>")
        return text

    def names(self) -> list[str]:
        return [self.session, self.run, self.terminal, self.approval]


Asking = Callable[[Things], dict[str, Any]]
"""The arguments of a call that names these things."""


def _nothing(_: Things) -> dict[str, Any]:
    return {}


class Kind(enum.Enum):
    """What a stranger gets who makes the call."""

    HIDDEN = "not found, in the very words for a thing that nobody has"
    UNKNOWN = "an answer that there is none, in the very words for a thing that nobody has"
    LISTED = "an answer, with nothing of others in it"
    OWN = "something of the caller's own, or of the whole gateway; other tests are about it"


@dataclass(frozen=True)
class Row:
    """One way to make a call."""

    roles: str
    """Each of these roles is enough; all others are refused."""
    kind: Kind
    ask: Asking = _nothing
    sees_all: str = ""
    """A role that sees everybody's, as approvers see what is to be decided."""


ANY, AGENT, ADMIN = "agent approver admin", "agent", "admin"
HIDDEN, UNKNOWN, LISTED, OWN = Kind.HIDDEN, Kind.UNKNOWN, Kind.LISTED, Kind.OWN


def _session(**more: Any) -> Row:
    """A call about a session."""
    return Row(AGENT, HIDDEN, lambda of: {"session_id": of.session, **more})


def _terminal(**more: Any) -> Row:
    return Row(AGENT, HIDDEN, lambda of: {"terminal_id": of.terminal, **more})


def _context(**more: Any) -> Row:
    return Row(
        AGENT, HIDDEN, lambda of: {"session_id": of.session, "context_id": of.context, **more}
    )


_ASK_AGAIN = Row(
    AGENT,
    HIDDEN,
    lambda of: {"session_id": of.session, "action": "x", "approval_id": of.approval},
)
_DECIDE = Row(
    "approver admin",
    HIDDEN,
    lambda of: {"approval_id": of.approval, "approved": True},
    sees_all="approver",
)

# Strangers find their own refused calls in there, with the ids that they named.
_AUDIT = Row(ANY, OWN, lambda of: {"session_id": of.session})

RPCS: dict[str, list[Row]] = {
    "CreateSession": [Row(AGENT, OWN)],
    "DestroySession": [_session()],
    "GetSession": [_session()],
    "ListSessions": [Row(AGENT, LISTED, lambda of: {"phase": "all"})],
    "PauseSession": [_session()],
    "ResumeSession": [_session()],
    "RunSubAgent": [Row(AGENT, HIDDEN, lambda of: {"parent_session_id": of.session})],
    "Exec": [_session(command="true"), _session(command="true", background=True)],
    "ExecStream": [_session(command="true")],
    "PipInstall": [_session(packages=["x"])],
    "PollRun": [Row(AGENT, UNKNOWN, lambda of: {"run_id": of.run})],
    "GetTranscript": [_session()],
    "GetProcesses": [_session()],
    "GetEvents": [_session(), Row(AGENT, LISTED)],
    "WriteFile": [_session(path="kept", content="by a stranger")],
    "ReadFile": [_session(path="kept")],
    "ListFiles": [_session()],
    "ConfirmAction": [_session(action="x"), _ASK_AGAIN],
    "ApproveAction": [_DECIDE],
    "GetAudit": [_AUDIT],
    "VerifyAudit": [Row(ADMIN, OWN)],
    "ListApprovals": [
        Row(ANY, LISTED, sees_all="approver"),
        Row(ANY, LISTED, lambda of: {"session_id": of.session}, sees_all="approver"),
    ],
    "SnapshotPut": [Row(AGENT, LISTED, lambda of: {"name": "mine", "layers": ["x"]})],
    "SnapshotGet": [Row(AGENT, HIDDEN, lambda of: {"name": of.snapshot})],
    "SnapshotList": [Row(AGENT, LISTED)],
    "SetSecret": [Row(AGENT, LISTED, lambda of: {"name": of.secret, "value": "mine"})],
    "ListSecrets": [Row(AGENT, LISTED)],
    "DeleteSecret": [Row(AGENT, HIDDEN, lambda of: {"name": of.secret, "tenant_id": "other"})],
    "UpdateAllowedHosts": [_session(hosts=["stranger.example"])],
    "GetEgress": [_session()],
    "CreateTerminal": [_session(argv=["cat"])],
    "TerminalStream": [_terminal()],
    "TerminalWrite": [_terminal(data=b"x")],
    "TerminalResize": [_terminal(rows=24, cols=80)],
    "TerminalForeground": [_terminal()],
    "TerminalSignal": [_terminal(signal=3)],
    "TerminalDestroy": [_terminal()],
    "ExposeService": [_session(port=8124)],
    "UnexposeService": [Row(AGENT, HIDDEN, lambda of: {"session_id": of.session, "port": of.port})],
    "ListExposed": [_session(), Row(AGENT, LISTED)],
    "CreateContext": [_session(), _context()],
    "ListContexts": [_session()],
    "RemoveContext": [_context()],
    "RestartContext": [_context()],
    "InterruptContext": [_context()],
    "ExecuteCode": [_context(code=b"1"), _context(code=b"1", make_context=True)],
    "ListTemplates": [Row("agent admin", LISTED)],
    "GetTemplate": [Row("agent admin", LISTED, lambda of: {"name": "default"})],
    "ApplyTemplate": [Row(ADMIN, OWN)],
    "DeleteTemplate": [Row(ADMIN, OWN)],
    "Login": [Row(ANY, OWN)],
    "Run": [Row(ANY, OWN)],  # each of its operations has a row below
    "GetCACert": [Row("", OWN)],  # for anybody: it is no secret
}

OPERATIONS: dict[str, list[Row]] = {
    "status": [Row(ANY, LISTED)],
    "doctor": [Row(ANY, LISTED)],
    "approver": [Row(ANY, LISTED)],
    "metrics": [Row(ADMIN, LISTED)],
    "stop": [Row(ADMIN, OWN)],
    "set_approver": [Row(ADMIN, OWN)],
    "pool": [Row(ADMIN, LISTED)],
    "set_pool": [Row(ADMIN, OWN)],
    "drain_pool": [Row(ADMIN, OWN)],
    "create_api_key": [Row(ADMIN, OWN)],
    "list_api_keys": [Row(ADMIN, LISTED)],
    "open_conversation": [
        Row(AGENT, OWN, lambda of: {"conversation_id": "c", "user_id": "u"}),
    ],
    "issue_token": [_session()],
    "revoke_tokens": [Row("agent admin", OWN, lambda of: {"session_id": of.session})],
    "rotate_token_key": [Row(ADMIN, OWN)],
    "token_keys": [Row(ANY, LISTED)],
    "rotate_api_key": [Row(ADMIN, OWN)],
    "delete_api_key": [Row(ADMIN, OWN)],
    "list_templates": [Row("agent admin", LISTED)],
    "get_template": [Row("agent admin", LISTED, lambda of: {"name": "default"})],
    "apply_template": [Row(ADMIN, OWN)],
    "delete_template": [Row(ADMIN, OWN)],
    "pull_image": [Row(ADMIN, OWN)],
    "list_images": [Row(ADMIN, LISTED)],
    "remove_image": [Row(ADMIN, OWN)],
    "prune_images": [Row(ADMIN, OWN)],
    "create_session": [
        Row(AGENT, OWN),
        Row(AGENT, HIDDEN, lambda of: {"spec": {"snapshot": of.snapshot}}),
    ],
    "get_session": [_session()],
    "list_sessions": [Row(AGENT, LISTED, lambda of: {"ended": True})],
    "destroy_session": [_session()],
    "extend_session": [_session(lifetime=5.0)],
    "pause_session": [_session()],
    "resume_session": [_session()],
    "run_subagent": [Row(AGENT, HIDDEN, lambda of: {"parent_session_id": of.session})],
    "events": [_session(), Row(AGENT, LISTED)],
    "egress": [_session()],
    "update_allowed_hosts": [_session(hosts=["stranger.example"])],
    "change_allowed_hosts": [_session(add=["stranger.example"], remove=[])],
    "confirm_action": [_session(action="x"), _ASK_AGAIN],
    "approve_action": [_DECIDE],
    "get_approval": [
        Row(ANY, HIDDEN, lambda of: {"approval_id": of.approval}, sees_all="approver")
    ],
    "audit": [_AUDIT],
    "verify_audit": [Row(ADMIN, OWN)],
    "list_approvals": [Row(ANY, LISTED, sees_all="approver")],
    "expose": [_session(port=8124)],
    "unexpose": [Row(AGENT, HIDDEN, lambda of: {"session_id": of.session, "port": of.port})],
    "list_exposed": [_session(), Row(AGENT, LISTED)],
    "save_snapshot": [_session(name="taken")],
    "get_snapshot": [Row(AGENT, HIDDEN, lambda of: {"name": of.snapshot})],
    "list_snapshots": [Row(AGENT, LISTED)],
    "delete_snapshot": [Row(AGENT, HIDDEN, lambda of: {"name": of.snapshot})],
    "set_secret": [Row(AGENT, LISTED, lambda of: {"name": of.secret, "value": "mine"})],
    "list_secrets": [Row(AGENT, LISTED)],
    "delete_secret": [Row(AGENT, HIDDEN, lambda of: {"name": of.secret, "tenant": "other"})],
    "put_snapshot": [Row(AGENT, LISTED, lambda of: {"name": "mine", "layers": ["x"]})],
}


def _guest(**call: Any) -> Row:
    """An operation that a session's guest answers."""
    return Row(AGENT, HIDDEN, lambda of: {"session": {"id": of.session}, **call})


def _exec(**call: Any) -> Row:
    """One on a program that runs there."""
    return Row(AGENT, HIDDEN, lambda of: {"session": {"id": of.session}, "id": of.exec, **call})


GUEST: dict[str, list[Row]] = {
    "exec": [
        _guest(argv=["true"]),
        _guest(code=b"1", language="python"),
        _guest(code=b"1", context="c", make_context=True),
    ],
    "attach": [_exec()],
    "transcript": [_guest()],
    "signal": [_exec(signal=9)],
    "resize": [_exec(rows=24, cols=80)],
    "execs": [_guest()],
    "processes": [_guest()],
    "read": [_guest(path="kept")],
    "write": [_guest(path="kept")],
    "list": [_guest(path=".")],
    "stat": [_guest(path="kept")],
    "remove": [_guest(path="kept")],
    "rename": [_guest(path="kept", to="lost")],
    "mkdir": [_guest(path="new")],
    "symlink": [_guest(path="new", to="/")],
    "chmod": [_guest(path="kept", mode=0)],
    "connect": [_guest(host="127.0.0.1", port=8123)],
    "ping": [_guest()],
    "foreground": [_exec()],
    "type": [_exec(data=b"x")],
    "dismiss": [_exec()],
    "create_context": [_guest()],
    "list_contexts": [_guest()],
    "remove_context": [_guest(id="c")],
    "restart_context": [_guest(id="c")],
    "interrupt_context": [_guest(id="c")],
}
