"""The way out of the holder's network: ``pasta``, which makes the user's calls of its packets.

Without it the network leads nowhere: sandboxes run, and reach nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
from pathlib import Path

from k8e.rootless.holder import WORLD
from k8e.system import start_time

START_SECONDS = 10.0
STEP_SECONDS = 0.02  # it says that it is ready by a file, once in a holder's life
TUN = Path("/dev/net/tun")
# No port of either side is led to the other, and no address means the machine itself. Packets are
# those of a wire, since sandboxes' are.
FLAGS = "--config-net --no-map-gw -t none -u none -T none -U none --netns-only --runas 0".split()
MTU = ["--mtu", "1500"]

_started: list[subprocess.Popen[bytes]] = []
"""What this process started and never waits for; Python complains of others."""


def ensure(run_dir: Path) -> str:
    """Connect the holder's network with the machine's; return why that fails, or nothing."""
    if _runs(run_dir):
        return ""
    program = _program()
    if program is None:
        return "the program pasta is missing (Debian's package passt)"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"{TUN} is missing, or closed to this user (chmod 666 {TUN}, as root)"
    file = run_dir / "tether.pid"
    file.unlink(missing_ok=True)
    argv = [
        program,
        "--foreground",
        *FLAGS,
        *MTU,
        "--pid",
        str(file),
        "--netns",
        str(run_dir / WORLD),
    ]
    try:
        _start(argv, run_dir, file)
    except OSError as error:
        return f"pasta cannot be used: {error.strerror or error}"
    return ""


def open_handle(run_dir: Path) -> int:
    """A descriptor that becomes readable when the running one has ended; -1 where none runs."""
    if not _runs(run_dir):
        return -1
    try:
        return os.pidfd_open(json.loads((run_dir / "tether.json").read_text("ascii"))[0])
    except (OSError, ValueError):
        return -1  # it ended just now


def facts() -> str:
    """The facts that decide whether that is possible."""
    return f"{_program()} {os.access(TUN, os.R_OK | os.W_OK)}"


def _program() -> str | None:
    return shutil.which("pasta", path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin")


def _runs(run_dir: Path) -> bool:
    """Whether the one that this or an earlier gateway started runs."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        pid, started = json.loads((run_dir / "tether.json").read_text("ascii"))
        # One that has ended has its number until its parent asks.
        told = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2]
        return bool(started) and start_time(pid) == started and told.split()[0] not in "ZX"
    return False


def _start(argv: list[str], run_dir: Path, file: Path) -> None:
    """Start it, and wait until it reports by its ``file`` that it is ready."""
    with open(run_dir / "tether.log", "wb") as output:
        # It reads packets of sandboxes and could be taken over, so it does not get the user's
        # variables and the secrets in them.
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={},
            start_new_session=True,
        )
    _started.append(process)
    # At once: two of them cannot serve one network, and a process that is killed now leaves this
    # one behind.
    record = json.dumps([process.pid, start_time(process.pid)])
    (run_dir / "tether.json").write_text(record, "ascii")
    fd = os.pidfd_open(process.pid)
    try:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        for _ in range(int(START_SECONDS / STEP_SECONDS)):
            if ended.poll(STEP_SECONDS * 1000):
                process.wait()
                raise OSError(f"it ended at once ({_said(run_dir)})")
            if file.exists() and file.stat().st_size:
                break
        else:
            process.kill()
            process.wait()
            raise OSError(f"it was not ready in {START_SECONDS:g} s ({_said(run_dir)})")
    finally:
        os.close(fd)


def _said(run_dir: Path) -> str:
    text = (run_dir / "tether.log").read_text("utf-8", "replace")
    # It also complains of a machine without a system log.
    lines = [line for line in text.splitlines() if "syslog" not in line]
    return " ".join(" ".join(lines).split())[-200:] or "without a word"
