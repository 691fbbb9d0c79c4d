"""Warm interpreters: Pythons that have started already and wait for code, each used once.

Starting Python is most of the time that a short program takes. So after the first run of Python
code the guest keeps one or a few ready, as programs of the session like any other: same user, own
process session, same limits. What they do, and why a program cannot tell, is in ``boot.py``.

A program never runs twice and is never lost. What is sent to an interpreter ends with one byte
that it must take before it begins; if it does not answer in time, that byte is taken back, and
whoever got it decides where the program runs.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Callable

from k8e.guest.conditions import site_changed, site_state, start_conditions
from k8e.guest.languages import ALIASES
from k8e.guest.loop import READ, Loop, Timer
from k8e.guest.spawn import BASE_ENV, GID, UID, find_program, spawn
from k8e.guest.wire import RESULT, WireError, pack

MOST_READY = 3
CODE_MOST = 32 << 10  # bytes; longer code takes longer to compile than we may wait for an answer
MESSAGE_MOST = 60 << 10
ANSWER_SECONDS = 0.2
QUIET = 0.02  # seconds without a program, before one is started that nobody waits for
PATIENCE = 0.3  # seconds after which one is started even if programs run
START_SECONDS = 20.0
KEEP_MANY = 60.0  # seconds without use, after which one is enough
GIVE_UP = 5  # interpreters in a row that ended without being used
BOOT_FILE = "/proc/self/fd/100"  # boot.py makes it
TOKEN = b"!"


def boot_folder(guest_file: str) -> str:
    """Where the boot program of a packed guest is."""
    return os.path.splitext(guest_file)[0].replace("guest-", "boot-")


class WarmPython:
    """One interpreter that waits."""

    def __init__(self, env: dict[str, str], folder: str) -> None:
        self.conditions = start_conditions(env)
        self.program = find_program("python3", env["PATH"], "/")
        self.site = site_state(env["HOME"])
        self.ready = False
        self.control, self._theirs = socket.socketpair()
        self.control.setblocking(False)
        self.stdin = self.stdout = self.stderr = -1
        given: list[int] = []  # what it gets: its three streams, and the input it may have later
        try:
            given.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            self.stdout = self._new_pipe(given, 1)
            self.stderr = self._new_pipe(given, 1)
            self.stdin = self._new_pipe(given, 0)
            self.pid = self._start(env, folder, given)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in given:
                os.close(fd)

    def _new_pipe(self, given: list[int], end: int) -> int:
        """A new pipe: one end is given away, and this is the other."""
        pipe = os.pipe2(os.O_CLOEXEC)
        given.append(pipe[end])
        return pipe[1 - end]

    def _start(self, env: dict[str, str], folder: str, given: list[int]) -> int:
        passed = (self._theirs.fileno(), given[3])
        told = " ".join([folder, *map(str, passed)])
        for fd in passed:
            os.set_inheritable(fd, True)
        try:
            env = dict(env, PYTHONPATH=folder, K8E_BOOT=told)
            return spawn(["python3", BOOT_FILE], env, "/", given[:3])
        finally:
            os.set_inheritable(passed[0], False)

    def begin(self, message: bytes) -> bool:
        """Let it run a program; False if it certainly did not begin."""
        packet = len(message).to_bytes(4, "big") + message + TOKEN
        try:
            sent = self.control.send(packet)
        except OSError:
            sent = 0
        if sent < len(packet):
            return False
        answer = self._hear(ANSWER_SECONDS)
        if answer:
            return answer == b"b"
        # Our own look into its mailbox. What is left there has the byte that lets it begin.
        try:
            taken_back = self._theirs.recv(MESSAGE_MOST * 2, socket.MSG_DONTWAIT)
        except OSError:
            taken_back = b""
        return not taken_back

    def _hear(self, seconds: float) -> bytes:
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        try:
            return self.control.recv(1) if poll.poll(seconds * 1000) else b""
        except OSError:
            return b""

    def leave(self, stdin: bool) -> None:
        """Keep only what an exec reads and writes; its descriptors are the exec's from now on."""
        self.control.close()
        self._theirs.close()
        if not stdin and self.stdin >= 0:
            os.close(self.stdin)

    def close(self) -> None:
        self.leave(False)
        for fd in (self.stdout, self.stderr):
            if fd >= 0:
                os.close(fd)


class Warmth:
    """Keeps interpreters ready, started when nothing else is to be done."""

    def __init__(self, loop: Loop, busy: Callable[[], object]) -> None:
        self.allowed = False
        self.env: dict[str, str] = {}
        self.on_start: Callable[[int], object] = lambda _: None
        self.on_prepared: Callable[[], object] = lambda: None
        self._folder = boot_folder(sys.argv[0])
        self._loop = loop
        self._busy = busy
        self._kept: dict[int, WarmPython] = {}  # by pid
        self._wanted = 0
        self._failures = 0
        self._last_use = 0.0
        self._due = 0.0  # when the next one is started even if programs run
        self._refill: Timer | None = None
        self._fading: Timer | None = None

    def prepare(self) -> None:
        """Have one ready for a session that is to come."""
        self.env = dict(BASE_ENV)
        self.allowed = os.path.isdir(self._folder)
        self._wanted = 1
        self._fill()

    def bind(self, env: dict[str, str], allowed: bool) -> None:
        """A session has this environment, and room for interpreters that wait."""
        self.env = dict(BASE_ENV, **env)
        self.allowed = allowed and os.path.isdir(self._folder)
        conditions = start_conditions(self.env)
        if not self.allowed:
            self.clear()
        for item in list(self._kept.values()):
            if item.conditions != conditions:
                self._drop(item)
                self._plan_refill(QUIET)
            else:
                # The folder of packages may be a new one. Nobody has put anything into either.
                item.site = site_state(self.env["HOME"])
        if not self.allowed or conditions is None:
            self._wanted = 0

    def limit_processes(self, most: int) -> None:
        """Those that wait have no limit yet; only what has the user's ids may set one for them."""
        from resource import RLIMIT_NPROC, prlimit

        os.setresgid(GID, GID, 0)
        os.setresuid(UID, UID, 0)
        try:
            for pid in self._kept:
                prlimit(pid, RLIMIT_NPROC, (most, most))
            return
        except OSError:
            pass  # new ones inherit it
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
        self.clear()
        self._plan_refill(QUIET)

    @property
    def ready(self) -> int:
        """How many could take a program now."""
        return sum(item.ready for item in self._kept.values())

    def keeps(self, pid: int) -> bool:
        return pid in self._kept

    # Using one.

    def claim(self, spec: dict[str, Any], env: dict[str, str], cwd: str) -> WarmPython | None:
        """An interpreter that has begun to run the code of ``spec``; None if a new one must."""
        if not self.allowed or not _is_suitable(spec):
            return None
        conditions = start_conditions(env)
        if conditions is None:
            return None
        self._last_use = time.monotonic()
        item = next((item for item in self._kept.values() if item.ready), None)
        if item is not None and item.conditions == conditions:
            if not site_changed(item.site) and self._is_found(item, env, cwd):
                return self._hand_over(item, spec, env, cwd)
            self.clear()
        if item is None:
            self._wanted = min(MOST_READY, self._wanted + 1)
        self._plan_refill(PATIENCE)
        return None

    def _is_found(self, item: WarmPython, env: dict[str, str], cwd: str) -> bool:
        """Whether this is the program that would be started."""
        try:
            return find_program("python3", env["PATH"], cwd) == item.program
        except OSError:
            return False

    def _hand_over(
        self, item: WarmPython, spec: dict[str, Any], env: dict[str, str], cwd: str
    ) -> WarmPython | None:
        pairs = [(os.fsencode(name), os.fsencode(value)) for name, value in env.items()]
        stdin = bool(spec.get("stdin"))
        message = marshal.dumps((spec["code"], os.fsencode(cwd), pairs, stdin), 2)
        self._plan_refill(PATIENCE)
        if len(message) > MESSAGE_MOST:
            return None
        self._loop.unwatch(item.control.fileno())
        del self._kept[item.pid]
        if not item.begin(message):
            end_process(item.pid)
            item.close()
            return None
        self._failures = 0
        item.leave(stdin)
        return item

    # Having some.

    def on_quiet(self) -> None:
        """No program runs any more."""
        if self.allowed and len(self._kept) < self._wanted:
            self._plan_refill(QUIET)

    def _plan_refill(self, seconds: float) -> None:
        """Start one when nothing has run for so long, and at the latest when it is due."""
        now = time.monotonic()
        if not self._due:
            self._due = now + PATIENCE
        if self._refill is not None:
            self._refill.cancel()
        self._refill = self._loop.later(min(seconds, max(0.0, self._due - now)), self._fill)

    def _fill(self) -> None:
        self._refill = None
        if self._busy() and time.monotonic() < self._due:
            self._plan_refill(PATIENCE)
            return
        self._due = 0.0
        # One after the other: there is no hurry.
        starting = any(not item.ready for item in self._kept.values())
        if starting or not self.allowed or len(self._kept) >= self._wanted:
            return
        try:
            item = WarmPython(self.env, self._folder)
        except OSError:
            self._fail()
            return
        self._kept[item.pid] = item
        self.on_start(item.pid)
        self._loop.watch(item.control.fileno(), READ, lambda _: self._on_word(item))
        self._loop.later(START_SECONDS, lambda: self._check_started(item))
        if self._fading is None:
            self._fading = self._loop.later(KEEP_MANY, self._fade)

    def _on_word(self, item: WarmPython) -> None:
        try:
            word = item.control.recv(16)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == b"o" and not item.ready:
            self._failures = GIVE_UP
        if word != b"r" or item.ready:
            self._drop(item)
            self._fail()
            return
        item.ready = True
        self.on_prepared()
        if len(self._kept) < self._wanted:
            self._plan_refill(QUIET)

    def _check_started(self, item: WarmPython) -> None:
        if not item.ready and self._kept.get(item.pid) is item:
            self._drop(item)
            self._fail()

    def _fade(self) -> None:
        """After a while without use, one is enough."""
        self._fading = None
        left = self._last_use + KEEP_MANY - time.monotonic()
        if left <= 0:
            self._wanted = min(1, self._wanted)
            for item in list(self._kept.values())[1:]:
                self._drop(item)
        elif self._kept:
            self._fading = self._loop.later(left, self._fade)

    def lost(self, pid: int) -> None:
        """A process that is no exec has ended; it was ours, perhaps."""
        item = self._kept.get(pid)
        if item is not None:
            self._forget(item)
            self._fail()

    def _fail(self) -> None:
        self._failures += 1
        if self._failures >= GIVE_UP:
            self.allowed = False
            self.clear()
            self.on_prepared()
        else:
            self._plan_refill(PATIENCE)

    def clear(self) -> bool:
        """End them all, and wait until they are gone; whether there were any."""
        found = list(self._kept.values())
        for item in found:
            self._drop(item)
        for item in found:
            wait_for_end(item.pid)
        return bool(found)

    def _drop(self, item: WarmPython) -> None:
        end_process(item.pid)
        self._forget(item)

    def _forget(self, item: WarmPython) -> None:
        self._loop.unwatch(item.control.fileno())
        item.close()
        del self._kept[item.pid]


class Preparation:
    """Somebody who waits until interpreters wait."""

    def __init__(self, channel: Any, warmth: Warmth, wanted: dict[str, list[str]]) -> None:
        self._channel = channel
        self._warmth = warmth
        channel.handler = self
        if "python" not in wanted or warmth.ready:
            self._answer()
            return
        warmth.on_prepared = self._answer
        warmth.prepare()
        if not warmth.allowed:
            self._answer()

    def on_frame(self, kind: int, body: bytes) -> None:
        raise WireError(f"frame {kind} while a sandbox settles")

    def on_lost(self) -> None:
        self._warmth.on_prepared = lambda: None

    def _answer(self) -> None:
        self.on_lost()
        self._channel.send(RESULT, pack({"warm": self._warmth.ready}))
        self._channel.close()


def _is_suitable(spec: dict[str, Any]) -> bool:
    """Whether a warm interpreter could run this as a new one would."""
    if spec.get("warm") is False or spec.get("tty") or ALIASES.get(spec["language"]) != "python":
        return False
    code = spec["code"]
    if len(code) > CODE_MOST or b"\0" in code:
        return False
    try:
        code.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def end_process(pid: int) -> None:
    """Kill a child that has not been reaped."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def wait_for_end(pid: int) -> None:
    """Reap a child that was killed."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # it was reaped before
