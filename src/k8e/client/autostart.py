"""The embedded default: if no gateway runs, start one in the background and wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from k8e import errors, settings, system
from k8e.client import installations, local

if TYPE_CHECKING:
    import _socket

START_SECONDS = 60.0  # a first start tries out what the host supports
QUIET_SECONDS = 1.0  # after this time, a person at a terminal wants to know what is going on
MAX_TOLD = 64 << 10


def dial(config: settings.Settings | None = None) -> _socket.socket:
    """A socket connected to this user's gateway, which is started if it does not run."""
    config = config or settings.load()
    path = os.fsencode(config.socket)
    with contextlib.suppress(local.NoGateway):
        return local.dial(path)
    with _starting_alone(config):
        with contextlib.suppress(local.NoGateway):
            return local.dial(path)  # another process was faster
        start(config)
        try:
            return local.dial(path)
        except local.NoGateway:
            raise failed(config, "it said that it was ready, but does not listen") from None


@contextlib.contextmanager
def _starting_alone(config: settings.Settings) -> Generator[None]:
    """Hold the lock under which gateways are started: only one, however many clients want it."""
    try:
        system.make_own(config.run_dir)
        lock = os.open(config.run_dir / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise errors.NoGateway(
            f"no gateway runs, and none can be started: the folder {config.run_dir} cannot be "
            f"used: {error.strerror or error}",
            hint=errors.folder_hint(
                error, "make it writable, or set K8E_RUN_DIR to a folder of yours"
            ),
        ) from None
    try:
        # The process that holds it is done within START_SECONDS, or dead.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def start(config: settings.Settings) -> None:
    """Start a gateway in the background and wait until it is ready."""
    program = installations.find()
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            launched = _launch(program, config, theirs)
        finally:
            os.close(theirs)
        said = _listen(ours)
        launched.wait()
    finally:
        os.close(ours)
    if said != "ready":
        raise failed(config, *_why(said))


def _launch(
    program: installations.Installation, config: settings.Settings, ready_fd: int
) -> subprocess.Popen[bytes]:
    """Launch the gateway. The child forks and ends, so that the caller inherits no zombie."""
    argv = [program.python, program.isolation, "-m", "k8e", "gateway", "--background"]
    argv += ["--ready-fd", str(ready_fd)]
    with _log(config) as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(ready_fd,),
            env={
                **program.environ(),
                "K8E_DATA_DIR": str(config.data_dir),
                "K8E_RUN_DIR": str(config.run_dir),
                "K8E_LISTEN": config.listen,
                "K8E_HTTP": config.http,
            },
            start_new_session=True,
        )


@contextlib.contextmanager
def _log(config: settings.Settings) -> Generator[int]:
    """The gateway's log, for output from before it writes there itself."""
    try:
        config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(config.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise errors.NoGateway(
            f"no gateway runs, and none can be started: {config.log_file} cannot be written: "
            f"{error.strerror or error}",
            hint=errors.folder_hint(
                error, "make the data folder writable, or set K8E_DATA_DIR to a folder of yours"
            ),
        ) from None
    try:
        yield fd
    finally:
        os.close(fd)


def _listen(fd: int) -> str:
    """The gateway's report of its start; empty if it ended or stayed silent."""
    deadline = time.monotonic() + START_SECONDS
    told = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    quiet = os.isatty(2)
    while b"\n" not in told and len(told) < MAX_TOLD:
        left = deadline - time.monotonic()
        if left <= 0:
            return json.dumps({"message": f"it was not ready within {START_SECONDS:g} s"})
        ready = poll.poll(1000 * min(left, QUIET_SECONDS) if quiet else 1000 * left)
        if ready:
            data = os.read(fd, 4096)
            if not data:
                break
            told += data
        elif quiet:
            quiet = False
            os.write(2, b"k8e: starting the gateway; the first start takes some seconds\n")
    return told.decode("utf-8", "replace").strip()


def _why(said: str) -> tuple[str, str]:
    """The message and the hint from a gateway that did not start."""
    try:
        told: Any = json.loads(said)
        return str(told["message"]), str(told.get("hint") or "")
    except (ValueError, TypeError, KeyError):
        return "it ended without a message", ""


def failed(config: settings.Settings, message: str, hint: str = "") -> errors.NoGateway:
    hint = hint or "k8e gateway in the foreground shows what is wrong"
    return errors.NoGateway(
        f"the gateway did not start: {message}", hint=f"{hint}; its log is {config.log_file}"
    )
