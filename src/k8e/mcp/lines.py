"""Messages on a pipe: one JSON object in a line, and no line without end. Pure."""

from __future__ import annotations

MAX_LINE = 16 << 20
"""Bytes of one message, here and in the body of an HTTP request."""


class TooLong(Exception):
    """A line is longer than any message may be; it was skipped."""


class Lines:
    """Cuts bytes into lines; of one that is too long only the fact is kept."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes | TooLong]:
        """The lines that are whole by now, without what ends them."""
        found: list[bytes | TooLong] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._take(data[start:end], found)
            if self._skipping:
                self._skipping = False
            elif self._held.strip():
                found.append(bytes(self._held))
            self._held.clear()
            start = end + 1
        self._take(data[start:], found)
        return found

    def end(self) -> list[bytes | TooLong]:
        """The last line, if nothing ends it."""
        return self.feed(b"\n")

    def _take(self, piece: bytes, found: list[bytes | TooLong]) -> None:
        if self._skipping:
            return
        self._held += piece
        if len(self._held) > self._limit:
            self._held = bytearray()
            self._skipping = True
            found.append(TooLong(f"a message has more than {self._limit} bytes"))
