"""A real gateway in a process of its own that can be measured, and who speaks its frames."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc

from k8e.conformance.lab.ports import free_port
from k8e.guest import wire
from tests.places import PROBES, eventually

PATIENCE = 60.0
START_SECONDS = 150.0
MOST_GROWTH = 64 << 20  # bytes of memory
MOST_SECONDS = 2.0  # for the neighbour's shortest command, on a busy machine
MAIN = """
import asyncio, gc, pathlib, signal, sys
from k8e import settings
from k8e.gateway import app
from k8e.gateway.rpc import front
from k8e.sessions import live, lifetime

live.FIRST_ANSWER, live.EXIT_GRACE = 1.0, 1.0
lifetime.PING_SECONDS, lifetime.DEATH_NOTICE = 1.0, 0.5
front.HANDSHAKE_SECONDS = 1.0
answer = pathlib.Path(sys.argv[2])


def count(*_):
    gc.collect()
    found = [item for item in gc.get_objects() if isinstance(item, asyncio.Task)]
    scratch = answer.with_suffix(".tmp")
    scratch.write_text(str(sum(not task.done() for task in found)))
    scratch.rename(answer)


signal.signal(signal.SIGUSR1, count)
sys.exit(app.run(settings.load(), background=False, ready_fd=int(sys.argv[1])))
"""
"""With less patience for guests, and a count of its tasks for who sends SIGUSR1."""


class Use(NamedTuple):
    """What a gateway has of the machine."""

    memory: int
    """Resident bytes."""
    descriptors: int
    tasks: int


class Gateway:
    """A gateway that takes calls."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], address: str) -> None:
        self.folder = folder
        self.pid = process.pid
        self.address = address
        self.socket = folder / "r" / "gateway.sock"
        self.ca = folder / "d" / "tls" / "ca.crt"
        self.log = folder / "d" / "gateway.log"
        self._process = process

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def memory(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text("ascii")
        line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) << 10

    def use(self) -> Use:
        answer = self.folder / "tasks"
        answer.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        eventually(answer.exists, PATIENCE)
        descriptors = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        return Use(self.memory(), descriptors, int(answer.read_text("ascii")))

    def connect(self) -> Caller:
        return Caller(self.socket)

    def channel(self) -> grpc.Channel:
        """A gRPC client of the local user's."""
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.secure_channel(self.address, credentials)

    def create(self, **spec: Any) -> str:
        with self.connect() as caller:
            told = caller.call(op="create_session", spec={"runtime": "container", **spec})
        return str(told["session"]["session_id"])

    def destroy(self, session_id: str) -> None:
        with self.connect() as caller:
            caller.call(op="destroy_session", session_id=session_id)

    def ended(self, session_id: str) -> str:
        """Why a session has ended; it must, before long."""

        def reason() -> str:
            with self.connect() as caller:
                told = caller.call(op="get_session", session_id=session_id)["session"]
            return str(told["ended_reason"]) if told["phase"] == "ended" else ""

        return eventually(reason, PATIENCE)

    def sandbox(self, session_id: str) -> Path:
        """The folder of a session's sandbox."""
        with contextlib.closing(sqlite3.connect(self.folder / "d" / "sessions.db")) as database:
            query = "SELECT sandbox_id FROM sessions WHERE session_id=?"
            (sandbox_id,) = database.execute(query, (session_id,)).fetchone()
        return self.folder / "r" / "sandboxes" / str(sandbox_id)

    def complaints(self) -> list[str]:
        """What the log has of errors that nobody foresaw."""
        text = self.log.read_text("utf-8", "replace")
        return [line for line in text.splitlines() if "Traceback" in line or " ERROR" in line]


class Caller:
    """A client on the gateway's unix socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._frames: list[tuple[int, int, bytes]] = []
        self._last = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, kind: int, channel: int, body: bytes = b"") -> None:
        self.socket.sendall(wire.frame(kind, channel, body))

    def begin(self, **call: Any) -> int:
        """Open an operation; its channel."""
        self._last += 1
        self.send(wire.CALL, self._last, wire.pack(call))
        return self._last

    def receive(self) -> tuple[int, int, bytes]:
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    def until(self, *kinds: int) -> tuple[int, bytes]:
        """The first frame of one of these kinds; those before it are dropped."""
        while True:
            kind, _, body = self.receive()
            if kind in kinds:
                return kind, body

    def call(self, **call: Any) -> dict[str, Any]:
        self.begin(**call)
        kind, body = self.until(wire.RESULT, wire.ERROR)
        told = wire.unpack_dict(body)
        assert kind == wire.RESULT, told
        return told

    def run(self, session_id: str, *argv: str) -> float:
        """Run a program to its end; the seconds that took."""
        began = time.monotonic()
        self.begin(op="exec", session={"id": session_id}, argv=list(argv))
        kind, body = self.until(wire.EXIT, wire.ERROR)
        assert kind == wire.EXIT, wire.unpack_dict(body)
        assert wire.unpack_dict(body)["code"] == 0
        return time.monotonic() - began

    def was_cut_off(self) -> bool:
        """Whether the gateway ended the connection, before long."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True


class Impostor:
    """Sits in the place of a session's guest, on its real link, and says what it likes."""

    def __init__(self, gateway: Gateway, session_id: str) -> None:
        folder = gateway.sandbox(session_id)
        self._folder = folder / "link"
        self._key = (self._folder / "key").read_bytes()
        record = json.loads((folder / "sandbox.json").read_text("utf-8"))
        os.kill(record["pid"], signal.SIGSTOP)  # or the true guest would dial again
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._frames: list[tuple[int, int, bytes]] = []
        self.socket = self.dial()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def connect(self) -> socket.socket:
        """A connection on which nothing was said yet."""
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(PATIENCE)
        found.connect(str(self._folder / "sock"))
        return found

    def dial(self) -> socket.socket:
        """A connection that has proved itself: who is root in a sandbox can read its key."""
        found = self.connect()
        found.sendall(wire.frame(wire.HELLO, 0, bytes(16)))
        welcome = b""
        while len(welcome) < wire.HEADER_SIZE + 48:
            welcome += found.recv(1 << 10)
        nonce = welcome[wire.HEADER_SIZE : wire.HEADER_SIZE + 16]
        found.sendall(wire.frame(wire.PROOF, 0, wire.proof(self._key, nonce, b"guest")))
        return found

    def send(self, kind: int, channel: int, body: bytes = b"") -> None:
        self.socket.sendall(wire.frame(kind, channel, body))

    def result(self, channel: int, **told: Any) -> None:
        self.send(wire.RESULT, channel, wire.pack(told))

    def call(self, op: str) -> int:
        """The channel of the next call, which must be for this."""
        while not self._frames:
            self._frames += self._splitter.feed(self.socket.recv(1 << 16))
        kind, channel, body = self._frames.pop(0)
        assert kind == wire.CALL
        assert wire.unpack_dict(body)["op"] == op
        return channel

    def push(self, data: bytes, seconds: float) -> bool:
        """Send the same again and again for so long; whether nobody stopped it."""
        until = time.monotonic() + seconds
        self.socket.settimeout(0.2)
        try:
            while time.monotonic() < until:
                with contextlib.suppress(TimeoutError):
                    self.socket.sendall(data)
        except ConnectionError:
            return False
        return True


@contextlib.contextmanager
def gateway(**environment: str) -> Generator[Gateway]:
    """Start a gateway; afterwards nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="k8e-fuzz-", dir="/tmp"))  # short: sockets
    folder.chmod(0o711)  # sandboxes have users of their own
    PROBES.give(folder / "d")
    address = f"127.0.0.1:{free_port()}"
    reading, writing = os.pipe()
    ours = {key: value for key, value in os.environ.items() if not key.startswith("K8E_")}
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(writing), str(folder / "tasks")],
        env={
            **ours,
            "HOME": str(folder),
            "K8E_ALLOWED_HOSTS": "none",  # so that nothing of the machine's network is touched
            "K8E_DATA_DIR": str(folder / "d"),
            "K8E_LISTEN": address,
            "K8E_HTTP": "none",
            "K8E_POOL_MAX": "0",
            "K8E_RUN_DIR": str(folder / "r"),
            **environment,
        },
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    found = Gateway(folder, process, address)
    try:
        assert select.select([reading], [], [], START_SECONDS)[0], "it did not start in time"
        said = os.read(reading, 4096).decode().strip()
        assert said == "ready", said
        yield found
        with found.connect() as caller:
            caller.call(op="stop", destroy=True)
        process.wait(PATIENCE)
    finally:
        os.close(reading)
        process.kill()
        process.wait()
        mounts = Path("/proc/mounts").read_text("utf-8").splitlines()
        assert not [line for line in mounts if str(folder) in line]
        PROBES.take(folder / "d")
        shutil.rmtree(folder)


@contextlib.contextmanager
def quiet(gateway: Gateway, neighbour: str) -> Generator[Use]:
    """Afterwards the gateway has no more than before, and the neighbour is served."""
    with gateway.connect() as caller:
        caller.run(neighbour, "true")
        # Whose databases are opened when they are first needed.
        caller.call(op="list_snapshots")
        caller.call(op="token_keys")
    before = gateway.use()
    yield before
    with gateway.connect() as caller:
        assert caller.run(neighbour, "true") < MOST_SECONDS

    def as_before() -> bool:
        now = gateway.use()
        return (
            now.tasks <= before.tasks
            and now.descriptors <= before.descriptors
            and now.memory < before.memory + MOST_GROWTH
        )

    try:
        eventually(as_before)
    except AssertionError:
        raise AssertionError(f"{before} became {gateway.use()}") from None
    assert gateway.alive
