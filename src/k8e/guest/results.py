"""Results of code in a context, as they travel in SHOW frames: records, cut into pieces.

They come from a hostile program, so every reader, the gateway too, checks a record's shape before
it unpacks any value: a million tiny values would hold up an event loop.
"""

from __future__ import annotations

from typing import Any

from k8e.guest.wire import CREDIT_BODY, MAX_REPLY, WireError, unpack_dict

MAX_RECORD = 8 * MAX_REPLY
MAX_WAYS = 32  # media types of one result
MAX_TYPE = 100  # characters of a media type
_SHORT = 64 << 10  # bytes of everything in a record but its content


def pack_record(body: bytes) -> bytes:
    """A record as the bytes of SHOW frames."""
    return CREDIT_BODY.pack(len(body)) + body


class ShowRecords:
    """Puts records together; one with a missing part is left out."""

    __slots__ = ("_buffer", "_next")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._next = 0

    def feed(self, seq: int, data: bytes) -> list[dict[str, Any]]:
        """Add ``data``, whose first byte has the number ``seq``; return the completed records."""
        if seq != self._next:
            self._buffer.clear()  # bytes in between were lost; it goes on with a new record
        self._next = seq + len(data)
        self._buffer += data
        found: list[dict[str, Any]] = []
        while len(self._buffer) >= CREDIT_BODY.size:
            end = CREDIT_BODY.size + CREDIT_BODY.unpack_from(self._buffer)[0]
            if end > MAX_RECORD + CREDIT_BODY.size:
                raise WireError("a result that is too large")
            if len(self._buffer) < end:
                break
            found.append(read_record(bytes(self._buffer[CREDIT_BODY.size : end])))
            del self._buffer[:end]
        return found


def read_record(body: bytes) -> dict[str, Any]:
    """``data``, ``main`` and ``left_out`` of one record."""
    check_shape(body, 3)
    record = unpack_dict(body)
    left_out, main = record.get("left_out"), record.get("main")
    if not isinstance(left_out, list) or not isinstance(main, bool):
        raise WireError("a result without its marks")
    if not all(isinstance(kind, str) for kind in left_out):  # pyright: ignore[reportUnknownVariableType]
        raise WireError("a media type that is not text")
    return record


def check_shape(body: bytes, keys: int) -> None:
    """Refuse a dict with more than ``keys`` keys, or with more values than a result has."""
    content_at = _skip_key(body, _skip_count(body, 0, keys), b"data")
    at = _skip_count(body, content_at, MAX_WAYS)
    for _ in range(int.from_bytes(body[content_at + 1 : content_at + 5], "big")):
        at = _skip_bytes(body, _skip_bytes(body, at, b"s"), b"sb")
    if len(body) - at > _SHORT:
        raise WireError("a result with too much about it")


def _skip_count(body: bytes, at: int, most: int) -> int:
    """Skip the head of a dict of at most ``keys`` keys."""
    if body[at : at + 1] != b"d" or int.from_bytes(body[at + 1 : at + 5], "big") > most:
        raise WireError("not a result")
    return at + 5


def _skip_key(body: bytes, at: int, key: bytes) -> int:
    end = _skip_bytes(body, at, b"s")
    if body[at + 5 : end] != key:
        raise WireError("not a result")
    return end


def _skip_bytes(body: bytes, at: int, tags: bytes) -> int:
    """Skip a text or bytes."""
    if not body[at : at + 1] or body[at] not in tags:
        raise WireError("a result that is neither text nor bytes")
    return at + 5 + int.from_bytes(body[at + 1 : at + 5], "big")
