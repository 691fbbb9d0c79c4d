"""How far long work has come, told to whoever asked for it.

The listener travels in a context variable: the work may be done several calls below whoever asked,
and in a task of its own, which inherits the variable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar

STEP = 0.1  # seconds between two reports

Tell = Callable[[int, int], None]


class _Listener:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told = 0.0

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._told + STEP:
            self._told = now
            self._tell(done, total)


_listener: ContextVar[_Listener | None] = ContextVar("listener", default=None)


def listen(tell: Tell) -> None:
    """From now on, in this task and those that it starts, ``tell(done, total)`` hears of it."""
    _listener.set(_Listener(tell))


def progress(done: int, total: int = 0) -> None:
    """So many bytes are done, of ``total`` if that is known."""
    listener = _listener.get()
    if listener is not None:
        listener.progress(done, total)
