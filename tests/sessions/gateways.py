"""Real gateway processes that a test may kill, and a client that speaks their frames."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.conformance import traces
from k8e.guest import wire
from tests.places import PROBES

START_SECONDS = 150.0  # the first start tries the runtimes out
PATIENCE = 60.0
_RUN = (
    "import sys; from k8e import settings; from k8e.gateway import app;"
    "sys.exit(app.run(settings.load(), background=True, ready_fd=int(sys.argv[1])))"
)


def eventually(check: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Look again until there is something to see."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := check():
            return found
        time.sleep(0.005)  # what is waited for needs the CPU too
    raise AssertionError(f"{what}: not within {seconds:g} s")


class Client:
    """One connection to a gateway."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(START_SECONDS)
        self._socket.connect(str(path))
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._frames: list[tuple[int, int, bytes]] = []
        self._channel = 0

    def open(self, call: dict[str, Any]) -> int:
        self._channel += 1
        self.send(wire.CALL, self._channel, wire.pack(call))
        return self._channel

    def send(self, kind: int, channel: int, body: bytes = b"") -> None:
        self._socket.sendall(wire.frame(kind, channel, body))

    def receive(self, channel: int) -> tuple[int, bytes]:
        """The next frame of a channel; the error of an ERROR frame."""
        while True:
            for at, (kind, found, body) in enumerate(self._frames):
                if found == channel:
                    del self._frames[at]
                    if kind == wire.ERROR:
                        raise errors.from_wire(wire.unpack_dict(body))
                    return kind, body
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionResetError("the gateway hung up")
            self._frames += self._splitter.feed(data)

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        kind, body = self.receive(self.open({"op": op, **arguments}))
        assert kind == wire.RESULT
        return wire.unpack_dict(body)

    def create(self, **spec: Any) -> str:
        return self.call("create_session", spec=spec)["session"]["session_id"]

    def session(self, session_id: str) -> dict[str, Any]:
        return self.call("get_session", session_id=session_id)["session"]

    def output(self, channel: int, *, until: bytes = b"") -> tuple[bytes, dict[str, Any]]:
        """What a program prints, to its end or until it has said something; and its exit."""
        seen = b""
        while not until or until not in seen:
            kind, body = self.receive(channel)
            if kind == wire.EXIT:
                return seen, wire.unpack_dict(body)
            if kind in (wire.OUT, wire.ERR):
                seen += body[wire.SEQ.size :]
        return seen, {}

    def shell(self, session_id: str, script: str, **call: Any) -> str:
        argv = ["/bin/bash", "-c", script]
        channel = self.open({"op": "exec", "session": {"id": session_id}, "argv": argv, **call})
        return self.output(channel)[0].decode()

    def close(self) -> None:
        self._socket.close()


class Gateways:
    """One gateway after the other, in the same folders."""

    def __init__(self, **environ: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="k8e-", dir="/tmp"))
        self.folder.chmod(0o711)
        self.data, self.run_dir = self.folder / "d", self.folder / "r"
        PROBES.give(self.data)
        self._environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("K8E_")},
            "K8E_DATA_DIR": str(self.data),
            "K8E_RUN_DIR": str(self.run_dir),
            "K8E_LISTEN": "none",
            "K8E_ALLOWED_HOSTS": "none",  # nothing of the machine's network is touched
            "K8E_IDLE_EXIT": "0",
            **environ,
        }
        self.program, self.arguments = ["-c", _RUN], list[str]()
        """What is run, and its arguments after the descriptor on which it says that it is ready."""
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[Client] = []

    def start(self) -> Client:
        """Start a gateway, wait until it is ready, and connect to it."""
        assert self._start() == b"ready\n", self.log()
        return self.connect()

    def _start(self) -> bytes:
        ours, theirs = os.pipe()
        argv = [sys.executable, "-P", *self.program, str(theirs), *self.arguments]
        self._process = subprocess.Popen(argv, env=self._environ, pass_fds=[theirs])
        os.close(theirs)
        with open(ours, "rb") as pipe:
            assert select.select([pipe], [], [], START_SECONDS)[0], "the gateway is not ready"
            return pipe.readline()

    def start_and_die(self) -> bool:
        """Start a gateway that is to die while it starts; whether it did."""
        said = self._start()
        assert self._process is not None
        if said:
            assert said == b"ready\n", self.log()
            return False
        assert self._process.wait(PATIENCE) == -signal.SIGKILL, self.log()
        self._process = None
        return True

    def refused(self) -> dict[str, Any]:
        """Start a gateway that must not start; what it says."""
        told = json.loads(self._start())
        assert self._process is not None
        assert self._process.wait(PATIENCE) == 1
        self._process = None
        return told

    @property
    def died(self) -> bool:
        """Whether no gateway runs."""
        return self._process is None or self._process.poll() is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def connect(self) -> Client:
        self._clients.append(Client(self.run_dir / "gateway.sock"))
        return self._clients[-1]

    def restart(self) -> Client:
        """Crash, and start the next one."""
        self.kill()
        return self.start()

    def kill(self) -> None:
        """What a crash does; nothing where it has crashed already."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE)
        self._process = None
        for client in self._clients:
            client.close()
        self._clients.clear()

    def log(self) -> str:
        return (self.data / "gateway.log").read_text()

    def sandboxes(self) -> dict[str, str]:
        """The sandbox of every session that there ever was."""
        if not (self.data / "sessions.db").exists():
            return {}
        with contextlib.closing(sqlite3.connect(self.data / "sessions.db")) as database:
            return dict(database.execute("SELECT session_id, sandbox_id FROM sessions"))

    def traces(self, sandbox_id: str) -> list[str]:
        return traces.traces(sandbox_id, [self.folder])

    def stop(self) -> int:
        """End everything; the gateway's exit code."""
        if self._process is None:
            self.start()
        assert self._process is not None
        self.connect().call("stop", destroy=True)
        code = self._process.wait(PATIENCE)
        for client in self._clients:
            client.close()
        self._clients.clear()
        return code

    def close(self) -> None:
        """End everything, and insist that nothing is left."""
        assert self.stop() == 0
        assert [left for name in self.sandboxes().values() for left in self.traces(name)] == []
        assert traces.mounts(str(self.folder)) == []
        assert traces.processes(str(self.folder)) == []
        assert traces.loop_devices(str(self.folder)) == []
        PROBES.take(self.data)
        shutil.rmtree(self.folder)
