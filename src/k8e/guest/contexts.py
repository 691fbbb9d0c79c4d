"""Contexts: programs that keep their variables between runs of code.

A context is a program of the session like any other (same user, own process session, same limits)
that takes one cell of code after the other. What it prints goes to the cell that runs, and between
two cells is kept for the next. It reports results and ends on a socket of its own, so it can lie
only about itself.

A new child of bash is a copy of bash that is about to become a program. A signal until then is only
noted by a handler that the program does not have; and bash holds interrupts back while it makes
one, so that afterwards only bash gets it. Then either bash waits for a program that does not know
that it should end, or it goes on without it, and waits for it in the middle of the next cell. So a
child that was a copy then, or did not exist yet, is signalled again as soon as it is a program.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from typing import Any, Callable

from k8e.guest.context_runs import CONTEXT_LANGUAGES, CellExec, between_cost, checked_error, talk_in
from k8e.guest.execs import PIPE_READ
from k8e.guest.isolation import proc_folder
from k8e.guest.loop import READ, WRITE, Loop, Timer
from k8e.guest.spawn import BASE_ENV, WORKSPACE, kill_session, read_stat, spawn
from k8e.guest.streams import BUFFER
from k8e.guest.wire import CALL, CANCEL, ERR, EXIT, HELLO, OUT, RESULT, SHOW, WireError, frame, pack

LOOKS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between two checks


class Interrupt:
    """One interrupt of everything in the process group of ``leader``."""

    def __init__(self, loop: Loop, leader: int) -> None:
        self._loop = loop
        self._leader = leader
        self._left: list[int] | None = None
        self._looks = list(LOOKS)
        # Processes that are programs by now get the signal, and only once: a program may need time
        # to tidy up.
        self._heard = {pid for pid, name in self._children() if name != self._own_name()}
        try:
            os.killpg(leader, signal.SIGINT)
        except OSError:
            return  # it has ended
        self._later()

    def cell_ended(self) -> None:
        """New children belong to the next cell from now on."""
        if self._left is None:
            self._left = [pid for pid, _ in self._children() if pid not in self._heard]

    def forget(self) -> None:
        """Stop watching: there is a newer interrupt, or no process left to signal."""
        self._looks.clear()

    def _later(self) -> None:
        if self._looks and self._left != []:
            self._loop.later(self._looks.pop(0), self._look)

    def _look(self) -> None:
        name = self._own_name()
        for pid, called in self._children():
            if pid in self._heard or (self._left is not None and pid not in self._left):
                continue
            # A copy of bash that never becomes a program is a subshell, and may have missed the
            # signal as well. While bash waits for it, the cell goes on, and all of it is
            # interrupted once more.
            if called != name or (self._left and not self._looks):
                self._heard.add(pid)
                try:
                    os.kill(pid, signal.SIGINT)
                except OSError:
                    pass  # it has ended
        self._later()

    def _own_name(self) -> str:
        found = read_stat(proc_folder(), self._leader)
        return found[0] if found is not None else ""

    def _children(self) -> list[tuple[int, str]]:
        """The pids and names of bash's own children in its group; theirs are up to them."""
        found: list[tuple[int, str]] = []
        for name in os.listdir(proc_folder()):
            stat = read_stat(proc_folder(), int(name)) if name.isdigit() else None
            if stat is not None and stat[1][1:3] == [str(self._leader)] * 2:
                found.append((int(name), stat[0]))
        return found


START_PATIENCE = 60.0  # seconds that the program has to be ready for code
MAX_WAITING = 16  # cells in the line of one context
# Bytes of output between cells that are kept.
BETWEEN_MOST = 64 << 10
UNTAKEN_MOST = 64 << 10  # bytes of answers that its program may leave unread
CONTROL_READ = 64 << 10
DRAINED = 4  # reads of each stream, before a result that came after it counts
DRAINED_LAST = (1 << 20) // PIPE_READ + 1  # the same at the end: all that a pipe can hold
DRAINED_AHEAD = 4 * BUFFER  # bytes without a reader; then results overtake what is printed
# Time for a program that stops cells by itself, before its children are signalled.
WORD_SECONDS = 0.05
AGAIN, AGAIN_SECONDS = 3, 1.0  # signals to one that goes on, and how long after


def _group_members(leader: int) -> list[int]:
    """The processes in the process group of ``leader``, except ``leader`` itself."""
    members: list[int] = []
    for name in os.listdir(proc_folder()):
        stat = read_stat(proc_folder(), int(name)) if name.isdigit() else None
        if stat is not None and stat[1][2] == str(leader) != name:
            members.append(int(name))
    return members


class ContextRefused(Exception):
    """A request that a context cannot fulfil, with a code that the host knows."""

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
        self.current: CellExec | None = None
        self.count = 0
        self._loop = loop
        self._line: list[CellExec] = []
        self._control: socket.socket | None = None
        self._streams: dict[int, int] = {}
        self._paused = False
        self._between: list[tuple[int, bytes]] = []
        self._outgoing = bytearray()
        self._talk = talk_in(language, name)
        self._pressed: Interrupt | None = None
        self._told: CellExec | None = None  # the cell that its program was asked to stop
        self._signal_due = False
        self._next_signal: Timer | None = None

    # Starting.

    def start(self, session_env: dict[str, str]) -> None:
        """Start its program; raises OSError if that fails."""
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
        """Read once; False when there is nothing more for now."""
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
        """Keep the newest of what was printed between two cells, for the next one."""
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
            # It may have closed its end; then it can take no more cells.
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
                self._between.clear()  # bash reports that it has no terminal
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
        elif kind == CALL:
            self._signal_when_begun()
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
            self._outgoing.clear()  # other code reports its end
            return
        self._loop.watch(control.fileno(), READ, self._on_control)
        self._signal_when_begun()

    # Cells.

    def add(self, execution: CellExec) -> None:
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

    def _give_between(self, execution: CellExec) -> None:
        between, self._between = self._between, []
        for kind, data in between:
            execution.output.add(kind, data)

    def drop(self, execution: CellExec) -> None:
        """Remove a cell that is over or will not run."""
        if execution in self._line:
            self._line.remove(execution)
        if self.current is execution:
            self._talk.finished()
            self.current = self._told = None
            self._forget_signals()
            if self._pressed is not None:
                self._pressed.cell_ended()
            self.listen()
            # Not from within the end of the one before.
            self._loop.later(0, self._next)

    def skip(self) -> bool:
        """End the cell that would run next; return whether there was one."""
        if not self._line:
            return False
        value = "it was interrupted before it began"
        told = {"name": "KeyboardInterrupt", "value": value, "traceback": value + "\n"}
        self._line[0].end(128 + signal.SIGINT, error=told)
        return True

    def interrupt(self) -> None:
        """What Ctrl-C would do."""
        current = self.current
        if current is None:
            return
        if self._paused:  # else its last output would have no reader
            current.output.ring = True
            self.listen()
        self._signal_due = True
        is_told, self._told = self._told is current, current
        self._tell(b"" if is_told else self._talk.interruption(current.number))

    def _signal_when_begun(self) -> None:
        """Send a pending signal, once the program has read all earlier messages.

        A signal that comes while the program still reads the cell would stop nothing.
        """
        current = self.current
        if not self._signal_due or current is None or self._outgoing:
            return
        if not self._talk.has_begun(current.number):
            return
        self._forget_signals()
        if self._talk.stops_by_word:
            self._press_later(current, WORD_SECONDS, AGAIN)
            return
        self._press()
        if self.language == "bash":  # a subshell that it is just about to make does not notice
            self._press_later(current, AGAIN_SECONDS, AGAIN)

    def _forget_signals(self) -> None:
        self._signal_due = False
        if self._next_signal is not None:
            self._next_signal.cancel()
            self._next_signal = None

    def _press(self) -> None:
        if self.language == "bash":
            if self._pressed is not None:
                self._pressed.forget()
            self._pressed = Interrupt(self._loop, self.pid)
            return
        try:
            if self._talk.stops_by_word:
                for pid in _group_members(self.pid):
                    os.kill(pid, signal.SIGINT)
            else:
                os.killpg(self.pid, signal.SIGINT)
        except OSError:
            pass  # it has ended

    def _press_later(self, current: CellExec, seconds: float, again: int) -> None:
        """Signal again if the cell goes on: it waits for a child, or missed the last signal."""

        def press() -> None:
            self._next_signal = None
            if self.current is current:
                self._press()
                if again:
                    self._press_later(current, AGAIN_SECONDS, again - 1)

        self._next_signal = self._loop.later(seconds, press)

    # Ending.

    def kill(self, because: str) -> None:
        """Kill it and everything that it started."""
        if self.state != "ended":
            self._end(because, 128 + signal.SIGKILL, "killed")

    def exited(self, wait_status: int) -> None:
        """Handle the end of its program."""
        if self.state == "ended":
            return
        code = os.waitstatus_to_exitcode(wait_status)
        how = f"its program exited with code {code}"
        if code < 0:
            how = f"its program was ended by signal {-code} ({signal_name(-code)})"
        self._end(how, code if code >= 0 else 128 - code, "completed")

    def _end(self, because: str, code: int, status: str) -> None:
        kill_session(self.pid, signal.SIGKILL)
        self._forget_signals()
        if self._pressed is not None:
            self._pressed.forget()
            self._pressed = None
        if self.current is None and self._line:
            self._give_between(self._line[0])  # may explain why it did not start
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
    """The process of a context, as the reaper sees it; a restarted context has a new one."""

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


MAX_CONTEXTS = 32
INTERRUPT_GRACE = 5.0  # seconds that code has to stop, before the caller hears that it did not
LONGEST_PATIENCE = 60.0


class Contexts:
    """All contexts of the sandbox. ``table`` holds their execs."""

    def __init__(self, loop: Loop, table: Any) -> None:
        self._loop = loop
        self._table = table
        self._by_id: dict[str, Context] = {}

    def operations(self) -> dict[str, Callable[[Any, dict[str, Any]], None]]:
        return {
            "create_context": self._create,
            "list_contexts": self._list,
            "remove_context": self._remove,
            "restart_context": self._restart,
            "interrupt_context": self._interrupt,
        }

    def run(self, exec_id: str, spec: dict[str, Any]) -> CellExec:
        """Queue code in a context, which is made first if the call asks for that."""
        context = self._by_id.get(spec["context"])
        if context is None:
            if not spec.get("make_context"):
                raise _unknown(spec["context"])
            context = self._make(spec["context"], spec)
        language = CONTEXT_LANGUAGES.get(spec.get("language") or context.language)
        if language != context.language:
            raise ContextRefused(
                "conflict",
                f"context {context.id} is for {context.language}, not {spec['language']}",
                "use another context for it",
            )
        made = CellExec(self._loop, exec_id, spec, context)
        made.on_exit.append(lambda: self._table.finished(made))
        context.add(made)
        made.set_deadline()
        return made

    def _make(self, name: str, spec: dict[str, Any]) -> Context:
        if len(self._by_id) >= MAX_CONTEXTS:
            raise ContextRefused(
                "limit_exceeded",
                f"the session has {MAX_CONTEXTS} contexts, which is the limit",
                "remove one that is not needed",
            )
        wanted = spec.get("language") or spec.get("make_context")
        language = CONTEXT_LANGUAGES.get(wanted if isinstance(wanted, str) else "python")
        if language is None:
            raise ContextRefused("invalid_request", "there are no contexts for this language")
        cwd = check_folder(spec.get("cwd") or self._table.cwd)
        context = Context(self._loop, name, language, cwd)
        self._start(context)
        self._by_id[name] = context
        return context

    def _start(self, context: Context) -> None:
        try:
            context.start(self._table.env)
        except OSError as error:
            # As for execs: interpreters that only wait make room.
            if error.errno != errno.EAGAIN or not self._table.warmth.clear():
                raise
            context.start(self._table.env)
        self._table.adopt(Leader(context))

    def _get(self, spec: dict[str, Any]) -> Context:
        context = self._by_id.get(spec.get("id") or "")
        if context is None:
            raise _unknown(spec.get("id"))
        return context

    # Operations.

    def _create(self, channel: Any, spec: dict[str, Any]) -> None:
        name = spec.get("id") or "ctx-" + os.urandom(8).hex()
        if name in self._by_id:
            raise ContextRefused("conflict", f"there is a context {name} already")
        channel.send(RESULT, pack(self._make(name, spec).describe()))

    def _list(self, channel: Any, _: dict[str, Any]) -> None:
        found = [context.describe() for context in self._by_id.values()]
        channel.send(RESULT, pack({"contexts": found}))

    def _remove(self, channel: Any, spec: dict[str, Any]) -> None:
        context = self._get(spec)
        context.kill("it was removed")
        del self._by_id[context.id]
        channel.send(RESULT, pack({}))

    def _restart(self, channel: Any, spec: dict[str, Any]) -> None:
        context = self._get(spec)
        context.kill("it was restarted")
        self._start(context)
        channel.send(RESULT, pack(context.describe()))

    def _interrupt(self, channel: Any, spec: dict[str, Any]) -> None:
        context = self._get(spec)
        grace = min(max(0.0, float(spec.get("grace", INTERRUPT_GRACE))), LONGEST_PATIENCE)
        if context.current is None:
            # It may still be starting: then the cell that it starts for is meant.
            answer = {"interrupted": context.skip(), "stopped": True}
            channel.send(RESULT, pack(dict(context.describe(), **answer)))
            return
        Interruption(self._loop, context, channel).begin(grace)


def _unknown(name: Any) -> ContextRefused:
    return ContextRefused(
        "context_not_found",
        f"there is no context {str(name)[:80]} in this session",
        "k8e sandbox context list SESSION lists its contexts",
    )


class Interruption:
    """Interrupts a running cell, and answers when it stopped or when time is up."""

    def __init__(self, loop: Loop, context: Context, channel: Any) -> None:
        self._loop = loop
        self._context = context
        self._channel: Any = channel
        self._target: Any = context.current
        self._timer: Timer | None = None
        channel.handler = self

    def begin(self, grace: float) -> None:
        self._target.on_exit.append(self._answer)
        self._timer = self._loop.later(grace, self._answer)
        self._context.interrupt()

    def _answer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._channel is not None:
            stopped = self._target.code is not None
            answer = {"interrupted": True, "stopped": stopped}
            self._channel.send(RESULT, pack(dict(self._context.describe(), **answer)))
            self._channel.close()
            self._channel = None

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind != CANCEL:
            raise WireError(f"frame {kind} on an interruption")
        self._channel.close()
        self._channel = None

    def on_lost(self) -> None:
        self._channel = None
