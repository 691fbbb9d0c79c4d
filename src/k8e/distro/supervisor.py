"""Components as processes: started in order, started again when they end, outliving ourselves.

A component is no child that dies with its parent: it has a session of its own, writes to its own
log file, and is written down. So a supervisor that was killed leaves all of them running, and the
next one takes over those whose command and files are still what it would start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k8e import errors, system
from k8e.distro.layout import Layout, write_private

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STEADY_SECONDS = 60.0  # who has run as long as this begins anew with the shortest pause
READY_SECONDS = 180.0
LOG_BYTES = 16 << 20
LOG_COPY_BYTES = 64 << 20  # the newest of a log that grew by more within a minute
LOG_LOOK_SECONDS = 60.0
_TAIL_BYTES = 4096
_LAST_LINES = 3


@dataclass(frozen=True)
class Component:
    """One upstream program and how it is run."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    needs: tuple[str, ...] = ()
    """Components that must be ready before it starts."""
    files: tuple[Path, ...] = ()
    """Files that it reads at start only: another content means another process."""
    notifies: bool = False
    """Whether it tells by ``sd_notify`` when it is ready; otherwise it is once it runs."""
    stop_seconds: float = 20.0

    def digest(self) -> str:
        """What tells whether a running process is still what would be started now."""
        found = hashlib.sha256(json.dumps([self.argv, sorted(self.environ.items())]).encode())
        for path in self.files:
            found.update(path.read_bytes() if path.exists() else b"-")
        with contextlib.suppress(OSError):
            program = Path(self.argv[0]).stat()
            found.update(f"{program.st_ino} {program.st_size} {program.st_mtime_ns}".encode())
        return found.hexdigest()


@dataclass
class Record:
    """What is written down of a component, for ``k8e status`` and for the next supervisor."""

    name: str
    pid: int = 0
    start_time: int = 0
    digest: str = ""
    since: float = 0.0
    restarts: int = 0
    ready: bool = False
    last_end: str = ""
    """Why it ended last, and the last that it logged."""

    def is_running(self) -> bool:
        return bool(self.pid and system.start_time(self.pid) == self.start_time != 0)


def read_records(layout: Layout) -> list[Record]:
    """All components that were ever started since the machine was."""
    found: list[Record] = []
    for path in sorted(layout.components.glob("*.json")):
        with contextlib.suppress(*errors.UNREADABLE):
            found.append(Record(**json.loads(path.read_bytes())))
    return found


class Process:
    """A running component, watched by a descriptor that becomes readable when it ends."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self._descriptor = os.pidfd_open(pid)
        self._ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        if self._child is not None:
            self._child.wait()
        self._ended.set_result(None)

    async def ended(self) -> str:
        """Wait for its end; how it ended, as far as we may know."""
        await asyncio.shield(self._ended)
        code = self._child.returncode if self._child is not None else None
        if code is None:
            return "ended"  # another supervisor was its parent
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def send(self, number: signal.Signals) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    async def stop(self, seconds: float) -> None:
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), seconds)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await asyncio.shield(self._ended)

    def let_go(self) -> None:
        """Watch it no longer; it goes on."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        if self._child is not None:
            self._child.returncode = 0  # so that nobody complains that it still runs


class _Readiness:
    """The socket by which a component tells that it is ready."""

    def __init__(self, path: Path, tell: Callable[[], None]) -> None:
        self.path = path
        self._tell = tell
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_message)

    def _on_message(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if b"READY=1" in self._socket.recv(4096).split(b"\n"):
                self._tell()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self.path.unlink(missing_ok=True)


class _Keeper:
    """Keeps one component running."""

    def __init__(self, component: Component, layout: Layout) -> None:
        self.component = component
        self.ready = asyncio.Event()
        self.record = Record(component.name)
        self.process: Process | None = None
        self._layout = layout
        self._file = layout.components / f"{component.name}.json"
        self._log = layout.logs / f"{component.name}.log"
        self._stopping = False

    async def run(self, needed: Iterable[asyncio.Event]) -> None:
        for event in needed:
            await event.wait()
        notified = _Readiness(self._file.with_suffix(".notify"), self._became_ready)
        pause = FIRST_PAUSE
        try:
            while not self._stopping:
                began = time.monotonic()
                try:
                    process = await self._take_over()
                    if self._stopping:
                        break
                    self.process = process or self._start(notified.path)
                    end = await self.process.ended()
                except OSError as error:
                    end = f"did not start: {error}"
                self.ready.clear()
                self.process = None
                if self._stopping:
                    break
                if time.monotonic() - began > STEADY_SECONDS:
                    pause = FIRST_PAUSE
                self._note_end(end, pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            notified.close()
            if self.process is not None:
                self.process.let_go()

    def _became_ready(self) -> None:
        if not self.ready.is_set():
            self.ready.set()
            self._note(ready=True)

    async def _take_over(self) -> Process | None:
        """The process that an earlier supervisor left, if it is what we would start."""
        with contextlib.suppress(*errors.UNREADABLE):
            self.record = Record(**json.loads(self._file.read_bytes()))
        if not self.record.is_running():
            return None
        try:
            process = self.process = Process(self.record.pid)
        except OSError:
            return None
        why = ""
        if not self.record.is_running() or self.record.digest != self.component.digest():
            why = "its configuration has changed"
        elif not self.record.ready:  # it may have told nobody meanwhile, and tells it once
            why = "it was not ready when the supervisor of before ended"
        if why:
            log.info("%s: starting it anew, %s", self.component.name, why)
            await process.stop(self.component.stop_seconds)
            return None
        log.info("%s: taken over, pid %d", self.component.name, process.pid)
        self.ready.set()
        return process

    def _start(self, notify: Path) -> Process:
        component = self.component
        environ = {"PATH": os.environ.get("PATH", ""), "HOME": "/root", **component.environ}
        if component.notifies:
            environ["NOTIFY_SOCKET"] = str(notify)
        digest = component.digest()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(os.open(self._log, flags, 0o600), "ab") as output:
            child = subprocess.Popen(
                component.argv,
                env=environ,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=0o022,  # kubelet makes files that programs in pods read
            )
        process = Process(child.pid, child)
        self._note(
            pid=child.pid,
            start_time=system.start_time(child.pid),
            digest=digest,
            since=time.time(),
            ready=not component.notifies,
        )
        if not component.notifies:
            self.ready.set()
        log.info("%s: started, pid %d", component.name, child.pid)
        return process

    def _note_end(self, end: str, pause: float) -> None:
        said = last_lines(self._log)
        reason = f"{end}; it said last: {said}" if said else end
        log.warning("%s %s; it starts again in %g s", self.component.name, reason, pause)
        self._note(pid=0, ready=False, restarts=self.record.restarts + 1, last_end=reason)

    def _note(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self.record, name, value)
        try:
            write_private(self._file, json.dumps(asdict(self.record)))
        except OSError as error:  # a full disk must not end what keeps the component running
            log.warning("%s: its state cannot be written down: %s", self.component.name, error)

    async def stop(self) -> None:
        self._stopping = True
        if self.process is not None:
            await self.process.stop(self.component.stop_seconds)
            self.process = None
        self._file.unlink(missing_ok=True)

    async def restart(self) -> None:
        if self.process is not None:
            await self.process.stop(self.component.stop_seconds)


def shorten_log(path: Path) -> None:
    """Move a long log aside; whoever writes to it goes on writing to the same file."""
    try:
        size = path.stat().st_size
    except OSError:
        return
    if size <= LOG_BYTES:
        return
    # Copied and cut: it is open for appending, and a program would follow a rename.
    copy = path.with_suffix(".log.1")
    try:
        _copy_end(path, copy, size)
    except OSError as error:  # on a full disk room counts more than what was said before
        log.warning("the log %s is cut, since it cannot be kept: %s", path, error)
        copy.unlink(missing_ok=True)
    os.truncate(path, 0)


def _copy_end(path: Path, copy: Path, size: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with path.open("rb") as old, open(os.open(copy, flags, 0o600), "wb") as new:
        old.seek(max(0, size - LOG_COPY_BYTES))
        shutil.copyfileobj(old, new)


def last_lines(path: Path) -> str:
    """The end of a log, as one line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())[-1000:]


class Supervisor:
    """Runs components, and keeps them running until it is told to stop them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._keepers: dict[str, _Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, component: Component) -> None:
        """Start a component as soon as those that it needs are ready."""
        keeper = _Keeper(component, self._layout)
        self._keepers[component.name] = keeper
        needed = [self._keepers[name].ready for name in component.needs]
        self._tasks[component.name] = asyncio.create_task(keeper.run(needed))

    async def ready(self, name: str, seconds: float = READY_SECONDS) -> None:
        """Wait until a component is ready; if that takes too long, the error says what it logs."""
        keeper = self._keepers[name]
        try:
            await asyncio.wait_for(keeper.ready.wait(), seconds)
        except TimeoutError:
            why = keeper.record.last_end or last_lines(self._layout.logs / f"{name}.log")
            raise errors.ToolFailed(
                f"{name} is not ready after {seconds:g} s: {why or 'it says nothing'}",
                hint=f"its log is {self._layout.logs / f'{name}.log'}",
            ) from None

    async def restart(self, name: str) -> None:
        await self._keepers[name].restart()

    async def keep_logs_short(self) -> None:
        """Once a minute; a program that writes gigabytes in one is beyond help."""
        while True:
            await asyncio.sleep(LOG_LOOK_SECONDS)
            for name in ("k8e", *self._keepers):  # our own is there if we are in the background
                await asyncio.to_thread(shorten_log, self._layout.logs / f"{name}.log")

    async def stop(self) -> None:
        """End all components, those first that need others."""
        while self._keepers:
            needed = {name for item in self._keepers.values() for name in item.component.needs}
            await asyncio.gather(*map(self._stop, self._keepers.keys() - needed))

    async def _stop(self, name: str) -> None:
        began = time.monotonic()
        await self._keepers[name].stop()
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        del self._keepers[name]
        log.info("%s: stopped in %.1f s", name, time.monotonic() - began)

    async def leave(self) -> None:
        """Let all components run on, for the next supervisor."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
