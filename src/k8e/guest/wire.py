"""The bytes that guest, gateway and local clients exchange: frames, and the values inside them.

A frame is a nine-byte header (body length, kind, channel) and a body. A channel is one operation on
one connection, numbered by the end that opens it with CALL. Bodies of CALL, RESULT, ERROR and EXIT
are packed values; the others are raw bytes that are not decoded on the way.

The value format is ours because both ends of the hot path start in milliseconds: ``json`` alone
doubles the start-up of the CLI, and ``marshal`` must never see hostile input. Nothing here trusts
the peer: lengths, depth and types are checked, and every defect is a :class:`WireError`.
"""

# Values have no static type by nature.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from struct import Struct
from struct import error as struct_error

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes longer to import than everything else that the CLI needs
    from typing import Any, Callable

HEADER = Struct("!IBI")
HEADER_SIZE = HEADER.size
SEQ = Struct("!Q")
CREDIT_BODY = Struct("!I")

MAX_REQUEST = 16 << 20
"""Largest body towards a guest or gateway: room for code sent as data."""
MAX_REPLY = 1 << 20
"""Largest body from a guest; it is hostile, so the gateway never buffers more than this at once."""
CHUNK = 256 << 10
"""Bytes in one DATA, OUT, ERR or STDIN frame; below 256 KiB the cost per frame dominates."""
WINDOW = 1 << 20
"""Bytes that may be under way on a channel before the receiver grants more."""
MAX_WINDOW = 4 << 20
"""The most that a receiver may let be under way."""
MAX_CODE = 8 << 20
"""Largest program that can be sent as data; larger ones belong in a file."""

# Opening and feeding an operation.
CALL = 1  # packed {"op": ..., ...}; answered by RESULT or ERROR, then whatever the op streams
STDIN = 2  # bytes for the process
STDIN_END = 3  # no more stdin
CREDIT = 4  # u32: the receiver consumed this many bytes
CANCEL = 5  # the opener is no longer interested
# Either direction, for files and listings.
DATA = 6
END = 7
# Answers.
RESULT = 16
ERROR = 17
OUT = 18  # u64 sequence number of the first byte, then bytes
ERR = 19
EXIT = 20
SHOW = 21  # as OUT; the bytes are records: u32 length, packed {"data": {type: value}, ...}
# From a gateway that stops, on channel 0. u32: the last channel whose call it has read.
GOODBYE = 22
# Handshake.
HELLO = 32
WELCOME = 33
PROOF = 34
# Before that, inside TLS, where a gateway has dialled a pod.
IDENTITY = 35  # u8: whether the guest has a key; then the token of its pod
LINK_KEY = 36  # the key that both have from now on; empty where the guest has one

MAX_DEPTH = 8
MAX_ITEMS = 1 << 16
"""Values in one packed value. They are cheap to send and not to read: a megabyte of them would
hold an event loop, and all its clients, for a second."""
MAX_KEYS = 256  # that are remembered in packed form
_LENGTH = Struct("!BI")
_INT = Struct("!Bq")
_FLOAT = Struct("!Bd")
_keys: dict[str, bytes] = {}


class WireError(Exception):
    """The peer sent bytes that are not of this protocol."""


def frame(kind: int, channel: int, body: bytes = b"") -> bytes:
    """Encode one frame."""
    return HEADER.pack(len(body), kind, channel) + body


def pack(value: Any) -> bytes:
    """Encode None, bool, int, float, bytes, str, list and dict (with str keys)."""
    out: list[Any] = []
    _pack(value, out.append)
    return b"".join(out)


def _pack(value: Any, put: Callable[[Any], object]) -> None:
    # Most of the work that three processes do for a short command is this: the exact types come
    # first.
    kind = type(value)
    if kind is dict:
        put(_LENGTH.pack(100, len(value)))
        for key, item in value.items():
            put(_keys.get(key) or _pack_key(key))
            if item is False:
                put(b"F")
            elif type(item) is int:
                put(_INT.pack(105, item))
            else:
                _pack(item, put)
    elif kind is str:
        put(_pack_text(value))
    elif kind is int:
        put(_INT.pack(105, value))
    elif kind is list or kind is tuple:
        put(_LENGTH.pack(108, len(value)))
        for item in value:
            _pack(item, put)
    else:
        _pack_other(value, put)


def _pack_other(value: Any, put: Callable[[Any], object]) -> None:
    if value is None:
        put(b"N")
    elif value is True:
        put(b"T")
    elif value is False:
        put(b"F")
    elif type(value) is float:
        put(_FLOAT.pack(102, value))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        put(_LENGTH.pack(98, len(value)))
        put(value)
    else:
        _pack(_plain(value), put)


def _plain(value: Any) -> Any:
    """A value of a subclass, such as an enumeration, as its plain base type."""
    if isinstance(value, str):
        return value + ""
    if isinstance(value, int):
        return value + 0
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return list(value)
    raise TypeError("cannot pack " + type(value).__name__)


def _pack_text(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = text.encode("utf-8", "surrogateescape")
    return _LENGTH.pack(115, len(data)) + data


def _pack_key(key: Any) -> bytes:
    """Encode a key; nearly all are words of this protocol, and come again with each call."""
    if not isinstance(key, str):
        raise TypeError("cannot pack a key that is " + type(key).__name__)
    packed = _pack_text(key)
    if len(_keys) < MAX_KEYS and len(packed) < 32:
        _keys[key] = packed
    return packed


def extended(data: bytes, more: dict[str, Any]) -> bytes:
    """A packed dict with more in it, which wins where both have a key."""
    known = unpack_dict(data)  # all of it: the last item could claim what comes after it
    head = _LENGTH.pack(100, _LENGTH.unpack_from(data)[1] + len(more))
    return head + data[_LENGTH.size :] + pack(more)[_LENGTH.size :] if known else pack(more)


def unpack(data: bytes, most: int = MAX_ITEMS) -> Any:
    """Decode one packed value of at most ``most`` items that must fill ``data`` exactly."""
    try:
        value, end = _unpack(data, 0, 0, [most])
    except (struct_error, IndexError, UnicodeDecodeError) as error:
        raise WireError("malformed value: " + str(error)) from None
    if end != len(data):
        raise WireError("bytes after the value")
    return value


def unpack_dict(data: bytes, most: int = MAX_ITEMS) -> dict[str, Any]:
    """Decode a packed value that must be a dict."""
    value = unpack(data, most)
    if not isinstance(value, dict):
        raise WireError("expected a dict, got " + type(value).__name__)
    return value


def _unpack(data: bytes, at: int, depth: int, left: list[int]) -> tuple[Any, int]:
    tag = data[at]
    if tag == 105:
        return _INT.unpack_from(data, at)[1], at + 9
    if tag == 70:
        return False, at + 1
    if tag == 84:
        return True, at + 1
    if tag == 78:
        return None, at + 1
    if tag == 102:
        return _FLOAT.unpack_from(data, at)[1], at + 9
    length = _LENGTH.unpack_from(data, at)[1]
    at += 5
    # Items take at least one byte each, so a length beyond the data is a lie in every case.
    if length > len(data) - at:
        raise WireError("length beyond the data")
    if tag == 115:
        return data[at : at + length].decode("utf-8", "surrogateescape"), at + length
    if tag == 98:
        return bytes(data[at : at + length]), at + length
    left[0] -= length
    if depth >= MAX_DEPTH or left[0] < 0:
        raise WireError("nested too deeply, or of too many values")
    if tag == 108:
        return _unpack_list(data, at, length, depth + 1, left)
    if tag == 100:
        return _unpack_dict(data, at, length, depth + 1, left)
    raise WireError(f"unknown tag {tag}")


def _unpack_list(
    data: bytes, at: int, length: int, depth: int, left: list[int]
) -> tuple[list[Any], int]:
    items: list[Any] = []
    for _ in range(length):
        item, at = _unpack(data, at, depth, left)
        items.append(item)
    return items, at


def _unpack_dict(
    data: bytes, at: int, length: int, depth: int, left: list[int]
) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    head, end = _LENGTH.unpack_from, len(data)
    for _ in range(length):
        # As in _unpack, without the calls: half of all values are keys, and most others are these.
        tag, size = head(data, at)
        if tag != 115:
            raise WireError("a key that is not text")
        at += 5 + size
        key = data[at - size : at].decode("utf-8", "surrogateescape")
        tag = data[at]  # fails where the key was beyond the data
        if tag == 105:
            items[key] = _INT.unpack_from(data, at)[1]
            at += 9
        elif tag == 70:
            items[key] = False
            at += 1
        elif tag == 115:
            size = head(data, at)[1]
            at += 5 + size
            if at > end:
                raise WireError("length beyond the data")
            items[key] = data[at - size : at].decode("utf-8", "surrogateescape")
        else:
            items[key], at = _unpack(data, at, depth, left)
    return items, at


class Splitter:
    """Cuts a byte stream into frames; feed it bytes, iterate over ``(kind, channel, body)``."""

    __slots__ = ("_buffer", "_limit")

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes | memoryview) -> list[tuple[int, int, bytes]]:
        """Return the frames that ``data`` completes; raises WireError on an oversized one."""
        return self.take(data, len(data) + 1)[0]

    def take(
        self, data: bytes | memoryview, most: int
    ) -> tuple[list[tuple[int, int, bytes]], memoryview | None]:
        """Up to ``most`` of the frames that ``data`` completes, and the rest of it if more."""
        frames: list[tuple[int, int, bytes]] = []
        at, end = 0, len(data)
        if self._buffer:
            at = self._complete(data, frames)
        while end - at >= HEADER_SIZE:
            if len(frames) >= most:
                return frames, memoryview(data)[at:]
            length, kind, channel = self._header(data, at)
            stop = at + HEADER_SIZE + length
            if stop > end:
                break
            frames.append((kind, channel, bytes(data[at + HEADER_SIZE : stop])))
            at = stop
        if at < end:
            self._buffer += memoryview(data)[at:]
        return frames, None

    def _complete(self, data: bytes | memoryview, frames: list[tuple[int, int, bytes]]) -> int:
        """Complete the frame that has begun; return how much of ``data`` that took."""
        buffer = self._buffer
        at = max(0, HEADER_SIZE - len(buffer))
        buffer += data[:at]
        if len(buffer) < HEADER_SIZE:
            return len(data)
        length, kind, channel = self._header(buffer, 0)
        lacking = HEADER_SIZE + length - len(buffer)
        buffer += memoryview(data)[at : at + lacking]
        if len(buffer) == HEADER_SIZE + length:
            with memoryview(buffer) as view:
                frames.append((kind, channel, bytes(view[HEADER_SIZE:])))
            buffer.clear()
        return min(len(data), at + lacking)

    def _header(self, data: bytes | bytearray | memoryview, at: int) -> tuple[int, int, int]:
        header = HEADER.unpack_from(data, at)
        if header[0] > self._limit:
            raise WireError(f"frame of {header[0]} bytes; the limit is {self._limit}")
        return header


def numbered(body: bytes) -> tuple[int, bytes]:
    """The number of the first byte of an OUT, ERR or SHOW, and its bytes."""
    if len(body) <= SEQ.size:
        raise WireError("a frame without bytes")
    return SEQ.unpack_from(body)[0], body[SEQ.size :]


def proof(key: bytes, nonce: bytes, role: bytes) -> bytes:
    """The answer of an end that knows ``key`` to the other end's ``nonce``."""
    # _blake2 is what hashlib wraps; importing hashlib itself would load OpenSSL into every guest.
    from _blake2 import blake2b

    return blake2b(role + nonce, key=key, digest_size=32).digest()


def equal(one: bytes, other: bytes) -> bool:
    """Compare two secrets in constant time (``hmac.compare_digest`` without importing hmac)."""
    from _operator import _compare_digest  # pyright: ignore[reportPrivateUsage]

    return _compare_digest(one, other)
