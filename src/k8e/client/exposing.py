"""Exposed ports in the SDK: a server in a sandbox, on a local URL. Both clients, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from k8e.client import operations, requests
from k8e.client.operations import Operation
from k8e.client.records import Record, field

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
TOKEN_HEADER = "x-k8e-token"  # noqa: S105 - a name


class Exposed(Record):
    """A port of a sandbox that can be reached on the gateway's machine."""

    url: str = field(repr=False)
    """With the token, for a browser or ``curl``: whoever has it can use the service."""
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
        """What each request needs that does not have the token in its URL."""
        return {TOKEN_HEADER: self.token}


_FIELDS = frozenset(Exposed.__match_args__)


def _exposed(data: Mapping[str, Any]) -> Exposed:
    return Exposed(**{key: value for key, value in data.items() if key in _FIELDS})


def expose_port(call: Mapping[str, Any]) -> Operation[Exposed]:
    """``call`` names a session, or a tenant whose standing session is meant."""
    return _exposed((yield from operations.call({"op": "expose", **call})))


def unexpose_port(call: Mapping[str, Any]) -> Operation[str]:
    """The session that it was."""
    return str((yield from operations.call({"op": "unexpose", **call}))["session_id"])


def _listing(session_id: str) -> Operation[list[Exposed]]:
    call = {"op": "list_exposed", "session_id": session_id}
    return [_exposed(item) for item in (yield from operations.call(call))["services"]]


def _target(session_id: str, port: int, **more: str) -> dict[str, Any]:
    return {"session_id": requests.by_id(session_id)["id"], "port": port, **more}


class Exposing:
    """Methods of the blocking client."""

    def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    def expose(self, session_id: str, port: int, host: str = LOOPBACK) -> Exposed:
        """Make a port of a session's sandbox reachable, on a URL that carries a token.

        The server need not run yet. What is exposed already keeps its URL.

        Args:
            session_id: whose sandbox.
            port: where in the sandbox the server listens.
            host: the same: an address of the sandbox's loopback, or ``localhost`` for both
                127.0.0.1 and ::1.
        """
        return self._call(expose_port(_target(session_id, port, host=host)))

    def unexpose(self, session_id: str, port: int) -> None:
        """End a URL, and every connection that came through it."""
        self._call(unexpose_port(_target(session_id, port)))

    def list_exposed(self, session_id: str = "") -> list[Exposed]:
        """Exposed ports of one session, or of all of yours, oldest first."""
        return self._call(_listing(session_id))


class AsyncExposing:
    """The same, of the asynchronous client."""

    async def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    async def expose(self, session_id: str, port: int, host: str = LOOPBACK) -> Exposed:
        return await self._call(expose_port(_target(session_id, port, host=host)))

    async def unexpose(self, session_id: str, port: int) -> None:
        await self._call(unexpose_port(_target(session_id, port)))

    async def list_exposed(self, session_id: str = "") -> list[Exposed]:
        return await self._call(_listing(session_id))
