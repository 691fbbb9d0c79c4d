"""Ports of sandboxes: connections from the gateway, and exposed ones."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
from collections.abc import Generator
from typing import NamedTuple
from urllib.parse import urlsplit

from k8e.client.exposures import Exposed
from k8e.client.results import Stdout
from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room
from k8e.conformance.promises.file_refusals import refused
from k8e.conformance.sandbox import PATIENCE, PYTHON, OperationStream, Program, Sandbox
from k8e.conformance.stage import Stage
from k8e.guest import wire
from k8e.guest.ports import MOST_CONNECTIONS
from k8e.model import MIB

ECHO = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    peer, _ = server.accept()
    total = 0
    while data := peer.recv(65536):
        total += len(data)
        peer.sendall(data)
    peer.sendall(b"end of %d" % total)
    peer.close()
"""
"""Says everything back, and after the other side's end how much that was."""
FLOOD = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
sent = 0
try:
    while True:
        sent += peer.send(b"x" * 65536)
        print("sent", sent, flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""
"""Sends for ever, and tells how it ended."""
ELSEWHERE = (
    "0.0.0.0",  # noqa: S104 - what must be refused
    "10.0.0.1",
    "169.254.169.254",
    "198.19.255.1",
    "128.0.0.1",
    "::",
    "::2",
    "::ffff:127.0.0.1",
    "example.org",
    "localhost.",
    "127.1",
    "2130706433",
    "127.0.0.1\0",
    " 127.0.0.1",
    "/run/k8e/link/sock",
)


async def serve(sandbox: Sandbox, script: str) -> tuple[Program, int]:
    """Start a server that prints its port."""
    server = await sandbox.start([PYTHON, "-I", "-c", script], kill_on_disconnect=True)
    await server.until(b"\n")
    return server, int(server.outcome.text.split()[0])


async def connect(
    sandbox: Sandbox, port: int, *, generous: bool = True, **call: object
) -> OperationStream:
    stream = OperationStream(generous=generous)
    stream.open(await sandbox.guest.connect(), {"op": "connect", "port": port, **call})
    return stream


async def hear(stream: OperationStream, *, until: int = 0) -> bytes:
    """The output of a server, to its end or up to a number of bytes."""
    heard = b""
    while True:
        kind, body = await stream.next()
        if kind == wire.END:
            return heard
        heard += body if kind == wire.DATA else b""
        if until and len(heard) >= until:
            return heard


@behaviour("ports.both-ways")
async def both_ways(stage: Stage) -> None:
    """Bytes reach a server in the sandbox and come back, and an end is a half-close."""
    sandbox = await stage.shared()
    server, port = await serve(sandbox, ECHO)
    for host in ("127.0.0.1", "localhost"):
        stream = await connect(sandbox, port, host=host)
        equal((await stream.result())["port"], port, "port")
        await stream.feed(wire.DATA, b"hello")
        equal(await hear(stream, until=5), b"hello", "echo")
        stream.send(wire.END)
        equal(await hear(stream), b"end of 5", "last words")
        equal((await stream.result()), {}, "the end of both directions")
    server.cancel()


@behaviour("ports.early-words")
async def early_words(stage: Stage) -> None:
    """Bytes that are sent before the connection is there wait for it."""
    sandbox = await stage.shared()
    server, port = await serve(sandbox, ECHO)
    stream = await connect(sandbox, port)
    await stream.feed(wire.DATA, b"at once")
    stream.send(wire.END)
    await stream.result()
    equal(await hear(stream), b"at onceend of 7", "echo")
    server.cancel()


@behaviour("ports.many-bytes")
async def many_bytes(stage: Stage) -> None:
    """More bytes than any buffer holds pass in both directions, in order."""
    sandbox = await stage.shared()
    server, port = await serve(sandbox, ECHO)
    stream = await connect(sandbox, port)
    await stream.result()
    sent = heard = 0
    piece = bytes(range(256)) * 1024
    while sent < 8 * MIB:
        await stream.feed(wire.DATA, piece)
        sent += len(piece)
        echo = await hear(stream, until=len(piece))
        equal(echo, piece, "echo")
        heard += len(echo)
    stream.send(wire.END)
    equal(await hear(stream), b"end of %d" % sent, "last words")
    equal(heard, sent, "bytes")
    server.cancel()


@behaviour("ports.refused")
async def nobody(stage: Stage) -> None:
    """A port on which nothing listens is refused at once, in words."""
    sandbox = await stage.shared()
    for host in ("127.0.0.1", "::1", "localhost"):
        stream = await connect(sandbox, 9, host=host)
        codes = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        await refused(f"port 9 of {host}", stream.result(), *codes)


@behaviour("ports.waited-for")
async def waited_for(stage: Stage) -> None:
    """A connection waits for a server that does not listen yet, and says in time if none came."""
    sandbox = await stage.shared()
    gone, port = await serve(sandbox, ECHO.partition("while")[0])
    await gone.finish()  # its port is known, and free
    for host in ("127.0.0.1", "localhost"):
        stream = await connect(sandbox, port, host=host, wait=0.05)
        await refused(f"port {port} of {host}", stream.result(), errno.ETIMEDOUT)
    waiting = await connect(sandbox, port, host="localhost", wait=PATIENCE)
    await waiting.feed(wire.DATA, b"early")
    again = ECHO.replace('("127.0.0.1", 0)', f'("127.0.0.1", {port})')
    server, _ = await serve(sandbox, again)
    equal((await waiting.result())["port"], port, "port")
    equal(await hear(waiting, until=5), b"early", "echo")
    waiting.cancel()
    server.cancel()


@behaviour("ports.loopback-only")
async def loopback_only(stage: Stage) -> None:
    """Nothing but the sandbox's own loopback can be connected to."""
    sandbox = await stage.shared()
    for host in ELSEWHERE:
        stream = await connect(sandbox, 80, host=host)
        await refused(f"host {host!r}", stream.result(), errno.EACCES)
    for port in (0, -1, 65536, "80", True, None):
        stream = OperationStream().open(
            await sandbox.guest.connect(), {"op": "connect", "port": port}
        )
        await refused(f"port {port!r}", stream.result(), errno.EINVAL)


@behaviour("ports.slow-reader")
async def slow_reader(stage: Stage) -> None:
    """A server whose client does not read has to wait, and hears when the client leaves."""
    sandbox = await stage.shared()
    server, port = await serve(sandbox, FLOOD)
    stream = await connect(sandbox, port, generous=False)
    await stream.result()
    heard = 0
    while heard < wire.WINDOW:
        kind, body = await stream.next()
        if kind != wire.DATA:
            raise BrokenPromise(f"frame {kind} of {len(body)} bytes")
        heard += len(body)
    equal(heard, wire.WINDOW, "bytes for one window")
    await sandbox.call("ping")
    stream.cancel()
    await server.finish()
    last = server.outcome.text.splitlines()[-1]
    expect(last in ("BrokenPipeError", "ConnectionResetError"), f"the server heard {last!r}")


@behaviour("ports.bounded")
async def bounded(stage: Stage) -> None:
    """A sandbox has so many connections and no more, and goes on with those that it has."""
    sandbox = await stage.launch()
    script = ECHO.replace('("127.0.0.1", 0)', '("127.0.0.1", 0), backlog=1000')
    server, port = await serve(sandbox, script)
    streams = [await connect(sandbox, port) for _ in range(MOST_CONNECTIONS)]
    for stream in streams:
        await stream.result()
    await refused("one more", (await connect(sandbox, port)).result(), errno.EAGAIN)
    for stream in streams[1:]:
        stream.cancel()
    await streams[0].feed(wire.DATA, b"still here")
    equal(await hear(streams[0], until=10), b"still here", "echo")
    again = await connect(sandbox, port)
    await again.result()
    server.cancel()


@behaviour("ports.lost-link")
async def lost_link(stage: Stage) -> None:
    """A connection ends with the link, so that no server waits for a gateway that is gone."""
    sandbox = await stage.launch()
    server, port = await serve(sandbox, FLOOD)
    stream = await connect(sandbox, port, generous=False)
    await stream.result()
    link = await sandbox.guest.connect()
    link.close()
    await stream.lost.wait()
    program = await sandbox.attach(server.id)
    await program.finish()
    last = program.outcome.text.splitlines()[-1]
    expect(last in ("BrokenPipeError", "ConnectionResetError"), f"the server heard {last!r}")


PORT, OTHER_PORT = 8123, 8124
SECONDS = 20.0
CROSS_SITE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
# Prints what it was sent, counts requests, and answers with headers that it must not set.
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


class VisitAnswer(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: http.client.HTTPMessage
    text: str


class ExposedDoor:
    """An exposed port as a visitor sees it."""

    def __init__(self, exposed: Exposed) -> None:
        self.exposed = exposed
        self.url = urlsplit(exposed.url)
        self.token = exposed.token

    def ask(
        self, path: str = "/", headers: dict[str, str] | None = None, *, token: bool = True
    ) -> VisitAnswer:
        """One request on a connection of its own."""
        given = {**(headers or {}), **(self.exposed.headers if token else {})}
        host, port = self.url.hostname or "", self.url.port
        connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
        try:
            connection.request("GET", path, headers=given)
            found = connection.getresponse()
            return VisitAnswer(found.status, found.headers, found.read().decode("utf-8", "replace"))
        finally:
            connection.close()

    def say(self, data: bytes) -> bytes:
        """Send bytes as they are; return all that comes back until the end."""
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
def _doors(room: Room) -> Generator[tuple[ExposedDoor, ExposedDoor]]:
    """A server's exposed port, and one where nothing listens."""
    client = room.scene.client
    client.write_file(room.session_id, "echo.py", _SERVER)
    run = client.start(room.session_id, ["python3", "-S", "echo.py", str(PORT)])
    try:
        for event in run.output():
            if isinstance(event, Stdout) and b"ready" in event.data:
                break
        door = ExposedDoor(client.expose(room.session_id, PORT))
        yield door, ExposedDoor(client.expose(room.session_id, OTHER_PORT))
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


def _gone(door: ExposedDoor) -> bool:
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
