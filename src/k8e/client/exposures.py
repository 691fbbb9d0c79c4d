"""Exposed ports: a server in a sandbox, on a URL of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from k8e.client import operations, requests
from k8e.client.operations import Operation
from k8e.client.records import Record, field

ANSWER_SECONDS = 5.0  # for one look whether a server answers
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


def answers(exposed: Exposed) -> bool:
    """Whether a server in the sandbox answers; until then the gateway does, with 502."""
    import http.client  # takes time to import, and few wait
    from urllib.parse import urlsplit

    place = urlsplit(exposed.base_url)
    connection = http.client.HTTPConnection(
        place.hostname or "", place.port, timeout=ANSWER_SECONDS
    )
    try:
        connection.request("GET", "/", headers=exposed.headers)
        return connection.getresponse().status != http.client.BAD_GATEWAY
    except http.client.HTTPException:
        return True  # a server that is there and speaks something else
    except OSError:
        return False
    finally:
        connection.close()


def retry_delays() -> Iterator[float]:
    """Seconds between two looks whether a server answers: often at first, then less often."""
    delay = 0.02
    while True:
        yield delay
        delay = min(delay * 1.5, 0.5)


def listing(session_id: str) -> Operation[list[Exposed]]:
    call = {"op": "list_exposed", "session_id": session_id}
    return [_exposed(item) for item in (yield from operations.call(call))["services"]]


def target(session_id: str, port: int, **more: str) -> dict[str, Any]:
    return {"session_id": requests.by_id(session_id)["id"], "port": port, **more}
