"""One operation on a session's guest, for dialects that answer when it is over.

Dialects that pass frames on use :mod:`k8e.gateway.conversation` instead.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from k8e.sessions.exchanges import Exchange, Frame, decode

if TYPE_CHECKING:
    from k8e.model import Principal
    from k8e.sessions.service import Sessions

__all__ = ["Call", "Frame", "GuestOSError", "decode"]


class GuestOSError(Exception):
    """A system call failed inside the sandbox. Never one of ours: our paths concern no client."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.errno = error.errno or 0


class Call(Exchange):
    """An open operation on a session; leaving the block cancels what is still running."""

    def __init__(
        self, sessions: Sessions, principal: Principal, session_id: str, call: dict[str, Any]
    ) -> None:
        super().__init__(partial(sessions.open, principal, session_id), call)

    def _failure(self, error: Exception) -> Exception:
        return GuestOSError(error) if isinstance(error, OSError) else error
