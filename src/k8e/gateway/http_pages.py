"""What we answer ourselves at the door of an exposed service: short, plain, kept by nobody."""

from __future__ import annotations

import html
from typing import NamedTuple

from k8e.gateway.http_checks import Door, Greeted, Refused
from k8e.gateway.http_headers import Headers

MAX_TEXT = 1000  # characters of a message, parts of which a sandbox may have chosen
_NEVER_KEPT: Headers = [
    (b"Cache-Control", b"no-store"),
    (b"Content-Security-Policy", b"default-src 'none'"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"X-Content-Type-Options", b"nosniff"),
]


class Page(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


def refusal(refused: Refused) -> Page:
    """A refusal in plain text; the connection ends with it."""
    text = "".join(char if char.isprintable() else " " for char in refused.text[:MAX_TEXT])
    return _page(
        refused.status, b"text/plain", f"k8e: {text}\n".encode(), [(b"Connection", b"close")]
    )


def greeting(door: Door, greeted: Greeted) -> Page:
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


def _page(status: int, kind: bytes, body: bytes, more: Headers) -> Page:
    headers = [
        *_NEVER_KEPT,
        *more,
        (b"Content-Type", kind + b"; charset=utf-8"),
        (b"Content-Length", str(len(body)).encode()),
    ]
    return Page(status, headers, body)
