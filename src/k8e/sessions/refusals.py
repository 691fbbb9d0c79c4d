"""Why sessions refuse what is asked of them, in words that several parts use."""

from __future__ import annotations

from k8e import errors
from k8e.model import Session, SessionSpec


def not_found(session_id: str, why: str = "") -> errors.SessionNotFound:
    """No such session, or not the caller's, or it ended; ``why`` tells the latter."""
    # K8E's clients look for the words "not found".
    text = f"session {session_id[:80]} not found" + (f" ({why})" if why else "")
    return errors.SessionNotFound(text, hint="k8e sandbox sessions lists yours")


def paused(session_id: str) -> errors.SessionPaused:
    return errors.SessionPaused(
        f"session {session_id} is paused", hint=f"k8e sandbox resume {session_id}"
    )


def check_same(session: Session, spec: SessionSpec) -> None:
    """A repeated request must be the same in all: an old session may have had weaker limits."""
    if session.spec != spec:
        raise errors.Conflict(
            f"request id {spec.request_id!r} was used for a different session",
            hint="use a new request id for a new request",
        )
