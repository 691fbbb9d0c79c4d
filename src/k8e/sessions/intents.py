"""Execs on their way to a guest that nobody has noted yet, in memory that outlives the gateway.

To write down who runs what takes as long as all else that a gateway does for a short command. So
it is done while the guest starts the command, and until then the call stays here: whoever is
killed in between leaves it to the next gateway, which writes it down.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from k8e.audit.acting import Act, Caller

log = logging.getLogger(__name__)

SIZE = 64 << 10
_USED = Struct("=Q")
_ENTRY = Struct("=II")  # bytes of its head and of its body
_SEPARATOR = "\0"


class Intent(NamedTuple):
    """An exec that was perhaps sent."""

    act: Act | None
    """On whose behalf."""
    session_id: str
    seq: int
    """The number of the newest event of the session by then."""
    body: bytes
    """The call, as the guest gets it."""


class Intents:
    """The execs of all sessions of a gateway; used on its event loop alone."""

    def __init__(self, path: Path) -> None:
        self._memory: mmap.mmap | None = None
        self._end = _USED.size
        self._waiting = 0
        try:
            self._memory = _map(path)
        except OSError as error:  # then everything is noted before it is sent
            log.warning("execs begin a little later: %s cannot be had: %s", path, error)
            return
        self._end = min(max(_USED.unpack_from(self._memory)[0], _USED.size), SIZE)

    def left(self) -> Iterator[Intent]:
        """What a gateway before us has not noted; call ``forget`` when that is done."""
        at, end = _USED.size, self._end
        while self._memory is not None and at + _ENTRY.size <= end:
            head, body = _ENTRY.unpack_from(self._memory, at)
            at += _ENTRY.size + head + body
            if at > end:
                return
            told = self._memory[at - head - body : at - body].decode("utf-8", "replace")
            yield _read(told, self._memory[at - body : at])

    def forget(self, end: int = 0) -> None:
        """All was noted: nothing is left, least of all somebody's code; up to ``end`` if given."""
        if self._memory is not None:
            end = end or self._end
            _USED.pack_into(self._memory, 0, _USED.size)
            self._memory[_USED.size : end] = bytes(end - _USED.size)
            self._end = _USED.size

    def keep(
        self, act: Act | None, session_id: str, seq: int, body: bytes, note: Callable[[], None]
    ) -> Callable[[], None]:
        """Keep a call until the answer is called, which notes it; if it is too long, do so now."""
        told = _SEPARATOR.join((session_id, str(seq), *(act.caller if act is not None else ())))
        head = told.encode("utf-8", "replace")
        entry = _ENTRY.pack(len(head), len(body)) + head + body
        at, end = self._end, self._end + len(entry)
        if self._memory is None or end > SIZE:
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
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _map(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, SIZE)
        os.posix_fallocate(fd, 0, SIZE)  # a full disk must not become a signal later
        return mmap.mmap(fd, SIZE)
    finally:
        os.close(fd)


def _nothing() -> None:
    pass


def _read(told: str, body: bytes) -> Intent:
    session_id, _, rest = told.partition(_SEPARATOR)
    seq, *who = rest.split(_SEPARATOR)
    act = Act(Caller(*who), "exec", session_id) if len(who) == len(Caller._fields) else None
    return Intent(act, session_id, int(seq) if seq.isdecimal() and len(seq) < 19 else 0, body)
