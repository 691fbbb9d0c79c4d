"""A gateway as a process of its own, from its start to its end."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import k8e
from benchmarks import timing
from k8e.client import local
from k8e.guest import wire
from k8e.sessions.store import SqliteSessionStore
from k8e.settings import Settings

START_SECONDS = 60.0
SOURCE = Path(k8e.__file__).parents[1]
_MAIN = (
    f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from k8e.cli import main; sys.exit(main())"
)
COMMAND = [sys.executable, "-I", "-c", _MAIN]
"""The command ``k8e`` of this source tree, whatever is installed."""


class GatewayFailed(Exception):
    """The gateway did not start; the message is what it said."""


class Gateway:
    """``k8e gateway`` in the foreground; started when constructed."""

    def __init__(self, config: Settings, env: Mapping[str, str]) -> None:
        self._config = config
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_inheritable(theirs, True)
        # As the client starts it, but not in the background: the process is ours to wait for.
        self._argv = [*COMMAND, "gateway", "--ready-fd", str(theirs)]
        began = time.perf_counter()
        try:
            self.pid = timing.spawn(self._argv, env)
        finally:
            os.close(theirs)
        said = _first_line(ours)
        self.ready_seconds = time.perf_counter() - began
        """From the start of the process until it said that it was ready."""
        if said != "ready":
            self.kill()
            raise GatewayFailed(said or "it ended without a word")

    def resident_mb(self) -> float:
        return resident_mb(self.pid)

    def sandbox_of(self, session_id: str) -> str:
        """The sandbox behind a session, which no client is told."""
        store = SqliteSessionStore(self._config.data_dir / "sessions.db")
        try:
            session = store.get(session_id)
        finally:
            store.close()
        if session is None:
            raise LookupError(session_id)
        return session.sandbox_id

    def stop(self) -> None:
        """End it with all of its sessions."""
        try:
            connection = local.Connection(local.dial(str(self._config.socket)))
            connection.begin()
            connection.send(wire.CALL, wire.pack({"op": "stop", "destroy": True}))
            connection.receive()
            connection.close()
        except Exception:
            self.kill()
            raise
        timing.wait(self.pid, self._argv)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def resident_mb(pid: int | str) -> float:
    """Resident memory of a process of this host, in MB (10⁶ bytes)."""
    return parse_resident(Path(f"/proc/{pid}/status").read_text("ascii", "replace"))


def parse_resident(status: str) -> float:
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError("no VmRSS: the process has ended")


def _first_line(fd: int) -> str:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    said = b""
    try:
        while b"\n" not in said:
            if not poll.poll(START_SECONDS * 1000):
                return f"no word within {START_SECONDS:g} s"
            data = os.read(fd, 4096)
            if not data:
                break
            said += data
    finally:
        os.close(fd)
    return said.decode("utf-8", "replace").strip()
