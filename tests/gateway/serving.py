"""A real gateway in a process of its own, and what tests need to talk to it."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.gateway import worlds
from tests.places import PROBES

RUNTIMES = ("container", "gvisor")
USUAL = "usual.example"
"""What sessions may reach that do not say it; nobody is there."""
SIZE = 64 << 20
SIZES = (("grpc.max_receive_message_length", SIZE), ("grpc.max_send_message_length", SIZE))
SAID = "said"
"""In the folder: what the gateway wrote on its terminal."""
START_SECONDS = 150.0
STOP_SECONDS = 40.0
MAIN = """
import sys
from k8e import settings
from k8e.gateway import app
sys.exit(app.run(settings.load(), background=False, ready_fd=int(sys.argv[1])))
"""


class Running(NamedTuple):
    """A gateway that takes calls."""

    address: str
    ca: Path
    log: Path
    pid: int
    folder: Path

    def channel(self, *options: tuple[str, Any]) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.secure_channel(self.address, credentials, options=(*SIZES, *options))


@contextlib.contextmanager
def gateway(**environment: str) -> Generator[Running]:
    """Start a gateway on a port of its own; afterwards nothing of it is left."""
    with worlds.world() as world, _gateway(world, environment) as running:
        yield running


@contextlib.contextmanager
def _gateway(world: Path, environment: dict[str, str]) -> Generator[Running]:
    # A short path: unix sockets allow 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="k8e-", dir="/tmp"))
    folder.chmod(0o711)  # sandboxes have users of their own
    PROBES.give(folder / "d")
    address = free_address()
    reading, writing = os.pipe()
    said = os.open(folder / SAID, os.O_WRONLY | os.O_CREAT, 0o600)
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(writing)],
        env={
            **os.environ,
            "K8E_DATA_DIR": str(folder / "d"),
            "K8E_RUN_DIR": str(folder / "r"),
            "K8E_LISTEN": address,
            "K8E_HTTP": "none",
            "K8E_ALLOWED_HOSTS": USUAL,
            "K8E_UPLINK_NAMESPACE": str(world),
            **worlds.INDEXES,
            **environment,
        },
        pass_fds=[writing],
        stdout=said,
        stderr=said,
    )
    os.close(writing)
    os.close(said)
    log = folder / "d/gateway.log"
    try:
        said = _first_line(reading)
        assert said == "ready", said or log.read_text()
        running = Running(address, folder / "d/tls/ca.crt", log, process.pid, folder)
        yield running
        _stop(running)
    finally:
        os.close(reading)
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        left = [
            line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line
        ]
        assert not left, left
        PROBES.take(folder / "d")
        shutil.rmtree(folder)


def _first_line(fd: int) -> str:
    ready, _, _ = select.select([fd], [], [], START_SECONDS)
    assert ready, "the gateway did not start in time"
    return os.read(fd, 4096).decode().strip()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def _stop(running: Running) -> None:
    """Tell it to leave with all its sessions."""
    with running.channel() as channel, Frames(channel) as frames:
        frames.send(wire.CALL, 1, wire.pack({"op": "stop", "destroy": True}))
        frames.receive()


class Frames:
    """A Run stream, driven frame by frame."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._held: list[pb.RunFrame] = []
        self._outgoing: queue.SimpleQueue[pb.RunFrame | None] = queue.SimpleQueue()
        stub = pb_grpc.SandboxServiceStub(channel)
        outgoing = iter(self._outgoing.get, None)
        self.call = stub.Run(outgoing, metadata=metadata, timeout=50)

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.call.cancel()

    def send(self, kind: int, channel: int, body: bytes = b"") -> None:
        self._outgoing.put(pb.RunFrame(kind=kind, channel=channel, body=body))

    def ask(self, channel: int, **call: Any) -> None:
        self.send(wire.CALL, channel, wire.pack(call))

    def close(self) -> None:
        self._outgoing.put(None)

    def receive(self) -> pb.RunFrame:
        if not self._held:
            message = next(self.call)
            self._held += (message, *message.rest)
        return self._held.pop(0)

    def result(self, channel: int) -> dict[str, Any]:
        """The next frame, which must be this channel's RESULT."""
        frame = self.receive()
        assert (frame.kind, frame.channel) == (wire.RESULT, channel), wire.unpack(frame.body)
        return wire.unpack_dict(frame.body)

    def until(self, *kinds: int) -> list[pb.RunFrame]:
        """All frames up to one of ``kinds``."""
        frames = [self.receive()]
        while frames[-1].kind not in kinds:
            frames.append(self.receive())
        return frames


class Failed(NamedTuple):
    """How a call failed."""

    status: grpc.StatusCode
    details: str
    code: str


def failing(work: Callable[[], object]) -> Failed:
    """What the client of a call that must fail gets to see."""
    try:
        answer = work()
    except grpc.RpcError as error:
        call: Any = error
        metadata: dict[str, str] = dict(call.trailing_metadata() or ())
        return Failed(call.code(), call.details(), metadata.get("k8e-error-code", ""))
    raise AssertionError(f"the call succeeded: {answer}")
