"""A gateway for one check, separate from every other on this machine; nothing of it may stay."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from k8e.conformance import traces
from k8e.conformance.lab.ports import free_port
from k8e.conformance.outcomes import BrokenPromise, expect

PATIENCE = 60.0  # seconds for one command; the first one in a folder probes the runtimes
OPEN_FOLDER = 0o711  # sandboxes have uids of their own and pass through it
REAP_SECONDS = 5.0
END_SECONDS = 10.0

T = TypeVar("T")


class GatewayHome:
    """Where one gateway can run: folders, environment, the command."""

    def __init__(self, *, probe: Path | None = None, **environ: str) -> None:
        """``probe`` is what another gateway of this machine found out about its runtimes."""
        # A short path: unix sockets allow 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix=f"k8e-{os.getpid()}-", dir="/tmp"))
        self.folder.chmod(OPEN_FOLDER)
        self.data, self.run_dir, self.home = (self.folder / name for name in ("d", "r", "h"))
        self.home.mkdir()
        self.data.mkdir(OPEN_FOLDER)
        if probe is not None and probe.exists():
            shutil.copy(probe, self.data / "probe.json")
        ours = {key: value for key, value in os.environ.items() if not key.startswith("K8E_")}
        if "K8E_HOME" in os.environ:
            ours["K8E_HOME"] = os.environ["K8E_HOME"]
        self.environ = ours | {
            "HOME": str(self.home),
            "K8E_ALLOWED_HOSTS": "none",
            "K8E_DATA_DIR": str(self.data),
            "K8E_LISTEN": f"127.0.0.1:{free_port()}",
            "K8E_POOL_MAX": "0",  # so that the sandboxes that there are belong to sessions
            "K8E_RUN_DIR": str(self.run_dir),
            **environ,
        }

    @property
    def endpoint(self) -> str:
        return f"unix:{self.run_dir / 'gateway.sock'}"

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run the command to its end."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "k8e", *arguments],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        """The output of the command as JSON; it must succeed."""
        done = self.cli(*arguments)
        expect(done.returncode == 0, f"k8e {' '.join(arguments)}: {done.stdout + done.stderr!r}")
        return json.loads(done.stdout)

    def start(self) -> None:
        self.json("gateway", "--background")

    def pid(self) -> int:
        return int(self.json("status")["pid"])

    def wait_for_grpc(self) -> str:
        """Where the gateway listens, or why it does not; that comes after the unix socket."""
        return eventually(lambda: str(self.json("status")["listen"]))

    def kill_gateway(self) -> None:
        """End the gateway as a crash would, and wait until it is gone."""
        pid = self.pid()
        process = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            expect(select.select([process], [], [], END_SECONDS)[0], "a killed gateway lives on")
        finally:
            os.close(process)

    def sandboxes(self) -> list[str]:
        """The ids of all sandboxes that there ever were."""
        file = self.data / "sessions.db"
        if not file.exists():
            return []
        with contextlib.closing(sqlite3.connect(file)) as database:
            return [row[0] for row in database.execute("SELECT sandbox_id FROM sessions")]

    def stop(self) -> None:
        """Stop the gateway and end its sessions, if it runs."""
        self.cli("gateway", "stop", "--destroy")

    def close(self) -> list[str]:
        """Stop the gateway; returns its leftovers, of which there should be none."""
        self.stop()
        # The new parent of a killed process may need a moment to reap it.
        with contextlib.suppress(BrokenPromise):
            eventually(lambda: not self._left(), REAP_SECONDS)
        if not (left := self._left()):
            shutil.rmtree(self.folder)
        return left

    def _left(self) -> list[str]:
        needle = os.fsencode(self.folder)
        found = [
            f"process {folder.name}"
            for folder in Path("/proc").glob("[0-9]*")
            if int(folder.name) != os.getpid() and needle in _told(folder)
        ]
        found += [f"mount {point}" for point in traces.mounts(str(self.folder))]
        for sandbox_id in self.sandboxes():
            found += traces.traces(sandbox_id, [self.folder])
        return found


def _told(folder: Path) -> bytes:
    """The arguments that a process was started with."""
    with contextlib.suppress(OSError):
        return (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
    return b""


def eventually(check: Callable[[], T], seconds: float = 10.0) -> T:
    """Ask again until the answer is true; for events that no kernel call reports."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > deadline:
            raise BrokenPromise(f"not within {seconds:g} s")
        time.sleep(0.02)
    return found
