"""Exposed ports: who gets in, what passes, and what neither side ever sees."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Generator
from typing import NamedTuple
from urllib.parse import urlsplit

from k8e.client.exposing import Exposed
from k8e.client.results import Stdout
from k8e.conformance.behaviours import equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room

PORT, OTHER_PORT = 8123, 8124
SECONDS = 20.0
CROSS_SITE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
# Says what it was sent, counts requests, and answers with headers that are not its to give.
_SERVER = """
import http.server, json, sys
class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    count = 0
    def do_GET(self):
        Echo.count += 1
        size = int(self.headers.get('Content-Length') or 0)
        told = {'count': Echo.count, 'path': self.path, 'headers': dict(self.headers)}
        told['body'] = self.rfile.read(size).decode('latin-1')
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(data)))
        self.send_header('Set-Cookie', 'mine=1')
        self.send_header('Keep-Alive', 'timeout=99')
        self.end_headers()
        self.wfile.write(data)
    do_POST = do_GET
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Echo)
print('ready', flush=True)
server.serve_forever()
"""


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: http.client.HTTPMessage
    text: str


class Door:
    """An exposed port as a visitor sees it."""

    def __init__(self, exposed: Exposed) -> None:
        self.exposed = exposed
        self.url = urlsplit(exposed.url)
        self.token = exposed.token

    def ask(
        self, path: str = "/", headers: dict[str, str] | None = None, *, token: bool = True
    ) -> Answer:
        """One request on a connection of its own."""
        given = {**(headers or {}), **(self.exposed.headers if token else {})}
        host, port = self.url.hostname or "", self.url.port
        connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
        try:
            connection.request("GET", path, headers=given)
            found = connection.getresponse()
            return Answer(found.status, found.headers, found.read().decode("utf-8", "replace"))
        finally:
            connection.close()

    def say(self, data: bytes) -> bytes:
        """Bytes as they are; all that comes back until the end."""
        address = (self.url.hostname or "", self.url.port or 0)
        with socket.create_connection(address, SECONDS) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            parts: list[bytes] = []
            with contextlib.suppress(OSError):
                while part := connection.recv(65536):
                    parts.append(part)
        return b"".join(parts)


@contextlib.contextmanager
def _doors(room: Room) -> Generator[tuple[Door, Door]]:
    """A server's door, and one to a port where nothing listens."""
    client = room.scene.client
    client.write_file(room.session_id, "echo.py", _SERVER)
    run = client.start(room.session_id, ["python3", "-S", "echo.py", str(PORT)])
    try:
        for event in run.output():
            if isinstance(event, Stdout) and b"ready" in event.data:
                break
        door = Door(client.expose(room.session_id, PORT))
        yield door, Door(client.expose(room.session_id, OTHER_PORT))
    finally:
        for port in (PORT, OTHER_PORT):
            client.unexpose(room.session_id, port)
        run.kill()


@in_a_room("exposed.token")
def token(room: Room) -> None:
    """Without the port's own token nothing reaches the sandbox, by URL, header or cookie."""
    with _doors(room) as (door, other):
        wrong = door.token[:-1] + ("a" if door.token[-1] != "a" else "b")
        answers = [
            door.ask(token=False),
            door.ask(f"/?k8e-token={wrong}", token=False),
            door.ask(f"/?k8e-token={other.token}", token=False),
            door.ask("/", {"X-K8e-Token": other.token}, token=False),
            door.ask("/", {"Cookie": f"k8e-token={door.token[:8]}"}, token=False),
        ]
        equal([answer.status for answer in answers], [403] * len(answers), "strangers")
        first = door.ask()
        equal(first.status, 200, "a visitor with the token")
        expect('"count": 1,' in first.text, f"strangers reached the sandbox: {first.text[:60]}")
        expect(other.ask().status in (502, 503, 504), "another port leads to this server")
    expect(_gone(door), "the door is open after it was closed")


def _gone(door: Door) -> bool:
    try:
        return door.ask().status != 200
    except OSError:
        return True


@in_a_room("exposed.origin")
def origin(room: Room) -> None:
    """Other sites' pages, rebound names and foreign WebSockets get nothing, even with the token."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "a2V5"}
    with _doors(room) as (door, _):
        for host in ("rebound.example", f"localhost:{door.url.port}", f"{door.url.netloc}0"):
            equal(door.ask("/", {"Host": host}).status, 421, f"by the name {host}")
        for headers in (
            CROSS_SITE,
            {"Origin": "https://evil.example"},
            {**upgrade, "Origin": "https://evil.example"},
            {"Origin": "null"},
        ):
            equal(door.ask("/", headers).status, 403, f"a page of another site with {headers}")
        first = door.ask()
        expect('"count": 1,' in first.text, f"others reached the sandbox: {first.text[:60]}")
        expect("Access-Control-Allow-Origin" not in first.headers, "it is open to other origins")


@in_a_room("exposed.secrets")
def kept_secrets(room: Room) -> None:
    """The sandbox never sees the token, nor headers that are for one connection only."""
    hop = {"Keep-Alive": "9", "Proxy-Authorization": "x", "TE": "trailers", "X-Mine": "kept"}
    with _doors(room) as (door, _):
        for path in ("/", f"/?a=1&k8e-token={door.token}&b=2"):
            answer = door.ask(path, hop)
            expect(door.token not in answer.text, f"the sandbox saw the token by {path[:3]}")
            for name in ("Proxy-Authorization", "Keep-Alive"):
                expect(f'"{name}"' not in answer.text, f"{name} reached the sandbox")
            expect("X-Mine" in answer.text, f"a harmless header was lost: {answer.text}")
            expect("Keep-Alive" not in answer.headers, "a header of one connection came back")


@in_a_room("exposed.smuggling")
def smuggling(room: Room) -> None:
    """Requests that two servers would read differently are refused, and hide no other one."""
    with _doors(room) as (door, _):
        head = f"POST / HTTP/1.1\r\nHost: {door.url.netloc}\r\nX-K8e-Token: {door.token}\r\n"
        hidden = f"GET /hidden HTTP/1.1\r\nHost: {door.url.netloc}\r\n\r\n"
        for lines in (
            "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "Content-Length: 0\r\nContent-Length: 40\r\n\r\n",
            "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
            "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
            "Content-Length: +0\r\n\r\n",
            "Content-Length: 0\r\n\r\n",
        ):
            said = door.say((head + lines + hidden).encode())
            expect(b"/hidden" not in said, f"a hidden request passed after {lines!r}")
        answer = door.ask()
        equal(answer.status, 200, "an honest request afterwards")
