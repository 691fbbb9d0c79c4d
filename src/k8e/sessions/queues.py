"""Frames that wait for somebody, in hardly more memory than they had on the wire.

Credit counts bytes, and a hostile guest sends one in each frame: as objects, a megabyte of these
takes 150. So small frames wait as the bytes that they came as.
"""

from __future__ import annotations

from collections import deque

from k8e.guest import wire

SMALL = 2 << 10  # bytes of a body that is rather copied than kept as an object
TOGETHER = 64 << 10  # bytes of small frames in one piece

Frame = tuple[int, int, bytes]


class FrameQueue:
    """Kind, channel and body of frames; the first that was put is the first to be taken."""

    __slots__ = ("_at", "_items", "size")

    def __init__(self) -> None:
        self._items: deque[Frame | bytearray] = deque()
        self._at = 0  # in the first item, where that is a piece
        self.size = 0
        """Bytes on the wire of all that wait."""

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, kind: int, channel: int, body: bytes) -> None:
        self.size += wire.HEADER_SIZE + len(body)
        if len(body) > SMALL or not self._items:  # one that waits alone needs no copy
            self._items.append((kind, channel, body))
            return
        piece = self._items[-1]
        if not isinstance(piece, bytearray) or len(piece) >= TOGETHER:
            piece = bytearray()
            self._items.append(piece)
        piece += wire.HEADER.pack(len(body), kind, channel)
        piece += body

    def take(self) -> Frame:
        """The next frame; there must be one."""
        first = self._items[0]
        if isinstance(first, bytearray):
            length, kind, channel = wire.HEADER.unpack_from(first, self._at)
            start = self._at + wire.HEADER_SIZE
            self._at = start + length
            frame = (kind, channel, bytes(memoryview(first)[start : self._at]))
            if self._at == len(first):
                self._items.popleft()
                self._at = 0
        else:
            frame = first
            self._items.popleft()
        self.size -= wire.HEADER_SIZE + len(frame[2])
        return frame

    def next_size(self) -> int:
        """Bytes on the wire of the next frame; there must be one."""
        first = self._items[0]
        if isinstance(first, bytearray):
            return wire.HEADER_SIZE + wire.HEADER.unpack_from(first, self._at)[0]
        return wire.HEADER_SIZE + len(first[2])
