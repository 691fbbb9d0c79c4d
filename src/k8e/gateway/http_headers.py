"""Headers of exposed services, both ways: what must not pass, taken out. Pure functions.

Names keep the letters that they came with; they are compared without regard to case.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

Headers = list[tuple[bytes, bytes]]

TOKEN_PARAMETER = b"k8e-token"
TOKEN_HEADER = b"x-k8e-token"
COOKIE_PREFIX = b"k8e-"
"""Of every cookie of ours. A sandbox neither sees nor sets one, whichever service's it is."""
WEBSOCKET = b"websocket"
# What concerns one connection and not the next (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
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
    dropped = _HOP_BY_HOP.union(words(headers, b"connection"))
    return [item for item in headers if item[0].lower() not in dropped]


# Requests.


def cookies(headers: Headers) -> Iterable[tuple[bytes, bytes]]:
    """The cookies of a request."""
    for value in values(headers, b"cookie"):
        for pair in value.split(b";"):
            name, _, content = pair.strip().partition(b"=")
            yield name.strip(), content.strip()


def without_our_cookies(value: bytes) -> bytes:
    """A Cookie header's value without what is ours; empty if nothing is left."""
    pairs = [pair.strip() for pair in value.split(b";")]
    return b"; ".join(pair for pair in pairs if pair and not _is_ours(pair))


def _is_ours(pair: bytes) -> bool:
    # A cookie without a name is written like its value, which may look like one of ours.
    return pair.strip().lstrip(b"=").strip().lower().startswith(COOKIE_PREFIX)


def tokens_of(target: bytes) -> list[bytes]:
    """The values of our parameter in a request's target."""
    _, _, query = target.partition(b"?")
    pairs = [part.partition(b"=") for part in query.split(b"&")]
    return [unquote_to_bytes(value) for name, _, value in pairs if _is_parameter(name)]


def without_token(target: bytes) -> bytes:
    """A target without our parameter, and else as it was."""
    path, mark, query = target.partition(b"?")
    parts = query.split(b"&")
    kept = [part for part in parts if not _is_parameter(part.partition(b"=")[0])]
    if len(kept) == len(parts):
        return target
    return path + (mark + b"&".join(kept) if kept else b"")


def _is_parameter(name: bytes) -> bool:
    return unquote_to_bytes(name).lower() == TOKEN_PARAMETER


# Answers.


def answer_headers(headers: Headers) -> Headers:
    """What a client gets of a server's headers.

    Pages tell nobody else where they are, unless they say otherwise themselves.
    """
    kept = hint_headers(headers)
    if is_chunked(headers):  # then a length is a lie, by the standard
        kept = [item for item in kept if item[0].lower() != b"content-length"]
    if not values(kept, b"referrer-policy"):
        kept.append((b"Referrer-Policy", b"same-origin"))
    return kept


def hint_headers(headers: Headers) -> Headers:
    """The same, of an answer before the answer."""
    return [item for item in end_to_end(headers) if not _sets_ours(item)]


def _sets_ours(header: tuple[bytes, bytes]) -> bool:
    return header[0].lower() in (b"set-cookie", b"set-cookie2") and _is_ours(header[1])
