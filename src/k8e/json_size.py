"""The number of values in a JSON text, counted before it is parsed.

A few megabytes can be millions of empty lists: parsing them takes seconds, in which no other client
is served, and a hundred times their size in memory. Bytes alone do not bound that.
"""

from __future__ import annotations

MAX_VALUES = 20_000
"""Of one message, about; what tools take has a few hundred at the most."""
_PIECE = 64 << 10


class JsonSize:
    """Counts strings, lists, mappings and commas of a text that comes in pieces."""

    def __init__(self) -> None:
        self.values = 0
        self._in_string = False
        self._escaped = False

    @property
    def too_large(self) -> bool:
        return self.values > MAX_VALUES

    def feed(self, piece: bytes) -> None:
        """Count what begins in this piece: all of it in C, since pieces may be large."""
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        piece = piece.replace(b"\\\\", b"")
        if piece.endswith(b"\\"):
            self._escaped = True
        parts = piece.replace(b'\\"', b"").split(b'"')
        between = b"".join(parts[1::2] if self._in_string else parts[::2])
        begun = (len(parts) - self._in_string) // 2
        self.values += begun + sum(map(between.count, (b",", b"[", b"{")))
        self._in_string ^= len(parts) % 2 == 0


def is_too_large(text: bytes) -> bool:
    """Whether a whole text has more values than a message may."""
    size = JsonSize()
    for start in range(0, len(text), _PIECE):
        size.feed(text[start : start + _PIECE])
        if size.too_large:
            return True
    return False
