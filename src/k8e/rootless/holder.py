"""The holder: a process that only keeps namespaces alive, for gateways that come and go."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
from collections.abc import Generator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from k8e import errors
from k8e.rootless import cgroup
from k8e.system import start_time

ID_FILES = {"uid": Path("/etc/subuid"), "gid": Path("/etc/subgid")}
LEAST = 4096
"""Fewer ids than this are of no use: the user of a sandbox is number 1000 there."""


@dataclass(frozen=True)
class IdRange:
    """Ids from ``first`` on."""

    first: int
    count: int


def find_ids(kind: str, uid: int) -> IdRange:
    """The largest range of subordinate ids of a user.

    Raises:
        RuntimeUnusable: there is none that is large enough.
    """
    name = _name(uid)
    try:
        text = ID_FILES[kind].read_text("utf-8", "replace")
    except OSError:
        text = ""
    found = max(parse(text, {name, str(uid)}), key=lambda item: item.count, default=IdRange(0, 0))
    if found.count < LEAST:
        raise errors.RuntimeUnusable(
            f"{ID_FILES[kind]} sets aside {found.count or 'no'} ids for the user {name}, and a "
            f"gateway that is not root needs {LEAST} or more",
            hint=f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name} "
            "(choose numbers that no other user has there), or run k8e as root",
        )
    return found


def parse(text: str, owners: set[str]) -> list[IdRange]:
    """The ranges of ``owners`` in the text of such a file; malformed lines are skipped."""
    found: list[IdRange] = []
    for line in text.splitlines():
        owner, _, numbers = line.strip().partition(":")
        first, _, count = numbers.partition(":")
        if owner in owners and first.isdecimal() and count.isdecimal():
            found.append(IdRange(int(first), int(count)))
    return found


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19
MAP_SECONDS = 10.0
MAKE_SECONDS = 20.0
NAME = "k8e-holder"
WORLD = "world"
"""Below the run folder, as the holder sees it: its network, for who cannot look into a process."""
STATES = ("gvisor", "container")
"""Below the run folder: what programs of runtimes remember of processes that went with a holder."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Holder:
    """A running holder."""

    pid: int
    started: int
    """Kernel ticks, so that a reused pid is recognised."""


def ensure(run_dir: Path, *, shared: bool = True) -> tuple[Holder, int]:
    """The holder of a run folder, made if there is none; concurrent callers get the same one.

    The number is a descriptor: while it is open, the holder is not ended. Without ``shared``
    no other process may use it.

    Raises:
        Conflict: another process uses it.
    """
    with _alone(run_dir):
        use = _use(run_dir, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        if use is None:
            raise errors.Conflict(
                f"the namespaces of {run_dir} are in use",
                hint="wait until the other process is done",
            )
        try:
            return find(run_dir) or _make(run_dir), use
        except BaseException:
            os.close(use)
            raise


def find(run_dir: Path) -> Holder | None:
    """The holder of a run folder, if it runs."""
    with contextlib.suppress(*errors.UNREADABLE):
        found = Holder(**json.loads((run_dir / "holder.json").read_text("ascii")))
        # An unreaped zombie has no namespaces any more.
        alive = found.started and start_time(found.pid) == found.started
        if alive and Path(f"/proc/{found.pid}/ns/mnt").exists():
            return found
    return None


def leave(run_dir: Path, use: int) -> None:
    """Stop using a holder; it ends if no other process uses it and no sandbox is left in it."""
    with contextlib.suppress(OSError), _alone(run_dir):
        if use >= 0:
            os.close(use)
        if any(run_dir.glob("sandboxes/sb-*")):
            return
        alone = _use(run_dir, fcntl.LOCK_EX)
        if alone is not None:
            end(run_dir)
            os.close(alone)


def end(run_dir: Path) -> None:
    """End the holder, and with it everything in its namespaces; works twice."""
    with contextlib.suppress(OSError):
        # First, as it takes a moment to end: no process may enter it any more.
        (run_dir / "holder.json").unlink(missing_ok=True)
        # It reads one byte, and ends. Nothing waits for a reader that is not there.
        fd = os.open(run_dir / "holder.fifo", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(b"x")


@contextlib.contextmanager
def _alone(run_dir: Path) -> Generator[None]:
    fd = _open(run_dir / "holder.lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _use(run_dir: Path, how: int) -> int | None:
    """A descriptor that marks the holder as in use; None if another process's lock forbids it."""
    fd = _open(run_dir / "holder.use")
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _make(run_dir: Path) -> Holder:
    uids, gids = find_ids("uid", os.geteuid()), find_ids("gid", os.geteuid())
    count = min(uids.count, gids.count)  # a sandbox has as many of the one as of the other
    cgroup.step_aside()
    # Of sandboxes that ended with an earlier holder: what was a pid of theirs is another's now.
    for name in STATES:
        shutil.rmtree(run_dir / name, ignore_errors=True)
    fifo = run_dir / "holder.fifo"
    for file in (fifo, run_dir / "tether.json"):
        file.unlink(missing_ok=True)
    os.mkfifo(fifo, 0o600)
    (run_dir / WORLD).touch()
    with _pipe() as (hears, tells), _pipe() as (said, says):
        child = os.fork()
        if child == 0:
            _be_maker(run_dir, hears.fileno(), says.fileno())
        hears.close()
        says.close()
        try:
            _await(said, "its user namespace")
            _map("uid", child, os.geteuid(), IdRange(uids.first, count))
            _map("gid", child, os.getegid(), IdRange(gids.first, count))
            tells.write(b"x")
            pid = int(_await(said, "its other namespaces"))
            tells.write(b"x")
            _await(said, "its mounts")
            found = _write_down(run_dir, pid)
            # Only now: a process that is killed before leaves no holder that cannot be found.
            tells.write(b"x")
            _await_end(said)
        except BrokenPipeError:
            raise _impossible("it cannot be made") from None
        finally:
            # It has ended, or waits for a message that will never come.
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return found


def _write_down(run_dir: Path, pid: int) -> Holder:
    found = Holder(pid, start_time(pid))
    scratch = run_dir / "holder.tmp"
    scratch.write_text(json.dumps(asdict(found)), "ascii")
    scratch.rename(run_dir / "holder.json")
    return found


@contextlib.contextmanager
def _pipe() -> Generator[tuple[FileIO, FileIO]]:
    reads, writes = os.pipe2(os.O_CLOEXEC)
    with FileIO(reads, "rb") as reader, FileIO(writes, "wb") as writer:
        yield reader, writer


def _await(said: FileIO, what: str) -> str:
    """Read a line from the process that becomes the holder."""
    line = b""
    while not line.endswith(b"\n"):
        byte = _read(said)
        if not byte:
            raise _impossible(f"{what} cannot be made")
        line += byte
    text = line.decode("utf-8", "replace").strip()
    if text.startswith("error "):
        raise _impossible(f"{what} cannot be made: {text.removeprefix('error ')}")
    return text


def _await_end(said: FileIO) -> None:
    """Wait until the holder has its name, by which processes that enter recognise it."""
    if _read(said) != b"":
        raise _impossible("the program that keeps it cannot be started")


def _read(said: FileIO) -> bytes | None:
    """Read a byte; empty at the end, None if nothing comes."""
    waiting = select.poll()
    waiting.register(said, select.POLLIN)
    return said.read(1) if waiting.poll(MAKE_SECONDS * 1000) else None


def _impossible(why: str) -> errors.RuntimeUnusable:
    return errors.RuntimeUnusable(
        f"a gateway that is not root needs a user namespace, and {why}",
        hint="let users make them (sysctl user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or run k8e as root",
    )


def _map(kind: str, pid: int, own: int, others: IdRange) -> None:
    """Map the namespace's ids to the machine's: 0 is the user, the others are subordinate ids."""
    program = shutil.which(f"new{kind}map", path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin")
    if program is None:
        raise errors.RuntimeUnusable(
            f"a gateway that is not root needs the program new{kind}map",
            hint="sudo apt-get install uidmap (shadow-utils elsewhere), or run k8e as root",
        )
    numbers = [pid, 0, own, 1, 1, others.first, others.count]
    try:
        done = subprocess.run(
            [program, *map(str, numbers)],
            check=False,
            capture_output=True,
            timeout=MAP_SECONDS,
            text=True,
        )
        failure = " ".join(done.stderr.split()) if done.returncode else None
    except (OSError, subprocess.SubprocessError) as error:
        failure = str(error)
    if failure is not None:
        raise errors.RuntimeUnusable(
            f"new{kind}map failed: {failure}",
            hint=f"{ID_FILES[kind]} must set these ids aside for you, and the program must be "
            "setuid root",
        )


# In the child, which has but one thread.


def _be_maker(run_dir: Path, hears: int, says: int) -> None:
    """Make the namespaces; the first process in them is the holder."""
    try:
        # Otherwise it would keep the lock, and the other end of its pipe, open; and the holder
        # would keep descriptors that we inherited.
        _close_all_but(hears, says)
        _check(_libc.unshare(CLONE_NEWUSER), "unshare")
        os.write(says, b"made\n")
        _hear(hears)
        become_root()
        _check(
            _libc.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC), "namespaces"
        )
        pid = os.fork()
        if pid:
            os.write(says, f"{pid}\n".encode())
            os._exit(0)
        _be_holder(run_dir, hears, says)
    except OSError as error:
        os.write(says, f"error {error.strerror}\n".encode())
    finally:
        os._exit(1)


def become_root() -> None:
    """Be user 0 of the user namespace."""
    os.setresgid(0, 0, 0)
    os.setgroups([])
    os.setresuid(0, 0, 0)


def _close_all_but(*kept: int) -> None:
    for fd in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the listing's own is closed already
                os.close(fd)


def _hear(hears: int) -> None:
    """Wait for the parent's signal to continue; end if the parent is gone."""
    if not os.read(hears, 1):
        os._exit(1)


def _be_holder(run_dir: Path, hears: int, says: int) -> None:
    _hear(hears)  # the parent tells our pid first
    os.setsid()
    os.chdir("/")
    # What the machine mounts later is seen in here; what is mounted in here stays.
    _mount(None, b"/", None, MS_REC | MS_SLAVE)
    _mount(b"/proc/self/ns/net", bytes(run_dir / WORLD), None, MS_BIND)
    _mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # Orphans in here become our children, and end with us: the kernel sees to it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    fifo = os.open(run_dir / "holder.fifo", os.O_RDWR)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fifo, 0)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    program = shutil.which("head", path="/usr/bin:/bin") or "head"
    os.write(says, b"ready\n")
    _hear(hears)
    # All descriptors but the first three close by themselves, and the end of ``says`` reports it.
    os.execve(program, [NAME, "-c", "1"], {})  # noqa: S606 - there is nothing for a shell


def _mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), None), f"mounting {target!r}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
