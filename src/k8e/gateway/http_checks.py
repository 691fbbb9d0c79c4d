"""Who may use an exposed service: each request is judged by itself. Pure functions.

A request passes if it has the service's token, names the service's own address as its host (so that
no foreign name leads to us), and does not come from another site's page. The token goes no further:
what is passed on has none of it, wherever it was.

A browser gets a cookie in exchange for the token. Browsers send cookies to every port of an
address, so whoever listens on another port of ours gets to see it. Therefore the cookie is not the
token, and it opens this one service only, for the one user of the machine whose browser got it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from k8e import doors
from k8e.gateway import http_headers
from k8e.gateway.http_headers import COOKIE_PREFIX, TOKEN_HEADER, TOKEN_PARAMETER, Headers, values

ASK = "k8e sandbox exposed prints the URLs of all exposed ports, each with its token."


@dataclass(frozen=True)
class Door:
    """What a listener knows of itself."""

    authority: bytes
    """Its address and port, as a Host header says it."""
    token: bytes
    cookie_key: bytes
    """What its cookies are made with; never sent to anybody."""

    @property
    def origin(self) -> bytes:
        return b"http://" + self.authority

    @property
    def url(self) -> bytes:
        """Where a person or a program goes: the address with the token."""
        return self.origin + b"/?" + TOKEN_PARAMETER + b"=" + self.token

    @property
    def cookie(self) -> bytes:
        """The name of its cookie, with its port; another service has another one."""
        port = self.authority.rpartition(b":")[2]
        return COOKIE_PREFIX + port + b"-" + self._derive(b"name")[:16]

    def cookie_value(self, client: str) -> bytes:
        """What the cookie says in the browser of ``client``, who is a user of this machine."""
        return self._derive(b"value", client.encode())

    def _derive(self, *parts: bytes) -> bytes:
        message = b"\0".join((*parts, self.authority))
        return hmac.new(self.cookie_key, message, hashlib.sha256).hexdigest().encode()

    def opens_with(self, token: bytes) -> bool:
        return hmac.compare_digest(token, self.token)


@dataclass(frozen=True)
class Request:
    """What a client asks for: the first line and the headers."""

    method: bytes
    target: bytes
    headers: Headers
    client: str = ""
    """Which user of this machine asks, where the kernel can tell."""


@dataclass(frozen=True)
class Refused:
    """Not let in."""

    status: int
    text: str


@dataclass(frozen=True)
class Greeted:
    """A browser that showed its token in the URL: it gets a cookie, and goes on without it."""

    location: bytes
    by_page: bool
    """By a page of ours, since a redirect for another site's link would not bring the cookie."""
    client: str = ""


@dataclass(frozen=True)
class Admitted:
    """Let in; this is what the server in the sandbox gets to see."""

    method: bytes
    target: bytes
    headers: Headers
    websocket: bool


Verdict = Refused | Greeted | Admitted


def judge(door: Door, request: Request) -> Verdict:
    """Whether a request may pass, and as what."""
    if request.method == b"CONNECT":
        return Refused(405, "This is no proxy for other hosts.")
    target = _path(door, request.target)
    if target is None or doors.host_of(request.headers).encode("latin-1") != door.authority:
        return Refused(421, f"This service is only known as {door.origin.decode()}/. {ASK}")
    if not target.startswith(b"/") and (request.method, target) != (b"OPTIONS", b"*"):
        return Refused(400, "The address that was asked for is malformed.")
    by_query = any(map(door.opens_with, http_headers.tokens_of(target)))
    if not by_query and not _has_token(door, request):
        return Refused(403, f"The token of this service is missing or wrong. {ASK}")
    return _judge_known(door, request, target, by_query=by_query)


def _judge_known(door: Door, request: Request, target: bytes, *, by_query: bool) -> Verdict:
    """Judge somebody who has the token."""
    clean = http_headers.without_token(target)
    foreign = doors.is_foreign(request.headers, door.authority.decode("ascii"), ["http"])
    if by_query and _is_navigation(request):
        if door.token in clean:
            return Refused(400, "The token is in the address twice.")
        return Greeted(door.origin + clean, by_page=foreign, client=request.client)
    if foreign:
        return Refused(
            403, f"Another site's page asked for this; only a link to the URL itself works. {ASK}"
        )
    if values(request.headers, b"service-worker"):
        return Refused(403, "Service workers are not allowed: they would see the token.")
    if door.token in clean:
        return Refused(400, f"The token belongs into the parameter {TOKEN_PARAMETER.decode()}.")
    websocket = http_headers.is_websocket(request.headers)
    headers = _forwarded(door, request.headers, websocket=websocket)
    return Admitted(request.method, clean, headers, websocket)


def _path(door: Door, target: bytes) -> bytes | None:
    """The path of a target; None if it is of another host."""
    if not target.lower().startswith(b"http://"):
        return target
    rest = target[len(b"http://") :]
    if not rest.startswith(door.authority):
        return None
    path = rest[len(door.authority) :]
    if path.startswith(b"/"):
        return path
    return b"/" + path if not path or path.startswith(b"?") else None


def _has_token(door: Door, request: Request) -> bool:
    if any(map(door.opens_with, values(request.headers, TOKEN_HEADER))):
        return True
    name, right = door.cookie, door.cookie_value(request.client)
    shown = [value for key, value in http_headers.cookies(request.headers) if key == name]
    return any(hmac.compare_digest(value, right) for value in shown)


def _is_navigation(request: Request) -> bool:
    """Whether a browser opens a page in a window of its own."""
    if request.method != b"GET":
        return False
    modes = values(request.headers, b"sec-fetch-mode")
    if modes:
        return modes == [b"navigate"] and values(request.headers, b"sec-fetch-dest") == [
            b"document"
        ]
    # Browsers of before 2020 to 2023.
    agents = values(request.headers, b"user-agent")
    return any(item.startswith(b"Mozilla/") for item in agents) and any(
        b"text/html" in item for item in values(request.headers, b"accept")
    )


def _forwarded(door: Door, headers: Headers, *, websocket: bool) -> Headers:
    """The headers that the sandbox may see, for a connection that has only this request."""
    kept = [
        (name, value)
        for name, given in http_headers.end_to_end(headers)
        if (value := _forwarded_value(name.lower(), given)) is not None
        # Whoever put the token anywhere else did not mean the sandbox to have it.
        and door.token not in value
    ]
    if http_headers.is_chunked(headers):
        kept = [item for item in kept if item[0].lower() != b"content-length"]
        kept.append((b"Transfer-Encoding", b"chunked"))
    if websocket:
        return [*kept, (b"Connection", b"Upgrade"), (b"Upgrade", http_headers.WEBSOCKET)]
    return [*kept, (b"Connection", b"close")]


def _forwarded_value(name: bytes, value: bytes) -> bytes | None:
    """What of a header's value may pass; None if the header may not."""
    match name:
        case b"cookie":
            return http_headers.without_our_cookies(value) or None
        case b"referer":
            return http_headers.without_token(value)
        case _:
            return None if name == TOKEN_HEADER else value
