"""Warm interpreters: Pythons and Nodes that have started already and wait for code.

Starting one is most of the time that a short program takes. So after the first run of a language's
code the guest keeps one or a few ready, and for a sandbox that has no session yet it can do so
ahead. They are programs of the session like any other: same user, own process session, same limits.
What they do, and why a program cannot tell, is in ``boot.py`` and ``boot_node.js``.

A program never runs twice and is never lost. What is sent to an interpreter ends with one byte that
it must take before it begins; if it does not answer in time, that byte is taken back, and the end
that got it decides where the program runs.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from typing import Any, Callable

from k8e.guest.interpreters import NodeKind, PythonKind, boot_folder, site_changed, suits
from k8e.guest.loop import READ, Loop, Timer
from k8e.guest.spawn import ALIASES, BASE_ENV, GID, UID, find_program, spawn
from k8e.guest.wire import RESULT, WireError, pack

MESSAGE_MOST = 60 << 10
ANSWER_SECONDS = 0.2
SAID_MOST = 64 << 10  # bytes that one may print before it is ready
TOKEN = b"!"
END_SECONDS = 1.0  # seconds to wait for processes that were killed; they end late if it is busy


class WaitingInterpreter:
    """One waiting interpreter, its streams, and the environment that it was started with."""

    def __init__(self, kind: Any, env: dict[str, str], modules: list[str]) -> None:
        self.env = env
        self.modules = modules
        self.conditions = kind.conditions(env)
        self.program = find_program(kind.program, env["PATH"], "/")
        self.site = kind.site(env)
        self.read: list[str] = []
        """Variables that its modules have looked at."""
        self.ready = False
        self._said = b""
        self.control, self._theirs = socket.socketpair()
        self.control.setblocking(False)
        self.stdin = self.stdout = self.stderr = -1
        given: list[int] = []  # its three streams, and the input that it may get later
        try:
            given.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            self.stdout = self._new_pipe(given, 1)
            self.stderr = self._new_pipe(given, 1)
            for fd in (self.stdout, self.stderr):
                os.set_blocking(fd, False)  # now, while no caller waits
            if kind.reads_input:
                self.stdin = self._new_pipe(given, 0)
            self.pid = self._start(kind, given)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in given:
                os.close(fd)

    def _new_pipe(self, given: list[int], end: int) -> int:
        """Make a pipe; return the end that stays here."""
        pipe = os.pipe2(os.O_CLOEXEC)
        given.append(pipe[end])
        return pipe[1 - end]

    def _start(self, kind: Any, given: list[int]) -> int:
        passed = [self._theirs.fileno(), *given[3:]]
        for fd in passed:
            os.set_inheritable(fd, True)
        try:
            argv, variables = kind.command(passed, self.modules)
            return spawn(argv, dict(self.env, **variables), "/", given[:3])
        finally:
            os.set_inheritable(passed[0], False)

    def suits(self, kind: Any, env: dict[str, str]) -> bool:
        """Whether a new interpreter would start the same way in this environment."""
        if kind.conditions(env) != self.conditions:
            return False
        return not self.modules or suits(self.read, self.env, env)

    def is_current(self, kind: Any, env: dict[str, str], cwd: str) -> bool:
        """Whether the program and packages that it was started with have not changed since."""
        try:
            found = find_program(kind.program, env["PATH"], cwd)
        except OSError:
            return False
        return found == self.program and not site_changed(self.site)

    def listen(self) -> tuple[str, list[str]] | None:
        """Read its first message, once that is complete.

        ``r`` is ready, with the variables that modules have read; ``f`` has failed, with reasons.
        """
        try:
            data = self.control.recv(SAID_MOST)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._said += data
        if not data or self.ready or len(self._said) > SAID_MOST:
            return ("", [])
        if not self._said.endswith(b"\n"):
            return None
        said = self._said[1:-1].decode("utf-8", "surrogateescape")
        return (chr(self._said[0]), said.split("\0") if said else [])

    def begin(self, message: bytes) -> bool:
        """Make it run a program; False if it certainly did not begin."""
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
        # Our own read of its mailbox. If something is left there, so is the byte that lets it
        # begin.
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
        """Keep only what an exec reads and writes; the exec owns the descriptors from now on."""
        self.control.close()
        self._theirs.close()
        if not stdin and self.stdin >= 0:
            os.close(self.stdin)

    def close(self) -> None:
        self.leave(False)
        for fd in (self.stdout, self.stderr):
            if fd >= 0:
                os.close(fd)


def end_process(pid: int) -> None:
    """Kill a child that has not been reaped."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def wait_for_ends(pids: list[int]) -> None:
    """Reap children that were killed; the guest's reaper gets those that take longer.

    A program that traces one keeps its end from us for as long as it likes.
    """
    until = time.monotonic() + END_SECONDS
    for pid in pids:
        while not _is_reaped(pid) and time.monotonic() < until:
            time.sleep(0.001)


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True  # before


QUIET = 0.02  # seconds without a program, before one is started ahead
PATIENCE = 0.3  # seconds after which one is started even if programs run
START_SECONDS = 20.0
KEEP_MANY = 60.0  # seconds without use, after which one is enough
GIVE_UP = 5  # interpreters in a row that ended without being used


class InterpreterPool:
    """The waiting interpreters of one language, and how many are wanted."""

    def __init__(self, kind: Any, loop: Loop, busy: Callable[[], object]) -> None:
        self.kind = kind
        self.allowed = False
        self.env: dict[str, str] = {}
        self.modules: list[str] = []
        self.left_out: list[str] = []
        """Modules that cannot be loaded ahead, and why."""
        self.on_start: Callable[[int], object] = lambda _: None
        self.on_news: Callable[[], object] = lambda: None
        """One is ready, or none will be."""
        self.kept: dict[int, WaitingInterpreter] = {}  # by pid
        self._loop = loop
        self._busy = busy
        self._wanted = 0
        self._failures = 0
        self._last_use = 0.0
        self._due = 0.0  # when the next one is started even if programs run
        self._refill: Timer | None = None
        self._fading: Timer | None = None

    @property
    def ready(self) -> int:
        """How many interpreters could run a program now."""
        return sum(item.ready for item in self.kept.values())

    def prepare(self, env: dict[str, str], modules: list[str]) -> None:
        """Start one for a session that is still to come."""
        self.env = env
        self.allowed = self.kind.is_there()
        self._wanted = 1
        self._load_ahead(modules)
        if self.allowed and (why := self._obstacle()):
            self._tell(why)
            self.allowed = False
        self._fill()

    def _obstacle(self) -> str:
        """Why no interpreter may wait. A missing program is reported when it is to be started."""
        try:
            return self.kind.obstacle(self.env)
        except OSError:
            return ""

    def _load_ahead(self, modules: list[str]) -> None:
        for name in modules:
            if not self.kind.loads_modules:
                self._tell(f"{name}: modules are loaded ahead only for python")
            elif not all(part.isidentifier() for part in name.split(".")):
                self._tell(f"{name}: this is not the name of a module")
            else:
                self.modules.append(name)

    def _tell(self, reason: str) -> None:
        self.left_out.append(f"{self.kind.language}: {reason}")

    def bind(self, env: dict[str, str], allowed: bool, modules: list[str] | None = None) -> None:
        """Take a session's environment, and whether it has room for interpreters that wait."""
        if modules and not self.modules and not self.left_out:  # otherwise they were told before
            self._load_ahead(modules)
        self.env = env
        self.allowed = allowed and self.kind.is_there()
        if not self.allowed:
            self.clear()
        for item in list(self.kept.values()):
            if item.suits(self.kind, env):
                # The folder of packages may be a new one, and both are still empty.
                item.site = self.kind.site(env)
            else:
                self._drop(item)
                self._plan_refill(QUIET)
        if not self.allowed or self.kind.conditions(env) is None:
            self._wanted = 0

    def renew(self) -> None:
        """Replace the interpreters that wait."""
        if self.clear():
            self._plan_refill(QUIET)

    # Using one.

    def claim(
        self, spec: dict[str, Any], env: dict[str, str], cwd: str
    ) -> WaitingInterpreter | None:
        """Make a waiting interpreter run the code of ``spec``; None if a new one is needed."""
        if not self.allowed or not self.kind.takes(spec) or self.kind.conditions(env) is None:
            return None
        self._last_use = time.monotonic()
        item = next((item for item in self.kept.values() if item.ready), None)
        if item is not None and item.suits(self.kind, env):
            if item.is_current(self.kind, env, cwd):
                return self._hand_over(item, spec, env, cwd)
            self.clear()
        if item is None:
            self._wanted = min(self.kind.most_ready, self._wanted + 1)
        self._plan_refill(PATIENCE)
        return None

    def _hand_over(
        self, item: WaitingInterpreter, spec: dict[str, Any], env: dict[str, str], cwd: str
    ) -> WaitingInterpreter | None:
        message = self.kind.message(spec, env, cwd)
        self._plan_refill(PATIENCE)
        if message is None or len(message) > MESSAGE_MOST:
            return None
        self._loop.forget(item.control.fileno())
        del self.kept[item.pid]
        if not item.begin(message):
            end_process(item.pid)
            item.close()
            return None
        self._failures = 0
        item.leave(bool(spec.get("stdin")))
        return item

    # Having some.

    def on_quiet(self) -> None:
        """The last program has ended."""
        if self.allowed and len(self.kept) < self._wanted:
            self._plan_refill(QUIET)

    def _plan_refill(self, seconds: float) -> None:
        """Plan to start one after a while without programs, and at the latest when it is due."""
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
        starting = any(not item.ready for item in self.kept.values())
        if starting or not self.allowed or len(self.kept) >= self._wanted or self._obstacle():
            return
        try:
            item = WaitingInterpreter(self.kind, self.env, self.modules)
        except OSError:
            self._fail()
            return
        self.kept[item.pid] = item
        self.on_start(item.pid)
        self._loop.watch(item.control.fileno(), READ, lambda _: self._on_word(item))
        self._loop.later(START_SECONDS, lambda: self._check_started(item))
        if self._fading is None:
            self._fading = self._loop.later(KEEP_MANY, self._fade)

    def _on_word(self, item: WaitingInterpreter) -> None:
        told = item.listen()
        if told is None:
            return
        word, more = told
        if word == "r":
            item.read = more
            item.ready = True
            self.on_news()
            if len(self.kept) < self._wanted:
                self._plan_refill(QUIET)
            return
        self._drop(item)
        if word == "o":  # a version that this was not tested with
            self._failures = GIVE_UP
        if word == "f" and item.modules:
            self._leave_out(more)
        else:
            self._fail(item)

    def _leave_out(self, reasons: list[str]) -> None:
        """Go on without the modules that these messages name."""
        for text in reasons:
            self._tell(text)
        names = [text.partition(":")[0] for text in reasons]
        kept = [name for name in self.modules if name not in names]
        self.modules = kept if len(kept) < len(self.modules) else []
        self._fill()

    def _check_started(self, item: WaitingInterpreter) -> None:
        if not item.ready and self.kept.get(item.pid) is item:
            self._drop(item)
            self._fail(item)

    def _fade(self) -> None:
        """Keep only one after a while without use."""
        self._fading = None
        left = self._last_use + KEEP_MANY - time.monotonic()
        if left <= 0:
            self._wanted = min(1, self._wanted)
            for item in list(self.kept.values())[1:]:
                self._drop(item)
        elif self.kept:
            self._fading = self._loop.later(left, self._fade)

    def lost(self, pid: int) -> None:
        """Handle the end of a process that is not an exec; it may be one of these."""
        item = self.kept.get(pid)
        if item is not None:
            self._forget(item)
            self._fail(item)

    def _fail(self, item: WaitingInterpreter | None = None) -> None:
        if item is not None and item.modules and not item.ready and self.modules:
            names = " ".join(item.modules)
            self._leave_out([f"{name}: it ended while it loaded {names}" for name in self.modules])
            return
        self._failures += 1
        if self._failures >= GIVE_UP:
            self.allowed = False
            self.clear()
            self.on_news()
        else:
            self._plan_refill(PATIENCE)

    def clear(self) -> bool:
        """End them all, and wait briefly until they are gone; return whether there were any."""
        found = list(self.kept.values())
        for item in found:
            self._drop(item)
        wait_for_ends([item.pid for item in found])
        return bool(found)

    def _drop(self, item: WaitingInterpreter) -> None:
        end_process(item.pid)
        self._forget(item)

    def _forget(self, item: WaitingInterpreter) -> None:
        self._loop.unwatch(item.control.fileno())
        item.close()
        del self.kept[item.pid]


class WarmInterpreters:
    """The pools of all languages, as one."""

    def __init__(self, loop: Loop, busy: Callable[[], object]) -> None:
        folder = boot_folder(sys.argv[0])
        kinds = (PythonKind(folder), NodeKind(folder))
        self.keepers = {kind.language: InterpreterPool(kind, loop, busy) for kind in kinds}

    @property
    def ready(self) -> dict[str, int]:
        """How many interpreters could run a program now, by language."""
        return {name: keeper.ready for name, keeper in self.keepers.items()}

    def keeps(self, pid: int) -> bool:
        return any(pid in keeper.kept for keeper in self.keepers.values())

    def bind(self, env: dict[str, str], languages: dict[str, list[str]]) -> None:
        """Take a session's environment, and the languages for whose interpreters it has room.

        Each language has the modules that are loaded ahead.
        """
        for name, keeper in self.keepers.items():
            keeper.bind(dict(BASE_ENV, **env), name in languages, languages.get(name))

    def limit(self, kind: int, most: int) -> None:
        """Limit those that wait: only a process with the user's ids may set it for them."""
        from resource import prlimit

        os.setresgid(GID, GID, 0)
        os.setresuid(UID, UID, 0)
        try:
            for keeper in self.keepers.values():
                for pid in keeper.kept:
                    prlimit(pid, kind, (most, most))
            return
        except OSError:
            pass  # new ones inherit it
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
        for keeper in self.keepers.values():
            keeper.renew()

    def claim(
        self, spec: dict[str, Any], env: dict[str, str], cwd: str
    ) -> WaitingInterpreter | None:
        """Make a waiting interpreter run the code of ``spec``; None if a new one is needed."""
        keeper = self.keepers.get(ALIASES[spec["language"]])
        if keeper is None or spec.get("warm") is False or spec.get("tty"):
            return None
        return keeper.claim(spec, env, cwd)

    def on_quiet(self) -> None:
        """The last program has ended."""
        for keeper in self.keepers.values():
            keeper.on_quiet()

    def lost(self, pid: int) -> None:
        """Handle the end of a process that is not an exec; it may be one of these."""
        for keeper in self.keepers.values():
            keeper.lost(pid)

    def clear(self) -> bool:
        """End all that wait; return whether there were any."""
        return sum([keeper.clear() for keeper in self.keepers.values()]) > 0


class WarmWait:
    """A call that waits until interpreters are ready."""

    def __init__(
        self,
        channel: Any,
        warmth: WarmInterpreters,
        wanted: dict[str, list[str]],
        env: dict[str, str],
    ) -> None:
        self._channel = channel
        self._asked = [warmth.keepers[name] for name in wanted if name in warmth.keepers]
        channel.handler = self
        for keeper in self._asked:
            keeper.on_news = self._look
            if not keeper.ready:
                keeper.prepare(dict(BASE_ENV, **env), list(wanted[keeper.kind.language]))
        self._look()

    def on_frame(self, kind: int, body: bytes) -> None:
        raise WireError(f"frame {kind} while a sandbox settles")

    def on_lost(self) -> None:
        for keeper in self._asked:
            keeper.on_news = lambda: None

    def _look(self) -> None:
        if any(keeper.allowed and not keeper.ready for keeper in self._asked):
            return
        self.on_lost()
        left_out: list[str] = []
        for keeper in self._asked:
            left_out += keeper.left_out
            if not keeper.ready:
                left_out.append(f"{keeper.kind.language}: none could be started")
        ready = sum(keeper.ready for keeper in self._asked)
        self._channel.send(RESULT, pack({"warm": ready, "left_out": left_out}))
        self._channel.close()
