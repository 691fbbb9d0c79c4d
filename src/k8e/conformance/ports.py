"""Connections to servers in a sandbox: its own loopback, both ways, bounded, and nothing else."""

from __future__ import annotations

import errno

from k8e.conformance.behaviours import Broken, behaviour, equal, expect
from k8e.conformance.refusals import refused
from k8e.conformance.sandbox import PYTHON, Program, Sandbox, Stream
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


async def connect(sandbox: Sandbox, port: int, *, generous: bool = True, **call: object) -> Stream:
    stream = Stream(generous=generous)
    stream.open(await sandbox.guest.connect(), {"op": "connect", "port": port, **call})
    return stream


async def hear(stream: Stream, *, until: int = 0) -> bytes:
    """What a server says, to its end or until it has said so many bytes."""
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
    """What is sent before the connection is there waits for it."""
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


@behaviour("ports.loopback-only")
async def loopback_only(stage: Stage) -> None:
    """Nothing but the sandbox's own loopback can be connected to."""
    sandbox = await stage.shared()
    for host in ELSEWHERE:
        stream = await connect(sandbox, 80, host=host)
        await refused(f"host {host!r}", stream.result(), errno.EACCES)
    for port in (0, -1, 65536, "80", True, None):
        stream = Stream().open(await sandbox.guest.connect(), {"op": "connect", "port": port})
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
            raise Broken(f"frame {kind} of {len(body)} bytes")
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
