"""The caller on whose behalf the running code works.

It travels in a context variable, as tasks inherit those: a row may be written several
calls below the edge at which a caller was recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, ParamSpec, overload


class AuditCaller(NamedTuple):
    """A caller at the other end of a connection."""

    principal: str
    via: str
    """How we know: ``socket`` (the uid of a unix socket's peer), ``loopback`` (the uid behind a TCP
    connection), ``key``, ``certificate``, ``token`` (of the HTTP endpoint),
    ``conversation-token``; ``gateway`` for what
    the gateway does by itself."""
    peer: str = ""
    """Where the call came from: an address with port, or uid and pid."""


class Act(NamedTuple):
    """One call of a caller."""

    caller: AuditCaller
    call: str
    session: str = ""
    """The session that it names; its owner is not checked."""
    request: str = ""
    """The id of the request that it came with, if it came with one."""


P = ParamSpec("P")
_act: ContextVar[Act | None] = ContextVar("act", default=None)


def current() -> Act | None:
    return _act.get()


def begin(act: Act | None) -> None:
    """Work on behalf of ``act`` from now on, in this task and those that it starts."""
    _act.set(act)


def about(session_id: str) -> None:
    """Note the session that the call names; at the edge it is known only after the caller."""
    act = _act.get()
    if act is not None and session_id:
        _act.set(act._replace(session=session_id))


@overload
def kept(work: Callable[P, None]) -> Callable[P, None]: ...
@overload
def kept(work: None) -> None: ...
@overload
def kept(work: Callable[P, None] | None) -> Callable[P, None] | None: ...
def kept(work: Callable[P, None] | None) -> Callable[P, None] | None:
    """Bind ``work`` to the current caller, wherever it is called later."""
    act = _act.get()
    if work is None or act is None:
        return work

    def on_behalf(*args: P.args, **kwargs: P.kwargs) -> None:
        token = _act.set(act)
        try:
            work(*args, **kwargs)
        finally:
            _act.reset(token)

    return on_behalf
