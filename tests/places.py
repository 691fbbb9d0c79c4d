"""A place for a gateway of its own: folders, environment, the command, and no traces after."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k8e.conformance import traces

# Bounds are for what hangs: on a machine with ten times as much to do, outcomes are the same.
PATIENCE = 150.0  # seconds for one command; the first one of a place tries the runtimes out
OPEN_FOLDER = 0o711  # sandboxes have uids of their own and pass through it
REAP_SECONDS = 30.0
COMMAND = [sys.executable, "-P", "-m", "k8e"]


class Probes:
    """What gateways of this process found out about the runtimes, for those that come later.

    A gateway keeps that in its data folder, and believes it as long as the kernel, the tools and
    k8e are the same; a new folder would be a reason to try everything out once more.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] = {"support": []}
        self._folders: list[Path] = []

    def give(self, data: Path) -> None:
        """To a gateway that is yet to start."""
        for folder in self._folders:  # of gateways that run, and of those that are gone
            self.take(folder)
        self._folders.append(data)
        if self._known["support"]:
            data.mkdir(mode=OPEN_FOLDER, exist_ok=True)
            (data / "probe.json").write_text(json.dumps(self._known), "utf-8")

    def take(self, data: Path) -> None:
        """From a gateway that has run."""
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((data / "probe.json").read_text("utf-8"))
            if len(found["support"]) > len(self._known["support"]):
                self._known = found


PROBES = Probes()


class Place:
    """Where one gateway can run, apart from every other one on this machine."""

    command = COMMAND

    def __init__(self, **environ: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="k8e-test-", dir="/tmp"))  # short: sockets
        self.folder.chmod(OPEN_FOLDER)
        self.data, self.run_dir, self.home = (self.folder / name for name in ("d", "r", "h"))
        self.home.mkdir()
        self._listens = ""
        self._started: list[subprocess.Popen[bytes]] = []
        PROBES.give(self.data)
        ours = {key: value for key, value in os.environ.items() if not key.startswith("K8E_")}
        self.environ = ours | {
            "HOME": str(self.home),
            "K8E_ALLOWED_HOSTS": "none",  # so that nothing of the machine's network is touched
            "K8E_DATA_DIR": str(self.data),
            "K8E_HTTP": "none",
            "K8E_LISTEN": "none",
            "K8E_POOL_MAX": "0",  # so that the sandboxes that there are belong to sessions
            "K8E_RUN_DIR": str(self.run_dir),
            "PYTHONWARNINGS": "error",
            **environ,
        }

    @property
    def socket(self) -> Path:
        return self.run_dir / "gateway.sock"

    @property
    def endpoint(self) -> str:
        return f"unix:{self.socket}"

    # The command.

    def cli(
        self, *arguments: str, stdin: bytes = b"", **environ: str
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the command to its end."""
        return subprocess.run(
            [*self.command, *arguments],
            env=self.environ | environ,
            input=stdin,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )

    def json(self, *arguments: str, stdin: bytes = b"", **environ: str) -> dict[str, Any]:
        """What the command prints; it must succeed."""
        done = self.cli(*arguments, stdin=stdin, **environ)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        assert done.stderr == b""
        return json.loads(done.stdout)

    def error(self, *arguments: str, code: int = 1, stdin: bytes = b"", **environ: str) -> str:
        """The error and the advice that the command prints; it must fail with ``code``.

        Programs read it on stdout, as JSON; on stderr is the same for people.
        """
        done = self.cli(*arguments, stdin=stdin, **environ)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        told = json.loads(done.stdout)
        assert not told.pop("ok", False)
        assert set(told) == {"detail", "error"}
        assert told["detail"], "an error says what to do next"
        lines = done.stderr.decode("utf-8", "surrogateescape").splitlines()
        assert [line[:11] for line in lines] == ["k8e: error:", "k8e: hint: "], lines
        return f"{told['error']} | {told['detail']}"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command with pipes for input, output and errors."""
        pipe = subprocess.PIPE
        command = [*self.command, *arguments]
        process = subprocess.Popen(command, env=self.environ, stdin=pipe, stdout=pipe, stderr=pipe)
        self._started.append(process)
        return process

    # The gateway.

    def pid(self) -> int:
        return int(self.json("status")["pid"])

    def answers(self) -> bool:
        """Whether a gateway takes connections; the command would need a process to say so."""
        with socket.socket(socket.AF_UNIX) as found:
            return found.connect_ex(str(self.socket)) == 0

    def listening(self) -> str:
        """Where a gateway listens for gRPC that is started if need be, and asked only once."""
        if not self._listens or not self.answers():
            self.json("sandbox", "status")
            self._listens = self.wait_for_grpc()
        return self._listens

    def wait_for_grpc(self) -> str:
        """Where the gateway listens, or why it does not; that comes after the unix socket."""
        return eventually(lambda: self.json("status")["listen"])

    def kill_gateway(self) -> None:
        """End the gateway as a crash would, and wait until it is gone."""
        pid = self.pid()
        process = os.pidfd_open(pid)
        os.kill(pid, 9)
        assert wait_readable(process), "a killed gateway is gone"
        os.close(process)

    def sandboxes(self) -> list[str]:
        """The ids of all sandboxes that there ever were."""
        file = self.data / "sessions.db"
        if not file.exists():
            return []
        with contextlib.closing(sqlite3.connect(file)) as database:
            return [row[0] for row in database.execute("SELECT sandbox_id FROM sessions")]

    def close(self) -> None:
        """Stop the gateway, and complain about everything that is left of it."""
        for process in self._started:  # of a test that failed half-way
            _end(process)
        if self.answers() or self._left():  # else one would be started only to find nothing
            self.cli("gateway", "stop", "--destroy")
        PROBES.take(self.data)
        # Whoever inherited a killed process may need a moment to reap it.
        deadline = time.monotonic() + REAP_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not left:
            shutil.rmtree(self.folder)
        assert not left, "\n".join(left)

    def _left(self) -> list[str]:
        found = [
            f"process {folder.name}: {command!r}"
            for folder in Path("/proc").glob("[0-9]*")
            if str(self.folder) in (command := _command_line(folder)) or _is_ours(self, folder)
        ]
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        found += [f"mount {line}" for line in mounts.splitlines() if str(self.folder) in line]
        for sandbox_id in self.sandboxes():
            found += traces.traces(sandbox_id, [self.folder])
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a command tidy up that still runs; afterwards nothing of it is open."""
    with process:  # closes its pipes, and waits
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REAP_SECONDS)
            process.kill()


def _command_line(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def _is_ours(place: Place, folder: Path) -> bool:
    """Whether a process was started in a place, by its environment."""
    with contextlib.suppress(OSError):
        needle = f"K8E_RUN_DIR={place.run_dir}\0".encode()
        return needle in (folder / "environ").read_bytes()
    return False


def wait_readable(descriptor: int, seconds: float = 60.0) -> bool:
    """Wait until a descriptor has something to read (or a process has ended)."""
    return bool(select.select([descriptor], [], [], seconds)[0])


def eventually(check: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Ask again until the answer is true; for what nobody reports, like the end of a process."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
    return found


NewPlace = Callable[..., Place]
