"""Access to an exposed service: checks, headers and answers of our own. Pure functions.

A request passes if it has the service's token, names the service's own address as its host (so that
no foreign name leads to us), and does not come from another site's page. The token goes no further:
what is passed on has none of it, wherever it was.

A browser gets a cookie in exchange for the token. Browsers send cookies to every port of an
address, so whoever listens on another port of ours gets to see it. Therefore the cookie is not the
token, and it opens this one service only, for the one user of the machine whose browser got it.

Names keep the letters that they came with; they are compared without regard to case.
"""

from __future__ import annotations

import hashlib
import hmac
import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from k8e import access
from k8e.http_headers import (
    WEBSOCKET,
    Headers,
    end_to_end,
    is_chunked,
    is_websocket,
    values,
)

TOKEN_PARAMETER = b"k8e-token"
TOKEN_HEADER = b"x-k8e-token"
COOKIE_PREFIX = b"k8e-"
"""Of every cookie of ours. A sandbox neither sees nor sets one, whichever service's it is."""

# Requests.


def cookies(headers: Headers) -> Iterable[tuple[bytes, bytes]]:
    """The cookies of a request."""
    for value in values(headers, b"cookie"):
        for pair in value.split(b";"):
            name, _, content = pair.strip().partition(b"=")
            yield name.strip(), content.strip()


def without_our_cookies(value: bytes) -> bytes:
    """A Cookie header's value without our cookie; empty if nothing is left."""
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
    """The headers of a server's answer that its client gets.

    Pages tell no other site where they are, unless they say otherwise themselves.
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


ASK = "k8e sandbox exposed prints the URLs of all exposed ports, each with its token."


@dataclass(frozen=True)
class PortAccess:
    """The address, token and key of a listener."""

    authority: bytes
    """Its address and port, as a Host header says it."""
    token: bytes
    cookie_key: bytes
    """The key that its cookies are made with; never sent."""

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
class VisitRequest:
    """The first line and the headers of a client's request."""

    method: bytes
    target: bytes
    headers: Headers
    client: str = ""
    """Which user of this machine asks, where the kernel can tell."""


@dataclass(frozen=True)
class PortRefusal:
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
    """A request that was let in, as the server in the sandbox gets it."""

    method: bytes
    target: bytes
    headers: Headers
    websocket: bool


Verdict = PortRefusal | Greeted | Admitted


def judge(door: PortAccess, request: VisitRequest) -> Verdict:
    """Whether a request may pass, and as what."""
    if request.method == b"CONNECT":
        return PortRefusal(405, "This is no proxy for other hosts.")
    target = _path(door, request.target)
    if target is None or access.host_of(request.headers).encode("latin-1") != door.authority:
        return PortRefusal(421, f"This service is only known as {door.origin.decode()}/. {ASK}")
    if not target.startswith(b"/") and (request.method, target) != (b"OPTIONS", b"*"):
        return PortRefusal(400, "The address that was asked for is malformed.")
    by_query = any(map(door.opens_with, tokens_of(target)))
    if not by_query and not _has_token(door, request):
        return PortRefusal(403, f"The token of this service is missing or wrong. {ASK}")
    return _judge_known(door, request, target, by_query=by_query)


def _judge_known(
    door: PortAccess, request: VisitRequest, target: bytes, *, by_query: bool
) -> Verdict:
    """Judge a request that has the token."""
    clean = without_token(target)
    foreign = access.is_foreign(request.headers, door.authority.decode("ascii"), ["http"])
    if by_query and _is_navigation(request):
        if door.token in clean:
            return PortRefusal(400, "The token is in the address twice.")
        return Greeted(door.origin + clean, by_page=foreign, client=request.client)
    if foreign:
        return PortRefusal(
            403, f"Another site's page asked for this; only a link to the URL itself works. {ASK}"
        )
    if values(request.headers, b"service-worker"):
        return PortRefusal(403, "Service workers are not allowed: they would see the token.")
    if door.token in clean:
        return PortRefusal(400, f"The token belongs into the parameter {TOKEN_PARAMETER.decode()}.")
    websocket = is_websocket(request.headers)
    headers = _forwarded(door, request.headers, websocket=websocket)
    return Admitted(request.method, clean, headers, websocket)


def _path(door: PortAccess, target: bytes) -> bytes | None:
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


def _has_token(door: PortAccess, request: VisitRequest) -> bool:
    if any(map(door.opens_with, values(request.headers, TOKEN_HEADER))):
        return True
    name, right = door.cookie, door.cookie_value(request.client)
    shown = [value for key, value in cookies(request.headers) if key == name]
    return any(hmac.compare_digest(value, right) for value in shown)


def _is_navigation(request: VisitRequest) -> bool:
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


def _forwarded(door: PortAccess, headers: Headers, *, websocket: bool) -> Headers:
    """The headers that the sandbox may see, for a connection that has only this request."""
    kept = [
        (name, value)
        for name, given in end_to_end(headers)
        if (value := _forwarded_value(name.lower(), given)) is not None
        # A client that put the token anywhere else did not mean the sandbox to have it.
        and door.token not in value
    ]
    if is_chunked(headers):
        kept = [item for item in kept if item[0].lower() != b"content-length"]
        kept.append((b"Transfer-Encoding", b"chunked"))
    if websocket:
        return [*kept, (b"Connection", b"Upgrade"), (b"Upgrade", WEBSOCKET)]
    return [*kept, (b"Connection", b"close")]


def _forwarded_value(name: bytes, value: bytes) -> bytes | None:
    """The part of a header's value that may pass; None if the header may not."""
    match name:
        case b"cookie":
            return without_our_cookies(value) or None
        case b"referer":
            return without_token(value)
        case _:
            return None if name == TOKEN_HEADER else value


MAX_TEXT = 1000  # characters of a message, parts of which a sandbox may have chosen
_NEVER_KEPT: Headers = [
    (b"Cache-Control", b"no-store"),
    (b"Content-Security-Policy", b"default-src 'none'"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"X-Content-Type-Options", b"nosniff"),
]


class PortPage(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


def refusal(refused: PortRefusal) -> PortPage:
    """A refusal in plain text; the connection ends with it."""
    text = "".join(char if char.isprintable() else " " for char in refused.text[:MAX_TEXT])
    return _page(
        refused.status, b"text/plain", f"k8e: {text}\n".encode(), [(b"Connection", b"close")]
    )


def greeting(door: PortAccess, greeted: Greeted) -> PortPage:
    """The cookie, and the way on without a token in the address."""
    attributes = b"; Path=/; HttpOnly; SameSite=Strict"
    cookie = (b"Set-Cookie", door.cookie + b"=" + door.cookie_value(greeted.client) + attributes)
    if not greeted.by_page:
        return _page(303, b"text/plain", b"", [cookie, (b"Location", greeted.location)])
    address = html.escape(greeted.location.decode("ascii", "replace"), quote=True)
    body = (
        '<!doctype html><meta charset="utf-8"><title>k8e</title>'
        f'<meta http-equiv="refresh" content="0;url={address}"><a href="{address}">Go on</a>\n'
    )
    return _page(200, b"text/html", body.encode(), [cookie])


def _page(status: int, kind: bytes, body: bytes, more: Headers) -> PortPage:
    headers = [
        *_NEVER_KEPT,
        *more,
        (b"Content-Type", kind + b"; charset=utf-8"),
        (b"Content-Length", str(len(body)).encode()),
    ]
    return PortPage(status, headers, body)
