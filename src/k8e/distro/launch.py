"""Starting and stopping a server or an agent as one process of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Generator, Mapping
from io import RawIOBase
from pathlib import Path

from k8e import errors, settings, system
from k8e.distro import cleanup, preflight, service
from k8e.distro.component_store import ComponentStore
from k8e.distro.configuration import Configuration
from k8e.distro.layout import Layout
from k8e.distro.node_services import Tell

STOP_SECONDS = 120.0
SKILL = "k8e-sandbox-skill"
DETACH_SECONDS = 330.0
_LONGEST_LINE = 1 << 16


def components_folder(config: Configuration) -> Path:
    return settings.load(components_dir=config.components_dir).components_dir


def check(config: Configuration, role: str) -> None:
    """Everything that can be known before a component runs; errors say what to do."""
    preflight.check(config, role)
    # An agent learns when it joins which network its cluster has, and looks at its programs then.
    cni = config.cni if role == "server" else "none"
    preflight.check_components(config, role, ComponentStore(components_folder(config)), cni)


def stage_skills(config: Configuration, texts: Mapping[str, bytes]) -> None:
    """Put the skill for agents where K8E's tools take it from."""
    for name, text in texts.items():
        path = config.layout.skills / SKILL / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


class Watcher:
    """The process that started this one in the background, and waits until the node is ready."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, text: str) -> None:
        self._send({"step": text})

    def ready(self) -> None:
        self._send({"ready": True})
        self._leave()

    def failed(self, error: errors.K8eError) -> None:
        self._send({"error": error.to_wire()})
        self._leave()

    def _send(self, message: Mapping[str, object]) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # it may have been ended
                os.write(self._descriptor, json.dumps(message).encode() + b"\n")

    def _leave(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


async def run(
    config: Configuration, role: str, tell: Tell, told_ready: Callable[[], None] | None = None
) -> None:
    """Be the server or agent until SIGTERM."""
    from k8e.distro import agent, server

    def ready() -> None:
        _notify_systemd()
        if told_ready is not None:
            told_ready()

    kind = server.Server if role == "server" else agent.Agent
    with locked(config.layout):
        await kind(config, components_folder(config), tell).run(ready)


@contextlib.contextmanager
def locked(layout: Layout) -> Generator[None]:
    """Be the only supervisor of this machine."""
    layout.run.mkdir(mode=0o711, parents=True, exist_ok=True)
    with layout.lock.open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.Conflict(
                f"k8e runs on this machine already, as pid {running(layout) or 'unknown'}",
                hint="k8e status shows it; k8e server stop, or k8e agent stop, ends it",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {system.start_time(os.getpid())}")
        file.flush()
        yield
        file.truncate(0)


def _notify_systemd() -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect("\0" + address[1:] if address.startswith("@") else address)
            out.send(b"READY=1")


def detach(config: Configuration, role: str, tell: Tell) -> int:
    """Start it in the background; return when its node is ready, or raise why it is not."""
    config.layout.make()
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        with open(reading, "rb", buffering=0) as told:
            _follow(told, role, config.layout.logs / "k8e.log", tell)
        tell("in the background")
        return 0
    os.close(reading)
    os.setsid()
    os.chdir("/")
    _log_to_file(config.layout.logs / "k8e.log")
    watcher = Watcher(writing)

    def tell_both(text: str) -> None:
        tell(text)
        watcher.tell(text)

    try:
        asyncio.run(run(config, role, tell_both, watcher.ready))
    except errors.K8eError as error:
        watcher.failed(error)
        raise
    os._exit(0)


def _follow(told: RawIOBase, role: str, log: Path, tell: Tell) -> None:
    """Repeat the steps of the process in the background until its node is ready."""
    deadline = time.monotonic() + DETACH_SECONDS
    rest = b""
    while select.select([told], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = told.read(_LONGEST_LINE)
        if not data:
            raise errors.ToolFailed(
                f"k8e {role} ended before its node was ready", hint=f"its log is {log}"
            )
        *lines, rest = (rest + data).split(b"\n")
        for message in map(json.loads, lines):
            if "step" in message:
                tell(message["step"])
            elif "error" in message:
                raise errors.from_wire(message["error"])
            else:
                return
    raise errors.TimedOut(
        f"the node is not ready after {DETACH_SECONDS:g} s; it goes on in the background",
        hint="k8e status tells what is missing",
    )


def _log_to_file(path: Path) -> None:
    import logging

    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def running(layout: Layout) -> int:
    """The pid of the supervisor that runs; 0 if none does.

    By what it wrote into its lock. Whoever tried to take the lock instead would for that moment
    keep one that starts from it.
    """
    try:
        pid, start_time = map(int, layout.lock.read_text("ascii").split())
    except (OSError, ValueError):
        return 0
    return pid if system.start_time(pid) == start_time != 0 else 0


def stop(config: Configuration, role: str) -> None:
    """End the supervisor and its components; pods go on."""
    service.Service(role).stop()  # else systemd would start it again
    pid = running(config.layout)
    if pid:
        _end(pid)
    else:  # a supervisor that was killed has left its components
        cleanup.stop_components(config.layout)


def _end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    ended = select.select([descriptor], [], [], STOP_SECONDS)[0]
    os.close(descriptor)
    if not ended:
        raise errors.TimedOut(
            f"k8e (pid {pid}) was told to stop, and still runs after {STOP_SECONDS:g} s",
            hint="its log says what it waits for",
        )


def uninstall(config: Configuration, role: str, tell: Tell) -> list[str]:
    """Remove everything of a server or agent from this machine; what was removed."""
    if os.geteuid() != 0:
        raise errors.Denied("uninstalling needs root", hint="use sudo")
    if service.Service(role).remove():
        tell("it starts with the machine no more")
    stop(config, role)
    tell("components have ended")
    return cleanup.remove_all(config, tell)
