"""``k8e sandbox run --stdin``: passes our own stdin on while output comes back."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from k8e.guest import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8e.cli.fast import Connection


class Feeder:
    """A thread that reads stdin and sends it, never more than the gateway granted."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()  # one frame at a time: two threads send
        self._granted = threading.Condition()  # protects _credit
        self._credit = wire.WINDOW
        threading.Thread(target=self._feed, daemon=True).start()

    def send(self, kind: int, body: bytes | memoryview) -> None:
        with self._sending:
            self._connection.send(kind, body)

    def grant(self, count: int) -> None:
        with self._granted:
            self._credit += count
            self._granted.notify()

    def move(self, connect: Callable[[], Connection]) -> None:
        """Go on with another connection, whose credit is whole; what is typed meanwhile waits."""
        with self._sending:
            self._connection = connect()
            with self._granted:
                self._credit = wire.WINDOW
                self._granted.notify()

    def _spend(self, count: int) -> None:
        """Wait until so many bytes may be sent."""
        with self._granted:
            self._granted.wait_for(lambda: self._credit >= count)
            self._credit -= count

    def _feed(self) -> None:
        try:
            while data := os.read(0, wire.CHUNK):
                self._spend(len(data))
                self.send(wire.STDIN, data)
            self.send(wire.STDIN_END, b"")
        except OSError:
            return  # the run has ended and its connection with it
