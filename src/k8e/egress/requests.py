"""HTTP requests, read so strictly that a server cannot read them in another way, and written anew.

What is ambiguous is refused: two lengths, two hosts, stray line ends, folded lines. Everything here
is pure; answers are None until there are enough bytes, and more bytes never change them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from k8e import errors
from k8e.egress.policy import normalise

MAX_HEADERS = 128
MAX_CHUNK_LINE = 4096
NOT_CHECKABLE = "only TLS and HTTP can be checked in strict mode"

METHOD = re.compile(rb"[A-Z][A-Z_-]{0,31}(?: |\Z)")
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z_-]{0,31}) ([\x21-\x7e]+) HTTP/(\d\.\d)")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
HOST = re.compile(rb"([A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(rb"http://([^/?#]*)(.*)", re.IGNORECASE)
_NUMBER = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
# What belongs to one connection. Ours carries one request, so that no second one goes elsewhere.
_HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"http2-settings")
)


class Unreadable(Exception):
    """What was said cannot be judged; the text says why."""


class NotHttp(Unreadable):
    """It only began like a request."""


@dataclass(frozen=True)
class Request:
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
    """A name as policies know it; an address is none."""
    try:
        name = normalise(raw.decode("ascii"))
    except errors.InvalidRequest:
        raise Unreadable("it does not say a valid host name") from None
    last = name.rpartition(".")[2]
    if last.isdigit() or last.startswith("0x"):
        raise Unreadable("it says an address instead of a host name")
    return name


def read(data: bytes, port: int) -> tuple[Request, int] | None:
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
        raise Unreadable(f"its HTTP head has more than {MAX_HEADERS} lines")
    if end < 0:
        return None
    headers = tuple(_header(item) for item in head.split(b"\r\n")[:-1])
    return _request(line, headers, port), end + 4


def _refuse_strays(data: bytes) -> None:
    """Half line ends, and zeros; a regular expression would take thirty times as long."""
    lines = data.count(b"\r\n")
    whole = data.count(b"\n") == lines == data.count(b"\r") - data.endswith(b"\r")
    if not whole or b"\0" in data:
        raise Unreadable("its HTTP head has stray control characters")


def _request_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    if b" HTTP/" not in line:
        raise NotHttp(NOT_CHECKABLE)
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise Unreadable("its HTTP request line is malformed")
    method, target, version = match.groups()
    if method == b"PRI" or version == b"2.0":
        raise Unreadable("HTTP/2 without TLS cannot be checked in strict mode")
    if method == b"CONNECT":
        raise Unreadable("HTTP's CONNECT opens a tunnel to anywhere")
    if version not in (b"1.0", b"1.1"):
        raise Unreadable("its HTTP version is unknown")
    return method, target, version


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    # This covers folded lines and blanks before the colon.
    if not colon or not _TOKEN.fullmatch(name) or _CONTROL.search(value):
        raise Unreadable("its HTTP head has a malformed line")
    return name, value.strip(b" \t")


def _request(
    line: tuple[bytes, bytes, bytes], headers: tuple[tuple[bytes, bytes], ...], port: int
) -> Request:
    method, target, version = line
    values: dict[bytes, list[bytes]] = {}
    for key, value in headers:
        values.setdefault(key.lower(), []).append(value)
    if b"upgrade" in values:
        raise Unreadable("HTTP's Upgrade leads to a protocol that cannot be checked in strict mode")
    hosts = values.get(b"host", [])
    if len(hosts) != 1:
        raise Unreadable("it has more than one Host" if hosts else "it has no Host")
    name, host = _authority(hosts[0], port)
    if absolute := _ABSOLUTE.fullmatch(target):
        if _authority(absolute[1], port)[0] != name:
            raise Unreadable("its target and its Host differ")
        target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
    elif not target.startswith(b"/") and (method, target) != (b"OPTIONS", b"*"):
        raise Unreadable("its target is not a path")
    return Request(method, target, version, headers, name, host, _body(values, version))


def _authority(raw: bytes, port: int) -> tuple[str, bytes]:
    """The name in ``name:port``, and both as they go to the server."""
    match = HOST.fullmatch(raw)
    if match is None:
        raise Unreadable("its Host is not a host name")
    name = host_name(match[1])
    if match[2] is None:
        return name, name.encode()
    if int(match[2]) != port:
        raise Unreadable("its Host says another port than it connects to")
    return name, f"{name}:{port}".encode()


def _body(values: dict[bytes, list[bytes]], version: bytes) -> int | None:
    coding, length = values.get(b"transfer-encoding"), values.get(b"content-length")
    if coding is None and length is None:
        return 0
    if length is None:
        if coding is None or len(coding) != 1 or coding[0].lower() != b"chunked":
            raise Unreadable("its Transfer-Encoding is not just chunked")
        if version == b"1.0":
            raise Unreadable("HTTP/1.0 has no Transfer-Encoding")
        return None
    if coding is not None or len(length) != 1 or not _NUMBER.fullmatch(length[0]):
        raise Unreadable("the length of its body is ambiguous")
    return int(length[0])


def rewrite(request: Request) -> bytes:
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
    """Follows a body in chunks to its end, however it is cut."""

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
        """How many of the next bytes belong to the body; Unreadable if it is malformed."""
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
                raise Unreadable("its chunked body is malformed")
            if end:
                line = bytes(self._line)
                self._line.clear()
                self._on_line(line)
        return at

    def _on_line(self, line: bytes) -> None:
        text = line[:-2]
        self.lines += 1
        if not line.endswith(b"\r\n") or (self._next == "end" and text):
            raise Unreadable("its chunked body is malformed")
        if self._next == "end":
            self._next = "size"
        elif self._next == "size":
            # Extensions are refused too: servers differ about where they end.
            if not _CHUNK_SIZE.fullmatch(text):
                raise Unreadable("its chunked body is malformed")
            self._left = int(text, 16)
            self._next = "end" if self._left else "trailer"
        elif text:
            _header(text)
            self._trailers += 1
            if self._trailers > MAX_HEADERS:
                raise Unreadable("its chunked body is malformed")
        else:
            self.done = True
