"""Contexts: programs that keep their variables between runs of code.

A context is a program of the session like any other (same user, own process session, same limits)
that takes one cell of code after the other. What it prints goes to the cell that runs, and between
two cells is kept for the next. It says results and ends on a socket of its own, so it can lie about
nobody but itself.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from typing import Any

from k8e.guest.execs import PIPE_READ
from k8e.guest.executions import Execution, between_cost, checked_error
from k8e.guest.loop import READ, WRITE, Loop
from k8e.guest.output import BUFFER
from k8e.guest.pressing import Press
from k8e.guest.spawn import BASE_ENV, WORKSPACE, kill_session, spawn
from k8e.guest.talking import talk_in
from k8e.guest.wire import ERR, EXIT, HELLO, OUT, RESULT, SHOW, WireError, frame

START_PATIENCE = 60.0  # seconds that the program has to be ready for code
MAX_WAITING = 16  # cells in the line of one context
BETWEEN_MOST = 64 << 10  # bytes that are kept of what is printed between cells
UNTAKEN_MOST = 64 << 10  # bytes of answers that its program may leave unread
CONTROL_READ = 64 << 10
DRAINED = 4  # reads of each stream, before a result that came after it counts
DRAINED_LAST = (1 << 20) // PIPE_READ + 1  # the same at the end: all that a pipe can hold
DRAINED_AHEAD = 4 * BUFFER  # bytes without a reader; then results overtake what is printed
WORD_SECONDS = 0.05  # that a program has to stop when it is told, before it gets a signal
AGAIN, AGAIN_SECONDS = 3, 1.0  # signals to one that goes on, and how long after


class ContextRefused(Exception):
    """What a context cannot do, with a code that the host knows."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.told = {"code": code, "message": message, "hint": hint}


class Context:
    """One program, and the cells that it runs one after the other."""

    def __init__(self, loop: Loop, name: str, language: str, cwd: str) -> None:
        self.id = name
        self.language = language
        self.cwd = cwd
        self.pid = 0
        self.state = "ended"
        self.ended_because = "it was never started"
        self.current: Execution | None = None
        self.count = 0
        self._loop = loop
        self._line: list[Execution] = []
        self._control: socket.socket | None = None
        self._streams: dict[int, int] = {}
        self._paused = False
        self._between: list[tuple[int, bytes]] = []
        self._outgoing = bytearray()
        self._talk = talk_in(language, name)
        self._pressed: Press | None = None

    # Starting.

    def start(self, session_env: dict[str, str]) -> None:
        """Start its program; OSError if that cannot be."""
        env = dict(BASE_ENV, **session_env)
        env.setdefault("MPLBACKEND", "agg")
        self._talk = talk_in(self.language, self.id)
        self.count = 0
        self._between.clear()
        self._outgoing.clear()
        control, theirs = socket.socketpair()
        reads_control = self._talk.reads_stdin
        given = [
            theirs.fileno() if reads_control else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        ]
        mine: list[int] = []
        try:
            for _ in (OUT, ERR):
                pipe = os.pipe2(os.O_CLOEXEC)
                mine.append(pipe[0])
                given.append(pipe[1])
            theirs.set_inheritable(not reads_control)
            self.pid = spawn(self._talk.command(theirs.fileno()), env, self.cwd, given)
        except BaseException:
            control.close()
            for fd in mine:
                os.close(fd)
            raise
        finally:
            theirs.close()
            for fd in given[reads_control:]:
                os.close(fd)
        self._control = control
        control.setblocking(False)
        for fd in mine:
            os.set_blocking(fd, False)
        self._streams = dict(zip(mine, (OUT, ERR)))
        self.state, self.ended_because = "starting", ""
        self.listen()
        self._loop.watch(control.fileno(), READ, self._on_control)
        self._loop.later(START_PATIENCE, lambda: self._check_ready(control))

    def _check_ready(self, control: socket.socket) -> None:
        if self._control is control and self.state == "starting":
            self.kill(f"it was not ready within {START_PATIENCE:g} seconds")

    # Output.

    def listen(self) -> None:
        """Read what it prints, unless a reader is behind."""
        self._paused = self.current is not None and self.current.output.full
        for fd in self._streams:
            if self._paused:
                self._loop.unwatch(fd)
            else:
                self._loop.watch(fd, READ, lambda _, fd=fd: self._on_output(fd))

    def _on_output(self, fd: int) -> bool:
        """Take one read's worth; False when nothing more is there for now."""
        try:
            data = os.read(fd, PIPE_READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(fd)
            os.close(fd)
            del self._streams[fd]
            return False
        kind = self._streams[fd]
        if self.current is None:
            self._keep(kind, data)
        else:
            self.current.output.add(kind, data)
            if self.current.output.full and not self._paused:
                self.listen()
        return True

    def _keep(self, kind: int, data: bytes) -> None:
        """Printed between two cells: the newest of it belongs to the next one."""
        self._between.append((kind, data))
        while sum(between_cost(data) for _, data in self._between) > BETWEEN_MOST:
            if len(self._between) == 1:
                self._between = [(kind, data[-(BETWEEN_MOST // 2) :])]
                return
            del self._between[0]

    def _drain(self, reads: int) -> None:
        for fd in list(self._streams):
            for _ in range(reads):
                if not self._on_output(fd):
                    break

    # What its program says.

    def _on_control(self, events: int) -> None:
        control = self._control
        if control is None:
            return
        if events & WRITE:
            self._flush()
        if not events & ~WRITE:
            return
        try:
            data = control.recv(CONTROL_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # It may have closed its end; then nothing can be asked of it any more.
            self._loop.unwatch(control.fileno())
            self._loop.later(1.0, lambda: self._closed(control))
            return
        try:
            for kind, number, value in self._talk.feed(data):
                self._on_message(kind, number, value)
        except WireError as error:
            self.kill(f"its program broke the protocol: {error}")

    def _closed(self, control: socket.socket) -> None:
        if self._control is control:
            self.kill("its program closed its connection to the guest")

    def _on_message(self, kind: int, number: int, value: dict[str, Any]) -> None:
        current = self.current
        if kind == HELLO and self.state == "starting":
            self._drain(DRAINED)
            if self.language == "bash":
                self._between.clear()  # that it has no terminal
            self.state = "ready"
            self._next()
        elif kind == SHOW:
            if current is None or current.output.held < DRAINED_AHEAD:
                self._drain(DRAINED)
            if current is not None:
                current.show(value)
            if value.get("waits") is True:
                if len(self._outgoing) > UNTAKEN_MOST:
                    raise WireError("it takes no answers")
                self._tell(frame(RESULT, number))
        elif kind == EXIT and current is not None and number == current.number:
            self._drain(DRAINED_LAST)
            code: Any = value.get("code")
            known = type(code) is int and 0 <= code <= 255
            current.end(code if known else 1, error=checked_error(value))

    def _tell(self, data: bytes) -> None:
        self._outgoing += data
        self._flush()

    def _flush(self) -> None:
        control = self._control
        if control is None:
            return
        try:
            while self._outgoing:
                del self._outgoing[: control.send(self._outgoing)]
        except BlockingIOError:
            self._loop.watch(control.fileno(), READ | WRITE, self._on_control)
            return
        except OSError:
            self._outgoing.clear()  # its end is told by others
            return
        self._loop.watch(control.fileno(), READ, self._on_control)

    # Cells.

    def add(self, execution: Execution) -> None:
        """Put a cell in line."""
        if self.state == "ended":
            raise ContextRefused(
                "context_ended",
                f"context {self.id} has ended: {self.ended_because}",
                "restart it; its variables are gone",
            )
        if len(self._line) >= MAX_WAITING:
            raise ContextRefused(
                "limit_exceeded", f"{MAX_WAITING} runs wait for context {self.id} already"
            )
        self.count += 1
        execution.number = self.count
        self._line.append(execution)
        self._next()

    def _next(self) -> None:
        if self.state == "ready" and self.current is None and self._line:
            current = self.current = self._line.pop(0)
            self._give_between(current)
            try:
                self._tell(self._talk.request(current.number, current.source, current.variables))
            except (OSError, ValueError) as error:
                told = {"name": "ContextError", "value": str(error), "traceback": str(error)}
                current.end(1, error=told)

    def _give_between(self, execution: Execution) -> None:
        between, self._between = self._between, []
        for kind, data in between:
            execution.output.add(kind, data)

    def drop(self, execution: Execution) -> None:
        """A cell is over, or will not run."""
        if execution in self._line:
            self._line.remove(execution)
        if self.current is execution:
            self._talk.finished()
            self.current = None
            if self._pressed is not None:
                self._pressed.cell_ended()
            self.listen()
            # Not from within the end of the one before.
            self._loop.later(0, self._next)

    def skip(self) -> bool:
        """End the cell that would run next; whether there was one."""
        if not self._line:
            return False
        value = "it was interrupted before it began"
        told = {"name": "KeyboardInterrupt", "value": value, "traceback": value + "\n"}
        self._line[0].end(128 + signal.SIGINT, error=told)
        return True

    def interrupt(self) -> None:
        """What Ctrl-C would do."""
        if self.current is not None:
            if self._paused:  # else it could not say its last words, for want of a reader
                self.current.output.ring = True
                self.listen()
            current = self.current
            told = self._talk.interruption(current.number)
            if told:
                self._tell(told)
                self._loop.later(WORD_SECONDS, lambda: self._press_again(current, AGAIN))
                return
            self._press()
            if self.language == "bash":  # a subshell that it is just about to make takes no notice
                self._loop.later(AGAIN_SECONDS, lambda: self._press_again(current, AGAIN))

    def _press(self) -> None:
        if self.language == "bash":
            if self._pressed is not None:
                self._pressed.forget()
            self._pressed = Press(self._loop, self.pid)
            return
        try:
            os.killpg(self.pid, signal.SIGINT)
        except OSError:
            pass  # it has ended

    def _press_again(self, current: Execution, again: int) -> None:
        """It goes on, so it computes, or missed the one before."""
        if self.current is current:
            self._press()
            if again:
                self._loop.later(AGAIN_SECONDS, lambda: self._press_again(current, again - 1))

    # Ending.

    def kill(self, because: str) -> None:
        """End it and everything that it started."""
        if self.state != "ended":
            self._end(because, 128 + signal.SIGKILL, "killed")

    def exited(self, wait_status: int) -> None:
        """Its program has ended by itself."""
        if self.state == "ended":
            return
        code = os.waitstatus_to_exitcode(wait_status)
        how = f"its program exited with code {code}"
        if code < 0:
            how = f"its program was ended by signal {-code} ({signal_name(-code)})"
        self._end(how, code if code >= 0 else 128 - code, "completed")

    def _end(self, because: str, code: int, status: str) -> None:
        kill_session(self.pid, signal.SIGKILL)
        if self._pressed is not None:
            self._pressed.forget()
            self._pressed = None
        if self.current is None and self._line:
            self._give_between(self._line[0])  # why it did not start, perhaps
        self._drain(DRAINED_LAST)
        self.state, self.ended_because = "ended", because
        self._talk.finished()
        if self._control is not None:
            self._loop.unwatch(self._control.fileno())
            self._control.close()
            self._control = None
        for fd in list(self._streams):
            self._loop.unwatch(fd)
            os.close(fd)
        self._streams = {}
        waiting = [self.current] if self.current is not None else []
        waiting += self._line
        self._line = []
        for execution in waiting:
            value = f"context {self.id} has ended: {because}"
            told = {"name": "ContextEnded", "value": value, "traceback": value + "\n"}
            execution.end(code, error=told, status=status)

    def describe(self) -> dict[str, Any]:
        busy = self.state == "ready" and self.current is not None
        return {
            "id": self.id,
            "language": self.language,
            "cwd": self.cwd,
            "pid": self.pid if self.state != "ended" else 0,
            "state": "busy" if busy else self.state,
            "ended_because": self.ended_because,
            "execution_count": self.count,
            "waiting": len(self._line),
        }


class Leader:
    """The process of a context, for whoever reaps it; a restarted context has another."""

    def __init__(self, context: Context) -> None:
        self.pid = context.pid
        self._context = context

    def exited(self, wait_status: int) -> None:
        if self._context.pid == self.pid:
            self._context.exited(wait_status)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def check_folder(cwd: str) -> str:
    """The folder that a context starts in, absolute."""
    if "\0" in cwd or len(cwd) > 4096:
        raise OSError(errno.EINVAL, "the folder is not a path")
    return os.path.join(WORKSPACE, cwd)
