"""An exposed server in a sandbox, and a client that says to it exactly what a test wants."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from k8e import Exposed, SandboxClient, Stdout

PATIENCE = 60.0
SERVER = Path(__file__).with_name("echo_server.py")


class Answer(NamedTuple):
    """What a server said."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        assert self.status == 200, (self.status, self.body)
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


def start_server(client: SandboxClient, session_id: str, port: int) -> None:
    """Start the echo server, and wait until it listens."""
    client.write_file(session_id, "echo_server.py", SERVER.read_bytes())
    run = client.start(session_id, ["python3", "echo_server.py", str(port)])
    for event in run.output():
        assert isinstance(event, Stdout), event
        if b"ready" in event.data:
            return


class Service:
    """An exposed port as its user sees it."""

    def __init__(self, exposed: Exposed) -> None:
        self.exposed = exposed
        self.url = urlsplit(exposed.url)
        self.authority = self.url.netloc
        self.token = exposed.token

    def connect(self) -> http.client.HTTPConnection:
        assert self.url.hostname
        return http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=PATIENCE)

    def raw(self) -> socket.socket:
        assert self.url.hostname
        assert self.url.port
        return socket.create_connection((self.url.hostname, self.url.port), PATIENCE)

    def ask(
        self,
        path: str = "/",
        headers: Mapping[str, str] | None = None,
        *,
        token: bool = True,
        method: str = "GET",
        body: Any = None,
        **more: str,
    ) -> Answer:
        """One request on a connection of its own; underscores in names become hyphens."""
        given = dict(headers or {}) | {name.replace("_", "-"): more[name] for name in more}
        if token:
            given |= self.exposed.headers
        connection = self.connect()
        try:
            connection.request(method, path, body, given)
            return take(connection)
        finally:
            connection.close()

    def state(self) -> dict[str, Any]:
        return self.ask("/state").json()


def take(connection: http.client.HTTPConnection) -> Answer:
    found = connection.getresponse()
    return Answer(found.status, found.headers, found.read())
