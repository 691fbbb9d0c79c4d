"""Exposed ports: a server in a sandbox, on a URL of this machine."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from k8e import errors
from k8e.client import operations, requests
from k8e.client.operations import Operation, Send
from k8e.client.records import Record, field
from k8e.guest import wire

_NOBODY = (errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
LOOPBACK = "127.0.0.1"
TOKEN_HEADER = "x-k8e-token"  # noqa: S105 - a name


class Exposed(Record):
    """A port of a sandbox that can be reached on the gateway's machine."""

    url: str = field(repr=False)
    """With the token, for a browser or ``curl``: anyone who has it can use the service."""
    port: int
    """The server's, in the sandbox."""
    host: str
    """Where in the sandbox the server listens."""
    started_at: float
    """Unix time."""
    session_id: str
    token: str = field(repr=False)

    def _shown(self) -> dict[str, Any]:
        return {"base_url": self.base_url, **super()._shown()}

    @property
    def base_url(self) -> str:
        """The address without the token, for a program that sends :attr:`headers`."""
        return self.url.partition("?")[0]

    @property
    def headers(self) -> dict[str, str]:
        """The headers that each request needs whose URL has no token."""
        return {TOKEN_HEADER: self.token}


_FIELDS = frozenset(Exposed.__match_args__)


def _exposed(data: Mapping[str, Any]) -> Exposed:
    return Exposed(**{key: value for key, value in data.items() if key in _FIELDS})


def expose_port(call: Mapping[str, Any]) -> Operation[Exposed]:
    """Expose a port; ``call`` names a session, or a tenant whose standing session is meant."""
    return _exposed((yield from operations.call({"op": "expose", **call})))


def unexpose_port(call: Mapping[str, Any]) -> Operation[str]:
    """Close a port's URL; return its session."""
    return str((yield from operations.call({"op": "unexpose", **call}))["session_id"])


def wait_for_port(session_id: str, port: int, host: str, timeout: float) -> Operation[None]:
    """Wait until a server in the sandbox accepts connections; the sandbox itself watches for it."""
    session = requests.by_id(session_id)
    call = {"op": "connect", "session": session, "port": port, "host": host, "wait": timeout}
    try:
        yield from operations.call(call)
    except OSError as error:
        if error.errno not in _NOBODY:
            raise
        raise errors.TimedOut(
            f"nothing listens on port {port} of session {session_id} after {timeout:g} s",
            hint=f"check that the server runs, and listens on {host}",
        ) from None
    yield Send(wire.CANCEL)  # it was there; nothing is sent to it


def listing(session_id: str) -> Operation[list[Exposed]]:
    call = {"op": "list_exposed", "session_id": session_id}
    return [_exposed(item) for item in (yield from operations.call(call))["services"]]


def target(session_id: str, port: int, **more: str) -> dict[str, Any]:
    return {"session_id": requests.by_id(session_id)["id"], "port": port, **more}
