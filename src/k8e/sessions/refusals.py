"""Refusals that several parts of the sessions share."""

from __future__ import annotations

from k8e import errors
from k8e.egress.policy import same_words
from k8e.model import DEFAULT_TEMPLATE, Session, SessionSpec
from k8e.sessions.store import Elsewhere


def not_found(session_id: str, why: str = "") -> errors.SessionNotFound:
    """No such session, or another caller's, or it has ended; ``why`` explains the last."""
    # K8E's clients look for the words "not found".
    text = f"session {session_id[:80]} not found" + (f" ({why})" if why else "")
    return errors.SessionNotFound(text, hint="k8e sandbox sessions lists yours")


def paused(session_id: str) -> errors.SessionPaused:
    return errors.SessionPaused(
        f"session {session_id} is paused", hint=f"k8e sandbox resume {session_id}"
    )


def elsewhere(session_id: str, other: Elsewhere) -> errors.SessionElsewhere:
    """The session belongs to another gateway, which alone can reach its sandbox."""
    where = f"gateway {other.name} ({other.address or 'which has no address for other machines'})"
    return errors.SessionElsewhere(
        f"session {session_id} runs on {where}",
        hint=f"call that gateway: K8E_SANDBOX_ENDPOINT={other.address}"
        if other.address
        else "call it from its own machine, or start it with K8E_LISTEN",
    )


def check_same(session: Session, spec: SessionSpec) -> None:
    """Refuse a repeated request that differs: the existing session may have weaker limits."""
    if session.spec != spec:
        raise errors.Conflict(
            f"request id {spec.request_id!r} was used for a different session",
            hint="use a new request id for a new request",
        )


def check_standing(
    known: Session,
    runtime: str,
    allowed_hosts: tuple[str, ...] | None,
    content: SessionSpec | None,
    template: str = "",
) -> None:
    """Refuse a tenant's standing session that differs from the request."""
    tenant = known.spec.tenant
    if runtime and runtime != known.runtime:
        raise errors.Conflict(
            f"the session of tenant {tenant!r} runs on {known.runtime}, not on {runtime}",
            hint=f"k8e sandbox destroy {known.session_id}, or use another --tenant",
        )
    made_from = known.spec.template or DEFAULT_TEMPLATE
    if template and template != made_from:
        raise errors.Conflict(
            f"the session of tenant {tenant!r} was made from template {made_from!r}, "
            f"not from {template!r}",
            hint=f"k8e sandbox destroy {known.session_id}, or use another --tenant",
        )
    if allowed_hosts is not None and not same_words(allowed_hosts, known.allowed_hosts):
        raise errors.Conflict(
            f"the session of tenant {tenant!r} may reach {' '.join(known.allowed_hosts)}",
            hint=f"k8e sandbox allow-hosts {known.session_id} changes that, "
            "or use another --tenant",
        )
    if content is not None and content.secret_refs not in ((), known.spec.secret_refs):
        raise errors.Conflict(
            f"the session of tenant {tenant!r} was made with other secrets",
            hint=f"k8e sandbox destroy {known.session_id}, or use another --tenant",
        )
    if content is not None and not _has_content(known.spec, content):
        raise errors.Conflict(
            f"the session of tenant {tenant!r} was made with other content",
            hint=f"k8e sandbox destroy {known.session_id}, or use another --tenant",
        )


def _has_content(made: SessionSpec, asked: SessionSpec) -> bool:
    """Whether a session has the content that is asked for; any will do if none is."""
    if not asked.snapshot and not asked.manifest:
        return True
    return (asked.snapshot, asked.manifest) == (made.snapshot, made.manifest)
