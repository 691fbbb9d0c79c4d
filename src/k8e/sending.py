"""Sending frames: what arrived together is answered together, and then comes what can wait."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from k8e.guest import wire

log = logging.getLogger(__name__)

MAX_PUT_OFF = 8
"""Frames that wait for the end of a batch; with more of them the other side may begin."""


class Batch(threading.local):
    """What arrived together is answered together: each send is a system call that wakes somebody.

    Whoever handles input does so in a batch, and what is sent meanwhile is put off to its end.
    Outside of one nothing is. Each thread, and so each event loop, has its own.
    """

    def __init__(self) -> None:
        self._open = False
        self._later: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *_: object) -> None:
        self._open = False
        later, self._later = self._later, []
        for work in later:
            try:
                work()
            except Exception:  # of one operation; the others have nothing to do with it
                log.exception("what was put off failed")

    def afterwards(self, work: Callable[[], None]) -> None:
        if self._open:
            self._later.append(work)
        else:
            work()


batch = Batch()


class Outgoing:
    """Frames on their way into a connection."""

    __slots__ = ("_frames", "transport")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._frames: list[bytes] = []

    def send(self, kind: int, channel: int, body: bytes) -> None:
        self._frames += (wire.HEADER.pack(len(body), kind, channel), body)
        if len(self._frames) == 2:
            batch.afterwards(self._flush)
        elif len(self._frames) >= 2 * MAX_PUT_OFF:
            self._flush()

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and self.transport is not None and not self.transport.is_closing():
            self.transport.writelines(frames)

    @property
    def unread(self) -> int:
        """Bytes that the other side has not taken yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0
