"""Header fields of HTTP from somebody who is not trusted. Pure functions.

Names keep the letters that they came with; they are compared without regard to case.
"""

from __future__ import annotations

Headers = list[tuple[bytes, bytes]]

WEBSOCKET = b"websocket"
# What concerns one connection and not the next (RFC 9110, 7.6.1).
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)


def values(headers: Headers, name: bytes) -> list[bytes]:
    """All values of a header, in order."""
    return [value.strip() for key, value in headers if key.lower() == name]


def words(headers: Headers, name: bytes) -> list[bytes]:
    """The parts of a header that is a comma list, in lower case."""
    listed = [part for value in values(headers, name) for part in value.split(b",")]
    return [word for part in listed if (word := part.strip().lower())]


def is_websocket(headers: Headers) -> bool:
    """Whether a request or an answer is about becoming a WebSocket."""
    return b"upgrade" in words(headers, b"connection") and words(headers, b"upgrade") == [WEBSOCKET]


def is_chunked(headers: Headers) -> bool:
    return b"chunked" in words(headers, b"transfer-encoding")


def end_to_end(headers: Headers) -> Headers:
    """Headers without those that are for this connection only."""
    dropped = HOP_BY_HOP.union(words(headers, b"connection"))
    return [item for item in headers if item[0].lower() not in dropped]
