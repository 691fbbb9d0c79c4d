"""Execs on their way to a guest that nobody has noted yet, in memory that outlives the gateway.

To write down who runs what takes as long as all else that a gateway does for a short command. So
it is done while the guest starts the command, and until then the call stays here: whoever is
killed in between leaves it to the next gateway, which writes it down.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from k8e.audit.acting import Act, Caller

SIZE = 64 << 10
_USED = Struct("=Q")
_ENTRY = Struct("=II")  # bytes of its head and of its body
_SEPARATOR = "\0"


class Intent(NamedTuple):
    """An exec that was perhaps sent."""

    act: Act | None
    """On whose behalf."""
    session_id: str
    body: bytes
    """The call, as the guest gets it."""


class Intents:
    """The execs of all sessions of a gateway; used on its event loop alone."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            os.ftruncate(fd, SIZE)
            os.posix_fallocate(fd, 0, SIZE)  # a full disk must not become a signal later
            self._memory = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
        self._end = min(max(_USED.unpack_from(self._memory)[0], _USED.size), SIZE)
        self._waiting = 0

    def left(self) -> Iterator[Intent]:
        """What a gateway before us has not noted; call ``forget`` when that is done."""
        at, end = _USED.size, self._end
        while at + _ENTRY.size <= end:
            head, body = _ENTRY.unpack_from(self._memory, at)
            at += _ENTRY.size + head + body
            if at > end:
                return
            told = self._memory[at - head - body : at - body].decode("utf-8", "replace")
            yield _read(told, self._memory[at - body : at])

    def forget(self) -> None:
        self._end = _USED.size
        _USED.pack_into(self._memory, 0, self._end)

    def keep(
        self, act: Act | None, session_id: str, body: bytes, note: Callable[[], None]
    ) -> Callable[[], None]:
        """Keep a call until the answer is called, which notes it; if it is too long, do so now."""
        told = _SEPARATOR.join((session_id, *(act.caller if act is not None else ())))
        head = told.encode("utf-8", "replace")
        entry = _ENTRY.pack(len(head), len(body)) + head + body
        at, end = self._end, self._end + len(entry)
        if end > SIZE:
            note()
            return _nothing
        self._memory[at:end] = entry
        # Only now, so that whatever is counted is whole.
        _USED.pack_into(self._memory, 0, end)
        self._end = end
        self._waiting += 1

        def noted() -> None:
            try:
                note()
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self.forget()

        return noted

    def close(self) -> None:
        self._memory.close()


def _nothing() -> None:
    pass


def _read(told: str, body: bytes) -> Intent:
    session_id, *who = told.split(_SEPARATOR)
    act = Act(Caller(*who), "exec", session_id) if len(who) == len(Caller._fields) else None
    return Intent(act, session_id, body)
