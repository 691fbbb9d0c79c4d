"""Approvals: ask before an action, and decide on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k8e.client import operations
from k8e.client.operations import Operation
from k8e.client.records import Record

if TYPE_CHECKING:
    from k8e.client.endpoints import Endpoint

WAIT = 300.0  # seconds
BINDING_NOTE = (
    "That asks for the approver's secret; --secret-file PATH or K8E_APPROVER_SECRET gives it where "
    "there is no terminal."
)


class Approval(Record):
    """One action that an approver is asked to allow, once."""

    approval_id: str
    session_id: str
    action: str
    """The exact text that was asked for; see :func:`visible` before it is printed."""
    status: str
    """``pending``, ``approved``, ``rejected``, ``used`` or ``expired``."""
    approved: bool
    advisory: bool
    """Whether it was (or can be) decided without an approver's secret, so by the asker too."""
    reason: str
    """The approver's words."""
    created_at: float
    expires_at: float
    """Unix time; what is not approved and acted on until then never will be."""
    decided_at: float
    """Unix time; 0 while it is pending."""


_FIELDS = frozenset(Approval.__match_args__)


def _approval(data: Mapping[str, Any]) -> Approval:
    return Approval(**{key: value for key, value in data.items() if key in _FIELDS})


def one(call: Mapping[str, Any]) -> Operation[Approval]:
    return _approval((yield from operations.call(call)))


def many(call: Mapping[str, Any]) -> Operation[list[Approval]]:
    return [_approval(item) for item in (yield from operations.call(call))["approvals"]]


def is_configured(call: Mapping[str, Any]) -> Operation[bool]:
    return bool((yield from operations.call(call))["configured"])


def confirm(
    session_id: str,
    action: str,
    timeout: float,
    *,
    wait: bool,
    approval_id: str,
    expires: float,
) -> Operation[Approval]:
    return one(
        {
            "op": "confirm_action",
            "session_id": session_id,
            "action": action,
            "approval_id": approval_id,
            "timeout": timeout,
            "wait": wait,
            "expires": expires,
        }
    )


def decide(approval_id: str, approved: bool, reason: str, secret: str) -> Operation[Approval]:
    return one(
        {
            "op": "approve_action",
            "approval_id": approval_id,
            "approved": approved,
            "reason": reason,
            "secret": secret,
        }
    )


def visible(text: str) -> str:
    """``text`` on one line, with every character spelled out that a terminal would act on or hide.

    A backslash is doubled, so that two different texts never look the same.
    """
    return "".join(char if char.isprintable() and char != "\\" else _escaped(char) for char in text)


def command(approval_id: str, endpoint: Endpoint, *, reject: bool = False) -> str:
    """The command that decides it, for a person to type in any folder and with any environment.

    It has no credentials: the approver has its own.
    """
    import shlex

    words = ["k8e", "sandbox", "approve", approval_id, *_place(endpoint)]
    return " ".join(map(shlex.quote, [*words, "--reject"] if reject else words))


def _place(endpoint: Endpoint) -> list[str]:
    """The flags for the gateway in question, unless it is this machine's default one."""
    if endpoint.profile:
        return ["--profile", endpoint.profile]
    if endpoint.target:
        return ["--endpoint", endpoint.target]
    from k8e import settings

    usual = settings.default_run_dir() / "gateway.sock"
    socket = endpoint.socket or str(settings.load().socket)
    return ["--endpoint", f"unix:{socket}"] if socket != str(usual) else []


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
