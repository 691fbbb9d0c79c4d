"""First bytes of a connection, read without trust: TLS hello or HTTP request.

Everything here is pure. The parsers see the bytes that have come so far; they answer None until
these are enough, and more bytes never change an answer. What is ambiguous is refused, because the
server might read it in another way than we do.

What is ambiguous is refused: two lengths, two hosts, stray line ends, folded lines. Everything here
is pure; answers are None until there are enough bytes, and more bytes never change them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from k8e import errors
from k8e.egress.policy import normalise

MAX_HEADERS = 128
MAX_CHUNK_LINE = 4096
NOT_CHECKABLE = "only TLS and HTTP can be checked in strict mode"

HTTP_METHOD = re.compile(rb"[A-Z][A-Z_-]{0,31}(?: |\Z)")
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z_-]{0,31}) ([\x21-\x7e]+) HTTP/(\d\.\d)")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
HOST = re.compile(rb"([A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(rb"http://([^/?#]*)(.*)", re.IGNORECASE)
_NUMBER = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
# Headers of one connection. Ours carries one request, so that no second one goes elsewhere.
_HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"http2-settings")
)


class UnreadableRequest(Exception):
    """The first bytes cannot be judged; the text says why."""


class NotHttp(UnreadableRequest):
    """It only began like an HTTP request."""


@dataclass(frozen=True)
class HttpHead:
    """The head of an HTTP request."""

    method: bytes
    target: bytes
    version: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    name: str
    """The host's, as policies know it."""
    host: bytes
    """Name and port, as they go to the server."""
    body: int | None
    """How many bytes follow; None where they come in chunks."""


def host_name(raw: bytes) -> str:
    """A name as policies have it; an address does not count."""
    try:
        name = normalise(raw.decode("ascii"))
    except errors.InvalidRequest:
        raise UnreadableRequest("it does not say a valid host name") from None
    last = name.rpartition(".")[2]
    if last.isdigit() or last.startswith("0x"):
        raise UnreadableRequest("it says an address instead of a host name")
    return name


def read_head(data: bytes, port: int) -> tuple[HttpHead, int] | None:
    """The request of a client that connected to ``port``, and the length of its head."""
    line_end = data.find(b"\n") + 1
    _refuse_strays(data[: line_end or len(data)])
    if not line_end:
        return None
    line = _request_line(data[: line_end - 2])
    end = data.find(b"\r\n\r\n", line_end - 2)
    head = data[line_end:] if end < 0 else data[line_end : end + 2]
    _refuse_strays(head)
    if head.count(b"\r\n") > MAX_HEADERS:  # before any of them is looked at
        raise UnreadableRequest(f"its HTTP head has more than {MAX_HEADERS} lines")
    if end < 0:
        return None
    headers = tuple(_header(item) for item in head.split(b"\r\n")[:-1])
    return _request(line, headers, port), end + 4


def _refuse_strays(data: bytes) -> None:
    """Refuse bare CR or LF, and NULs; a regular expression would take thirty times as long."""
    lines = data.count(b"\r\n")
    whole = data.count(b"\n") == lines == data.count(b"\r") - data.endswith(b"\r")
    if not whole or b"\0" in data:
        raise UnreadableRequest("its HTTP head has stray control characters")


def _request_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    if b" HTTP/" not in line:
        raise NotHttp(NOT_CHECKABLE)
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise UnreadableRequest("its HTTP request line is malformed")
    method, target, version = match.groups()
    if method == b"PRI" or version == b"2.0":
        raise UnreadableRequest("HTTP/2 without TLS cannot be checked in strict mode")
    if method == b"CONNECT":
        raise UnreadableRequest("HTTP's CONNECT opens a tunnel to anywhere")
    if version not in (b"1.0", b"1.1"):
        raise UnreadableRequest("its HTTP version is unknown")
    return method, target, version


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    # This covers folded lines and blanks before the colon.
    if not colon or not _TOKEN.fullmatch(name) or _CONTROL.search(value):
        raise UnreadableRequest("its HTTP head has a malformed line")
    return name, value.strip(b" \t")


def _request(
    line: tuple[bytes, bytes, bytes], headers: tuple[tuple[bytes, bytes], ...], port: int
) -> HttpHead:
    method, target, version = line
    values: dict[bytes, list[bytes]] = {}
    for key, value in headers:
        values.setdefault(key.lower(), []).append(value)
    if b"upgrade" in values:
        raise UnreadableRequest(
            "HTTP's Upgrade leads to a protocol that cannot be checked in strict mode"
        )
    hosts = values.get(b"host", [])
    if len(hosts) != 1:
        raise UnreadableRequest("it has more than one Host" if hosts else "it has no Host")
    name, host = _authority(hosts[0], port)
    if absolute := _ABSOLUTE.fullmatch(target):
        if _authority(absolute[1], port)[0] != name:
            raise UnreadableRequest("its target and its Host differ")
        target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
    elif not target.startswith(b"/") and (method, target) != (b"OPTIONS", b"*"):
        raise UnreadableRequest("its target is not a path")
    return HttpHead(method, target, version, headers, name, host, _body(values, version))


def _authority(raw: bytes, port: int) -> tuple[str, bytes]:
    """The name in ``name:port``, and both as they go to the server."""
    match = HOST.fullmatch(raw)
    if match is None:
        raise UnreadableRequest("its Host is not a host name")
    name = host_name(match[1])
    if match[2] is None:
        return name, name.encode()
    if int(match[2]) != port:
        raise UnreadableRequest("its Host says another port than it connects to")
    return name, f"{name}:{port}".encode()


def _body(values: dict[bytes, list[bytes]], version: bytes) -> int | None:
    coding, length = values.get(b"transfer-encoding"), values.get(b"content-length")
    if coding is None and length is None:
        return 0
    if length is None:
        if coding is None or len(coding) != 1 or coding[0].lower() != b"chunked":
            raise UnreadableRequest("its Transfer-Encoding is not just chunked")
        if version == b"1.0":
            raise UnreadableRequest("HTTP/1.0 has no Transfer-Encoding")
        return None
    if coding is not None or len(length) != 1 or not _NUMBER.fullmatch(length[0]):
        raise UnreadableRequest("the length of its body is ambiguous")
    return int(length[0])


def rewrite(request: HttpHead) -> bytes:
    """The head as it goes to the server: for one request, and to the host that was judged.

    Every request passes here; this is where a brokered secret will be put into its header.
    """
    lines = [b"%s %s HTTP/%s" % (request.method, request.target, request.version)]
    lines.append(b"Host: " + request.host)
    for name, value in request.headers:
        if name.lower() != b"host" and name.lower() not in _HOP_HEADERS:
            lines.append(name + b": " + value)
    lines += [b"Connection: close", b"", b""]
    return b"\r\n".join(lines)


class Chunked:
    """Follows a chunked body to its end, however it is cut into pieces."""

    def __init__(self) -> None:
        self.done = False
        self.lines = 0
        """How many it has had: what takes time of it."""
        self._left = 0
        self._line = bytearray()
        self._next = "size"
        """What the next line is: ``size``, the ``end`` of a chunk's data, or a ``trailer``."""
        self._trailers = 0

    def feed(self, data: bytes) -> int:
        """How many of the next bytes belong to the body; UnreadableRequest if it is malformed."""
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                count = min(self._left, len(data) - at)
                self._left -= count
                at += count
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            at = end or len(data)
            if len(self._line) > MAX_CHUNK_LINE:
                raise UnreadableRequest("its chunked body is malformed")
            if end:
                line = bytes(self._line)
                self._line.clear()
                self._on_line(line)
        return at

    def _on_line(self, line: bytes) -> None:
        text = line[:-2]
        self.lines += 1
        if not line.endswith(b"\r\n") or (self._next == "end" and text):
            raise UnreadableRequest("its chunked body is malformed")
        if self._next == "end":
            self._next = "size"
        elif self._next == "size":
            # Extensions are refused too: servers differ about where they end.
            if not _CHUNK_SIZE.fullmatch(text):
                raise UnreadableRequest("its chunked body is malformed")
            self._left = int(text, 16)
            self._next = "end" if self._left else "trailer"
        elif text:
            _header(text)
            self._trailers += 1
            if self._trailers > MAX_HEADERS:
                raise UnreadableRequest("its chunked body is malformed")
        else:
            self.done = True


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
    """The name that a client gave, or why there is none that can be trusted."""

    protocol: str
    """``tls``, ``http``, or empty for anything else."""
    name: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Peeked:
    """The result, and how many bytes it took."""

    said: Said
    length: int = 0
    request: HttpHead | None = None


def peek(data: bytes, port: int) -> Peeked | None:
    """Judge the first bytes of a client that connected to ``port``; None until there are enough."""
    data = data[:PEEK_LIMIT]
    if not data:
        return None
    protocol, read = (TLS, _tls) if data[0] == _HANDSHAKE else ("", _other)
    if HTTP_METHOD.match(data):
        protocol, read = HTTP, _http
    try:
        found = read(data, port)
    except UnreadableRequest as error:
        return Peeked(Said("" if isinstance(error, NotHttp) else protocol, reason=str(error)))
    if found is None and len(data) == PEEK_LIMIT:
        return Peeked(Said(protocol, reason=f"its beginning is longer than {PEEK_LIMIT} bytes"))
    return found


def timed_out(data: bytes) -> Said:
    """The error for a client that did not send enough in time."""
    if not data:
        return Said("", reason=f"the client said nothing; {NOT_CHECKABLE}")
    return Said(_protocol(data), reason="the client did not finish its first message")


def in_pieces(data: bytes) -> Said:
    """The error for a client whose message comes in too many pieces."""
    return Said(_protocol(data), reason="its first message comes in too many small pieces")


def _protocol(data: bytes) -> str:
    return TLS if data[0] == _HANDSHAKE else HTTP if HTTP_METHOD.match(data) else ""


def _other(data: bytes, _port: int) -> Peeked | None:
    if data[0] & 0x80:
        if len(data) < 3:
            return None
        if data[2] == 1:
            raise UnreadableRequest("an SSLv2 hello has no server name")
    raise UnreadableRequest(NOT_CHECKABLE)


def _http(data: bytes, port: int) -> Peeked | None:
    found = read_head(data, port)
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
            raise UnreadableRequest("its TLS records are malformed")
        at += _RECORD_HEADER + length
        if len(data) < at:
            return None
        message += data[at - length : at]
        if message[0] != 1:
            raise UnreadableRequest("it does not begin with a TLS hello")
        if len(message) < 4:
            continue
        whole = 4 + int.from_bytes(message[1:4], "big")
        if whole > PEEK_LIMIT:
            raise UnreadableRequest(f"its TLS hello is longer than {PEEK_LIMIT} bytes")
        if len(message) > whole:
            raise UnreadableRequest("something is hidden behind its TLS hello")
        if len(message) == whole:
            return bytes(message), at
    raise UnreadableRequest(f"its TLS hello is cut into more than {MAX_RECORDS} records")


class _Reader:
    """Reads the fields of a message; a truncated one is unreadable."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise UnreadableRequest("its TLS hello is malformed")
        found, self._at = self._data[self._at : end], end
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def field(self, size: int) -> bytes:
        """A field that is preceded by its length, which is ``size`` bytes long."""
        return self.take(self.number(size))

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)


def _server_name(message: bytes) -> str:
    """The one server name in a whole ClientHello."""
    reader = _Reader(message)
    reader.take(4)
    if not 0x0300 <= reader.number(2) <= 0x0304:
        raise UnreadableRequest("its TLS version is unknown")
    reader.take(32)
    reader.field(1)  # session
    reader.field(2)  # ciphers
    reader.field(1)  # compression
    if reader.at_end:
        raise UnreadableRequest("its TLS hello has no server name")
    found = _extensions(reader.field(2))
    if not reader.at_end:
        raise UnreadableRequest("its TLS hello is malformed")
    if any(kind in found for kind in _ENCRYPTED_HELLO):
        raise UnreadableRequest("its TLS hello is encrypted (ECH), which hides the server name")
    if _SERVER_NAME not in found:
        raise UnreadableRequest("its TLS hello has no server name")
    names = _Reader(found[_SERVER_NAME])
    entries = _Reader(names.field(2))
    kind, raw = entries.number(1), entries.field(2)
    if kind != 0 or not entries.at_end or not names.at_end or raw.endswith(b"."):
        raise UnreadableRequest("its TLS hello has more or other than one server name")
    match = HOST.fullmatch(raw)
    if match is None or match[2] is not None:
        raise UnreadableRequest("its TLS server name is not a host name")
    return host_name(match[1])


def _extensions(data: bytes) -> dict[int, bytes]:
    reader = _Reader(data)
    found: dict[int, bytes] = {}
    while not reader.at_end:
        kind = reader.number(2)
        if kind in found:
            raise UnreadableRequest("its TLS hello says the same thing twice")
        found[kind] = reader.field(2)
    return found


def asks_again(answer: bytes) -> bool | None:
    """Whether a server's answer asks for a second ClientHello; None until that is known.

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
