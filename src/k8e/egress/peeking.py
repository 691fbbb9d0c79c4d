"""What a client says first on a connection, read without trust: TLS's hello or HTTP's request.

Everything here is pure. The parsers see the bytes that have come so far; they answer None until
these are enough, and more bytes never change an answer. What is ambiguous is refused, because the
server might read it in another way than we do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from k8e.egress import requests
from k8e.egress.requests import HOST, NOT_CHECKABLE, NotHttp, Request, Unreadable, host_name

TLS, HTTP = "tls", "http"
PEEK_LIMIT = 64 * 1024
MAX_RECORDS = 16  # that one ClientHello may be cut into
MAX_BETWEEN = 64  # records between two hellos

_HANDSHAKE, _RECORD_HEADER, _MAX_RECORD = 22, 5, 1 << 14
_BETWEEN_HELLOS = (20, 21, 23)  # change of cipher, alert, early data
_SERVER_NAME = 0
_ENCRYPTED_HELLO = (0xFE0D, 0xFFCE)  # ECH, and ESNI before it
# The random number of a ServerHello that asks for another ClientHello (RFC 8446, 4.1.3).
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")


@dataclass(frozen=True)
class Said:
    """What a client said: a name, or why there is none that could be trusted."""

    protocol: str
    """``tls``, ``http``, or empty for anything else."""
    name: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Peeked:
    """What was said, and how many bytes it took."""

    said: Said
    length: int = 0
    request: Request | None = None


def peek(data: bytes, port: int) -> Peeked | None:
    """What a client said that connected to ``port``; None until it said enough."""
    data = data[:PEEK_LIMIT]
    if not data:
        return None
    protocol, read = (TLS, _tls) if data[0] == _HANDSHAKE else ("", _other)
    if requests.METHOD.match(data):
        protocol, read = HTTP, _http
    try:
        found = read(data, port)
    except Unreadable as error:
        return Peeked(Said("" if isinstance(error, NotHttp) else protocol, reason=str(error)))
    if found is None and len(data) == PEEK_LIMIT:
        return Peeked(Said(protocol, reason=f"its beginning is longer than {PEEK_LIMIT} bytes"))
    return found


def timed_out(data: bytes) -> Said:
    """What is to be said of a client that did not say enough in time."""
    if not data:
        return Said("", reason=f"the client said nothing; {NOT_CHECKABLE}")
    return Said(_protocol(data), reason="the client did not finish its first message")


def in_pieces(data: bytes) -> Said:
    """What is to be said of a client whose message comes in too many pieces."""
    return Said(_protocol(data), reason="its first message comes in too many small pieces")


def _protocol(data: bytes) -> str:
    return TLS if data[0] == _HANDSHAKE else HTTP if requests.METHOD.match(data) else ""


def _other(data: bytes, _port: int) -> Peeked | None:
    if data[0] & 0x80:
        if len(data) < 3:
            return None
        if data[2] == 1:
            raise Unreadable("an SSLv2 hello has no server name")
    raise Unreadable(NOT_CHECKABLE)


def _http(data: bytes, port: int) -> Peeked | None:
    found = requests.read(data, port)
    if found is None:
        return None
    request, length = found
    return Peeked(Said(HTTP, request.name), length, request)


def _tls(data: bytes, _port: int) -> Peeked | None:
    joined = _join_hello(data)
    if joined is None:
        return None
    message, length = joined
    return Peeked(Said(TLS, _server_name(message)), length)


def _join_hello(data: bytes) -> tuple[bytes, int] | None:
    """The ClientHello out of its records, and the length of these."""
    message = bytearray()
    at = 0
    for _ in range(MAX_RECORDS):
        header = data[at : at + _RECORD_HEADER]
        if len(header) < _RECORD_HEADER:
            return None
        length = int.from_bytes(header[3:], "big")
        if header[0] != _HANDSHAKE or header[1] != 3 or not 0 < length <= _MAX_RECORD:
            raise Unreadable("its TLS records are malformed")
        at += _RECORD_HEADER + length
        if len(data) < at:
            return None
        message += data[at - length : at]
        if message[0] != 1:
            raise Unreadable("it does not begin with a TLS hello")
        if len(message) < 4:
            continue
        whole = 4 + int.from_bytes(message[1:4], "big")
        if whole > PEEK_LIMIT:
            raise Unreadable(f"its TLS hello is longer than {PEEK_LIMIT} bytes")
        if len(message) > whole:
            raise Unreadable("something is hidden behind its TLS hello")
        if len(message) == whole:
            return bytes(message), at
    raise Unreadable(f"its TLS hello is cut into more than {MAX_RECORDS} records")


class _Reader:
    """Takes fields off a message; whatever is cut short is unreadable."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise Unreadable("its TLS hello is malformed")
        found, self._at = self._data[self._at : end], end
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def field(self, size: int) -> bytes:
        """A field behind its length, which is ``size`` bytes long."""
        return self.take(self.number(size))

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)


def _server_name(message: bytes) -> str:
    """The one name in a whole ClientHello."""
    reader = _Reader(message)
    reader.take(4)
    if not 0x0300 <= reader.number(2) <= 0x0304:
        raise Unreadable("its TLS version is unknown")
    reader.take(32)
    reader.field(1)  # session
    reader.field(2)  # ciphers
    reader.field(1)  # compression
    if reader.at_end:
        raise Unreadable("its TLS hello has no server name")
    found = _extensions(reader.field(2))
    if not reader.at_end:
        raise Unreadable("its TLS hello is malformed")
    if any(kind in found for kind in _ENCRYPTED_HELLO):
        raise Unreadable("its TLS hello is encrypted (ECH), which hides the server name")
    if _SERVER_NAME not in found:
        raise Unreadable("its TLS hello has no server name")
    names = _Reader(found[_SERVER_NAME])
    entries = _Reader(names.field(2))
    kind, raw = entries.number(1), entries.field(2)
    if kind != 0 or not entries.at_end or not names.at_end or raw.endswith(b"."):
        raise Unreadable("its TLS hello has more or other than one server name")
    match = HOST.fullmatch(raw)
    if match is None or match[2] is not None:
        raise Unreadable("its TLS server name is not a host name")
    return host_name(match[1])


def _extensions(data: bytes) -> dict[int, bytes]:
    reader = _Reader(data)
    found: dict[int, bytes] = {}
    while not reader.at_end:
        kind = reader.number(2)
        if kind in found:
            raise Unreadable("its TLS hello says the same thing twice")
        found[kind] = reader.field(2)
    return found


def asks_again(answer: bytes) -> bool | None:
    """Whether a server's answer asks for a second ClientHello; None until that can be told.

    Records without content, which TLS forbids, could be read for ever. They count as asking, so
    that nothing goes on unchecked.
    """
    message = b""
    at = 0
    while at + _RECORD_HEADER <= len(answer) and len(message) < 38:
        if answer[at] != _HANDSHAKE:
            return False
        start = at + _RECORD_HEADER
        at = start + int.from_bytes(answer[at + 3 : start], "big")
        if at == start:
            return True
        message += answer[start:at]
    if len(message) >= 38:
        return message[0] == 2 and message[6:38] == _RETRY
    return False if answer and answer[0] != _HANDSHAKE else None


def peek_again(data: bytes, port: int) -> Peeked | None:
    """The second ClientHello, which could name another host than the first."""
    data = data[:PEEK_LIMIT]
    at = records = 0
    while at + _RECORD_HEADER <= len(data) and data[at] in _BETWEEN_HELLOS:
        at += _RECORD_HEADER + int.from_bytes(data[at + 3 : at + _RECORD_HEADER], "big")
        records += 1
        if records > MAX_BETWEEN:
            return Peeked(Said(TLS, reason="its second TLS hello does not come"))
    found = peek(data[at:], port) if at < len(data) and data[at] not in _BETWEEN_HELLOS else None
    if found is None and len(data) == PEEK_LIMIT:
        return Peeked(Said(TLS, reason="its second TLS hello does not come"))
    return replace(found, length=found.length + at) if found is not None else None
