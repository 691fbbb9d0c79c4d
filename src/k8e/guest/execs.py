"""Execs: programs that belong to the guest, not to a connection.

An exec has an id that its client may choose (and that makes starting it idempotent), numbered
output, any number of readers, and it stays for a while after it ended, for whoever asks later.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any, Callable

from k8e.guest.apart import in_image
from k8e.guest.hits import limits_met
from k8e.guest.inputs import Input, open_terminal, set_terminal_size, terminal_name
from k8e.guest.languages import is_script, language_command, need_language
from k8e.guest.loop import READ, Loop, Timer
from k8e.guest.output import Output, Reader
from k8e.guest.spawn import (
    BASE_ENV,
    GID,
    PATH,
    UID,
    WORKSPACE,
    as_user,
    kill_session,
    spawn,
    spawn_by_actions,
)
from k8e.guest.stock import STOCK
from k8e.guest.warm import Warmth
from k8e.guest.wire import ERR, EXIT, OUT, pack

TERM_GRACE = 0.5  # seconds between SIGTERM and SIGKILL
DEATH_GRACE = 1.0  # seconds between SIGKILL and an end that nobody has told
LAST_WORDS = 0.2  # seconds that a program's output may go on after its end
PIPE_READ = 64 << 10
INPUT_HELD = 1 << 20  # bytes of input that wait for a program, from those who do not wait for it


class Exec:
    """One running or finished program."""

    def __init__(
        self, loop: Loop, leaders: dict[int, Exec], exec_id: str, spec: dict[str, Any]
    ) -> None:
        self.id = exec_id
        # A person who looks at a terminal stops what floods it.
        most = 0 if spec.get("tty") else int(spec.get("most_output") or 0)
        self.output = Output(spec.get("output") == "ring", int(spec.get("limit") or 0), most)
        self.output.on_flood = self._flooded
        self.limits: list[str] = []  # that it has met
        self.kill_on_disconnect = bool(spec.get("kill_on_disconnect"))
        self.kill_on_loss = bool(spec.get("kill_on_loss"))
        self.background = bool(spec.get("background"))
        self.tty: list[int] = spec.get("tty") or []
        self.argv: list[str] = []
        self.warm = False  # run by an interpreter that had been started before
        self.pid = 0
        self.status = "running"
        self.code: int | None = None
        self.signal = 0
        self.started = time.monotonic()
        self.ended = 0.0
        self._loop = loop
        self._leaders = leaders  # by pid: the execs that have not been reaped
        self._timeout = float(spec.get("timeout") or 0)
        self._streams: dict[int, int] = {}  # descriptor → OUT or ERR
        self._paused = False
        self._input = Input(loop)
        self._scratch: str | None = None
        self._deadline: Timer | None = None
        self._time_left = 0.0  # of the time-out, while its clock is stopped
        self.on_exit: list[Callable[[], object]] = []
        self.on_finish: Callable[[str, int], object] | None = None  # when all was said

    # Starting.

    def start(
        self,
        spec: dict[str, Any],
        session_env: dict[str, str],
        session_cwd: str,
        warmth: Warmth,
    ) -> None:
        cwd = os.path.join(WORKSPACE, spec.get("cwd") or session_cwd)
        env = dict(BASE_ENV)
        env.update(session_env)
        env.update(spec.get("env") or {})
        self.argv = self._command(spec, cwd)
        try:
            if "code" in spec and in_image():
                need_language(self.argv[0], env.get("PATH", PATH), cwd)
            if self.tty:
                env.setdefault("TERM", "xterm-256color")
                self._start_on_tty(env, cwd)
            elif not self._start_warm(spec, env, cwd, warmth):
                self._start_on_pipes(env, cwd, bool(spec.get("stdin")))
        except Exception:
            self._remove_scratch()
            raise
        if self._timeout:
            self._deadline = self._loop.later(self._timeout, self._time_out)

    def _command(self, spec: dict[str, Any], cwd: str) -> list[str]:
        if "code" not in spec:
            return list(spec["argv"])
        argv, self._scratch = language_command(spec["language"], spec["code"], self.id, cwd)
        return argv

    def _start_warm(
        self, spec: dict[str, Any], env: dict[str, str], cwd: str, warmth: Warmth
    ) -> bool:
        script = self._scratch if is_script(self.argv, self._scratch) else ""
        claimed = warmth.claim(dict(spec, script=script), env, cwd) if "code" in spec else None
        if claimed is None:
            return False
        self.warm = True
        self.pid = claimed.pid
        self._take_pipes([claimed.stdin, claimed.stdout, claimed.stderr], bool(spec.get("stdin")))
        return True

    def _start_on_pipes(self, env: dict[str, str], cwd: str, stdin: bool) -> None:
        mine: list[int] = []
        theirs: list[int] = []
        try:
            if stdin:
                pipe = os.pipe2(os.O_CLOEXEC)
                theirs.append(pipe[0])
                mine.append(pipe[1])
            else:
                theirs.append(STOCK.take_null())
            for _ in (OUT, ERR):
                pipe = STOCK.take_output()
                mine.append(pipe[0])
                theirs.append(pipe[1])
            self.pid = spawn(self.argv, env, cwd, theirs)
        except BaseException:
            for fd in mine:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._take_pipes(mine, stdin)

    def _take_pipes(self, mine: list[int], stdin: bool) -> None:
        if stdin:
            self._input.fd = mine[0]
            os.set_blocking(mine[0], False)
        self._read_from(mine[-2], OUT)
        self._read_from(mine[-1], ERR)

    def _start_on_tty(self, env: dict[str, str], cwd: str) -> None:
        master, slave = open_terminal()
        try:
            os.fchown(slave, UID, GID)
            set_terminal_size(master, int(self.tty[0]), int(self.tty[1]))
            # The first terminal that a session leader opens becomes its controlling terminal.
            stdio = [
                (os.POSIX_SPAWN_OPEN, 0, terminal_name(master), os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, 0, 1),
                (os.POSIX_SPAWN_DUP2, 0, 2),
            ]
            self.pid = spawn_by_actions(self.argv, env, cwd, stdio)
        except BaseException:
            os.close(master)
            raise
        finally:
            os.close(slave)
        self._input.fd = os.dup(master)
        os.set_blocking(master, False)
        self._read_from(master, OUT)

    def _read_from(self, fd: int, kind: int) -> None:
        """Read from ``fd``, which does not block."""
        self._streams[fd] = kind
        self._loop.watch_soon(fd, lambda _: self._readable(fd))

    # Output.

    def _readable(self, fd: int) -> bool:
        """Take one read's worth; False when nothing more is there for now."""
        try:
            data = os.read(fd, PIPE_READ)
        except BlockingIOError:
            return False
        except OSError:  # EIO: the last user of the terminal is gone
            data = b""
        if not data:
            if self.tty:  # its input is the same terminal, which the kernel would go on watching
                self._loop.unwatch(fd)
            self._loop.close_soon(fd)
            del self._streams[fd]
            if not self._streams and self.code is not None:
                self._finish()
            return False
        if self.output.finished:
            return True  # a daemon of a finished exec: drained, so that it never blocks
        self.output.add(self._streams[fd], data)
        if self.output.full and not self._paused:
            self._paused = True
            for stream in self._streams:
                self._loop.unwatch(stream)
        return True

    def _resume(self) -> None:
        if self._paused and not self.output.full:
            self._listen()

    def _listen(self) -> None:
        self._paused = False
        for fd in self._streams:
            self._loop.watch(fd, READ, lambda _, fd=fd: self._readable(fd))

    # Readers.

    def add_reader(self, channel: Any, *, start: int, credit: int) -> Reader:
        reader = Reader(self.output, channel, start=start, credit=credit)
        reader.on_end = lambda: self._say_exit(channel, reader)
        self.output.readers.append(reader)
        return reader

    def detach(self, reader: Reader, *, kill: bool, lost: bool) -> None:
        """A reader left: for good, or (``lost``) because the link broke and may come back."""
        if reader in self.output.readers:
            self.output.readers.remove(reader)
        if (kill and self.kill_on_disconnect) or (lost and self.kill_on_loss):
            self.abandon()
        if not lost and not self.output.readers:
            self.output.ring = True  # nobody is waiting, so nobody may hold the program up
        self.output.acknowledge()
        self._resume()

    def acknowledged(self) -> None:
        self._resume()

    def _say_exit(self, channel: Any, reader: Reader) -> None:
        channel.send(EXIT, pack(dict(self._describe_end(), lost=reader.lost)))
        channel.close()

    # Input.

    def feed(self, data: bytes, channel: Any) -> None:
        self._input.feed(data, channel)

    def end_input(self) -> None:
        self._input.end(b"\x04" if self.tty else b"")

    def type(self, data: bytes) -> None:
        """Input from somebody who does not wait until the program takes it."""
        if self.code is not None or self._input.fd < 0:
            raise OSError(errno.EPIPE, "the program has ended")
        if self.input_held + len(data) > INPUT_HELD:
            raise OSError(errno.EAGAIN, "the program does not read what was written before")
        self.feed(data, None)

    @property
    def input_held(self) -> int:
        """Bytes of input that the kernel has not taken yet."""
        return self._input.held

    @property
    def terminal(self) -> int:
        """The descriptor of its terminal; -1 once it has ended."""
        return self._input.fd if self.tty else -1

    def resize(self, rows: int, cols: int) -> None:
        if not self.tty:
            raise OSError(errno.ENOTTY, "the program has no terminal")
        if self._input.fd >= 0:
            set_terminal_size(self._input.fd, rows, cols)

    # Ending.

    def hold(self, held: bool) -> None:
        """Stop the clock of the time-out, or let it go on with what was left."""
        if held and self._deadline is not None and self._deadline.callback is not None:
            self._time_left = max(0.001, self._deadline.when - time.monotonic())
            self._deadline.cancel()
        elif not held and self._time_left and self.code is None:
            self._deadline = self._loop.later(self._time_left, self._time_out)
            self._time_left = 0.0

    def _time_out(self) -> None:
        self._deadline = None
        self.terminate("timed_out")

    def _flooded(self) -> None:
        self.limits.append("output")
        self.terminate("killed")

    def abandon(self) -> None:
        """Nobody wants what comes of it."""
        self.terminate("killed")

    def terminate(self, status: str) -> None:
        """Ask the whole session of the program to end, then make it."""
        if self.code is not None:
            return
        if self.status == "running":
            self.status = status
            self._find_limits()  # now: nothing of it will be left to count
        kill_session(self.pid, signal.SIGTERM)
        self._loop.later(TERM_GRACE, self.kill_now)

    def kill_now(self) -> None:
        """Leave nothing of the program's session."""
        # The leader may be gone while members of its session hold on; but if its pid has been
        # given to a newer exec, then its session was empty.
        if self._leaders.get(self.pid, self) is self:
            kill_session(self.pid, signal.SIGKILL)
            if self.code is None:
                self._loop.later(DEATH_GRACE, self._end_unseen)

    def _end_unseen(self) -> None:
        """Who traces the leader keeps its end from us: it has one all the same.

        Its pid stays its own, and it one of the leaders, until it can be reaped.
        """
        self.exited(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.code is None:
            os.killpg(self.pid, number)

    def exited(self, wait_status: int) -> None:
        """The program ended: take what it left in its pipes and tell the readers."""
        if self.code is not None:
            return  # told before
        for fd in list(self._streams):
            self._drain(fd)
        self.code = os.waitstatus_to_exitcode(wait_status)
        if self.code < 0:
            self.signal = -self.code
            self.code = 128 + self.signal
        if self.status == "running":
            self.status = "completed"
        self.ended = time.monotonic()
        if self.code:
            self._find_limits()
        if self._deadline is not None:
            self._deadline.cancel()
        self._input.close()
        for tell in self.on_exit:
            tell()
        if self._streams:  # helpers of a shell, as in `exec > >(cat)`, may have something to say
            self._loop.later(LAST_WORDS, self._finish)
        else:
            self._finish()
        self._remove_scratch()  # last: nobody waits for it, and whoever asks for it comes later

    def _find_limits(self, words: bytes = b"") -> None:
        if not self.limits:
            self.limits = limits_met(self.output.complaints + words)

    def _finish(self) -> None:
        if not self.output.finished:
            self.output.on_flood = None  # nothing collects what refers to itself
            self._say_all()
            self._listen()

    def _say_all(self) -> None:
        """Tell its readers, and whoever follows all programs, that nothing more will come."""
        self.output.copy = None
        self.output.finish()
        told, self.on_finish = self.on_finish, None
        if told is not None:
            told(self.id, self.code or 0)

    def _drain(self, fd: int) -> None:
        # Bounded: a daemon that still writes to this pipe must not keep us here.
        for _ in range(64):
            if not self._readable(fd):
                return

    def _remove_scratch(self) -> None:
        if self._scratch:
            try:
                with as_user():
                    os.unlink(self._scratch)
            except OSError:
                pass  # the program may remove its own file
            self._scratch = None

    def introduce(self) -> dict[str, Any]:
        return {"id": self.id, "pid": self.pid}

    def describe(self, parts: int = 16, part_size: int = 200) -> dict[str, Any]:
        told = self._describe_end()
        told["argv"] = [part[:part_size] for part in self.argv[:parts]]
        told["tty"] = bool(self.tty)
        told["ring"] = self.output.ring
        return told

    def _describe_end(self) -> dict[str, Any]:
        end = self.ended or time.monotonic()
        told: dict[str, Any] = {"limits": self.limits} if self.limits else {}
        if self.status == "timed_out":
            told["timeout"] = self._timeout
        return told | {
            "id": self.id,
            "pid": self.pid,
            "background": self.background,
            "status": self.status,
            "code": self.code,
            "signal": self.signal,
            "duration_ms": int((end - self.started) * 1000),
            "warm": self.warm,
            "truncated": self.output.truncated,
            "seq": self.output.end,
        }
