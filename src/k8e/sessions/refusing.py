"""Why a session cannot be had, in words for whoever asked for it."""

from __future__ import annotations

from k8e import errors
from k8e.egress.policy import same_words
from k8e.model import Session, SessionSpec


def not_found(session_id: str) -> errors.SessionNotFound:
    # K8E's clients look for the words "not found".
    return errors.SessionNotFound(
        f"session {session_id[:80]} not found", hint="k8e sandbox sessions lists yours"
    )


def check_same(session: Session, spec: SessionSpec) -> None:
    """A repeated request must be the same in all: an old session may have had weaker limits."""
    if session.spec != spec:
        raise errors.Conflict(
            f"request id {spec.request_id!r} was used for a different session",
            hint="use a new request id for a new request",
        )


def check_standing(known: Session, asked: str, allowed_hosts: tuple[str, ...] | None) -> None:
    """A tenant's standing session must be as it is asked for: its runtime, what it may reach."""
    tenant = known.spec.tenant
    if asked and asked != known.runtime:
        raise errors.Conflict(
            f"the session of tenant {tenant!r} runs on {known.runtime}, not on {asked}",
            hint=f"k8e sandbox destroy {known.session_id}, or use another --tenant",
        )
    if allowed_hosts is not None and not same_words(allowed_hosts, known.allowed_hosts):
        raise errors.Conflict(
            f"the session of tenant {tenant!r} may reach {' '.join(known.allowed_hosts)}",
            hint=f"k8e sandbox allow-hosts {known.session_id} changes that, "
            "or use another --tenant",
        )
