"""Execs: programs that belong to the guest, not to a connection; and the table of them.

An exec has an id that its client may choose (and that makes starting it idempotent), numbered
output, any number of readers, and it stays for a while after it ended, for later requests.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any, Callable

from k8e.guest.isolation import in_image
from k8e.guest.limits import SESSION_LIMITS, limits_met, no_more_processes
from k8e.guest.link import GuestLink
from k8e.guest.loop import READ, Loop, Timer
from k8e.guest.spawn import (
    BASE_ENV,
    GID,
    PATH,
    STOCK,
    UID,
    WORKSPACE,
    as_user,
    is_script,
    kill_session,
    language_command,
    need_language,
    session_has_work,
    spawn,
    spawn_by_actions,
)
from k8e.guest.streams import (
    ExecOutput,
    Input,
    OutputReader,
    open_terminal,
    set_terminal_size,
    terminal_name,
)
from k8e.guest.transcript import Transcript
from k8e.guest.warm import WarmInterpreters
from k8e.guest.wire import (
    CANCEL,
    CREDIT,
    CREDIT_BODY,
    ERR,
    EXIT,
    OUT,
    RESULT,
    STDIN,
    STDIN_END,
    WINDOW,
    WireError,
    pack,
)

TERM_GRACE = 0.5  # seconds between SIGTERM and SIGKILL
DEATH_GRACE = 1.0  # seconds between SIGKILL and an end that was not reported
LAST_WORDS = 0.2  # seconds that a program's output may go on after its end
LAST_LOOKS = 10  # as often again, if a process that it left waits for a CPU
PIPE_READ = 64 << 10
INPUT_HELD = 1 << 20  # bytes of input that wait for a program, from callers that do not wait


class Exec:
    """One running or finished program."""

    def __init__(
        self, loop: Loop, leaders: dict[int, Exec], exec_id: str, spec: dict[str, Any]
    ) -> None:
        self.id = exec_id
        # A person at the terminal stops a flood of output.
        most = 0 if spec.get("tty") else int(spec.get("most_output") or 0)
        self.output = ExecOutput(spec.get("output") == "ring", int(spec.get("limit") or 0), most)
        self.output.on_flood = self._flooded
        self.limits: list[str] = []  # limits that it has met
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
        self._time_left = 0.0  # what is left of the time-out, while its clock is stopped
        self.on_exit: list[Callable[[], object]] = []
        self.on_finish: Callable[[str, int], object] | None = None  # when the last output was sent

    # Starting.

    def start(
        self,
        spec: dict[str, Any],
        session_env: dict[str, str],
        session_cwd: str,
        warmth: WarmInterpreters,
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
        code, shared = spec["code"], bool(spec.get("shared"))
        argv, self._scratch = language_command(spec["language"], code, self.id, cwd, shared=shared)
        return argv

    def _start_warm(
        self, spec: dict[str, Any], env: dict[str, str], cwd: str, warmth: WarmInterpreters
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
        """Read once; False when there is nothing more for now."""
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

    def add_reader(self, channel: Any, *, start: int, credit: int) -> OutputReader:
        reader = OutputReader(self.output, channel, start=start, credit=credit)
        reader.on_end = lambda: self._say_exit(channel, reader)
        self.output.readers.append(reader)
        return reader

    def detach(self, reader: OutputReader, *, kill: bool, lost: bool) -> None:
        """Remove a reader that left for good, or (``lost``) whose link broke and may come back."""
        if reader in self.output.readers:
            self.output.readers.remove(reader)
        if (kill and self.kill_on_disconnect) or (lost and self.kill_on_loss):
            self.abandon()
        if not lost and not self.output.readers:
            self.output.ring = True  # no reader is left, so nothing may hold the program up
        self.output.acknowledge()
        self._resume()

    def acknowledged(self) -> None:
        self._resume()

    def _say_exit(self, channel: Any, reader: OutputReader) -> None:
        channel.send(EXIT, pack(dict(self._describe_end(), lost=reader.lost)))
        channel.close()

    # Input.

    def feed(self, data: bytes, channel: Any) -> None:
        self._input.feed(data, channel)

    def end_input(self) -> None:
        self._input.end(b"\x04" if self.tty else b"")

    def type(self, data: bytes) -> None:
        """Take input from a caller that does not wait until the program has read it."""
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
        """Stop the clock of the time-out, or let it go on with the time that was left."""
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
        """End it because its result is no longer wanted."""
        self.terminate("killed")

    def terminate(self, status: str) -> None:
        """Ask all processes of its session to end, then kill them."""
        if self.code is not None:
            return
        if self.status == "running":
            self.status = status
            self._find_limits()  # now: later there is nothing left to count
        kill_session(self.pid, signal.SIGTERM)
        self._loop.later(TERM_GRACE, self.kill_now)

    def kill_now(self) -> None:
        """Kill all processes of its session."""
        # The leader may be gone while members of its session hold on; but if its pid has been
        # given to a newer exec, then its session was empty.
        if self._leaders.get(self.pid, self) is self:
            kill_session(self.pid, signal.SIGKILL)
            if self.code is None:
                self._loop.later(DEATH_GRACE, self._end_unseen)

    def _end_unseen(self) -> None:
        """End it although a tracer of its leader hides that end from us.

        Its pid stays taken, and it stays among the leaders, until it can be reaped.
        """
        self.exited(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.code is None:
            os.killpg(self.pid, number)

    def exited(self, wait_status: int) -> None:
        """Handle the program's end: read what it left in its pipes and tell the readers."""
        if self.code is not None:
            return  # it was asked before
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
        if self._streams:  # helpers of a shell, as in `exec > >(cat)`, may still write
            self._loop.later(LAST_WORDS, self._hear_out)
        else:
            self._finish()
        self._remove_scratch()  # last: no caller waits for it, and requests for it come later

    def _find_limits(self, words: bytes = b"") -> None:
        if not self.limits:
            self.limits = limits_met(self.output.complaints + words)

    def _hear_out(self, looks: int = LAST_LOOKS) -> None:
        """Finish when the processes that the program left are idle; a busy machine takes longer."""
        if self._streams and looks and session_has_work(self.pid):
            self._loop.later(LAST_WORDS, lambda: self._hear_out(looks - 1))
        else:
            self._finish()

    def _finish(self) -> None:
        if not self.output.finished:
            self.output.on_flood = None  # the garbage collector is off, so cycles would stay
            self._say_all()
            self._listen()

    def _say_all(self) -> None:
        """Tell its readers, and followers of all programs, that there is no more output."""
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


KEEP_SECONDS = 600  # how long a finished exec can still be read
KEEP_BACKGROUND = 24 * 3600  # the same, for a background run
KEEP_COUNT = 64
KEEP_BYTES = 4 << 20
STARTS = 4  # many programs that were started at once, after which their ends are reported
LISTED = 256  # the most execs in one answer, and the most bytes: the host takes 256 KiB
LISTED_BYTES = 192 << 10


class Attachment:
    """A reader of an exec, and the messages that its channel may send."""

    def __init__(self, target: Exec, channel: Any, *, start: int, credit: int, owner: bool) -> None:
        self._exec = target
        self._channel = channel
        self._owner = owner
        self._reader = target.add_reader(channel, start=start, credit=credit)
        channel.handler = self
        self._reader.pump()

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind == CREDIT:
            self._reader.credit(CREDIT_BODY.unpack(body)[0])
            self._exec.acknowledged()
        elif kind == STDIN:
            self._exec.feed(body, self._channel)
        elif kind == STDIN_END:
            self._exec.end_input()
        elif kind == CANCEL:
            self._channel.close()
            self._exec.detach(self._reader, kill=self._owner, lost=False)
        else:
            raise WireError(f"frame {kind} on an exec")

    def on_lost(self) -> None:
        self._exec.detach(self._reader, kill=False, lost=True)


class Execs:
    """All execs of the sandbox."""

    def __init__(self, loop: Loop) -> None:
        self.env: dict[str, str] = {}
        self.cwd = WORKSPACE
        self.oom_score_adj = 0
        self.link: GuestLink | None = None
        self._loop = loop
        self._by_id: dict[str, Exec] = {}
        self._by_pid: dict[int, Any] = {}  # execs, and the leaders of contexts
        self.contexts: Any = None
        self.transcript = Transcript()
        # In the order of their ends: a long one that quick ones overtook has only just become
        # readable. Two lists, so that quick commands do not push out background runs, nor the other
        # way round.
        self._finished: tuple[list[Exec], list[Exec]] = ([], [])
        # Programs that the kernel may spare, and kill the guest instead.
        self._exposed: list[int] = []
        self._unseen = 0  # starts since the last check for ends
        self.warmth = WarmInterpreters(loop, lambda: self._by_pid)
        for keeper in self.warmth.keepers.values():
            keeper.on_start = self._expose

    def start(self, channel: Any, spec: dict[str, Any]) -> None:
        credit = int(spec.get("window") or WINDOW)
        spec.setdefault("most_output", SESSION_LIMITS.get("output"))
        exec_id = spec.get("id") or os.urandom(8).hex()
        known = self._by_id.get(exec_id)
        if known is None:
            self._unseen += 1
            if self._unseen == 1:
                self._forget_old()
            elif self._unseen >= STARTS:
                self.reap()
            known = self._by_id[exec_id] = self._begin(exec_id, spec)
            if not known.tty and not spec.get("own"):
                known.on_finish = self.transcript.end
                self.transcript.begin(exec_id, known.output)
        channel.send(RESULT, pack(known.introduce()), soon=True)
        Attachment(known, channel, start=0, credit=credit, owner=True)

    def _begin(self, exec_id: str, spec: dict[str, Any]) -> Exec:
        if "context" in spec:
            return self.contexts.run(exec_id, spec)
        made = self._start(exec_id, spec)
        self._by_pid[made.pid] = made
        if not made.warm:
            self._expose(made.pid)
        return made

    def begin_apart(self, spec: dict[str, Any]) -> Exec:
        """Start an exec without an id for clients; ``adopt`` it to hear of its end."""
        return self._start("", spec)

    def adopt(self, leader: Any) -> None:
        """Tell ``leader`` when its process ends."""
        self._by_pid[leader.pid] = leader
        self._expose(leader.pid)

    def finished(self, ended: Exec) -> None:
        """Keep an exec that has ended for a while."""
        self._finished[ended.background].append(ended)

    def _start(self, exec_id: str, spec: dict[str, Any]) -> Exec:
        made = Exec(self._loop, self._by_pid, exec_id, spec)
        try:
            made.start(spec, self.env, self.cwd, self.warmth)
        except OSError as error:
            # Where no more processes are allowed, interpreters that only wait make room.
            if error.errno != errno.EAGAIN:
                raise
            if not self.warmth.clear():
                raise no_more_processes() from None
            self._start_last(made, spec)
        return made

    def _start_last(self, made: Exec, spec: dict[str, Any]) -> None:
        """Start a program when nothing is left that could make room."""
        try:
            made.start(spec, self.env, self.cwd, self.warmth)
        except BlockingIOError:
            raise no_more_processes() from None

    def _expose(self, pid: int) -> None:
        if self.oom_score_adj:
            if not self._exposed:
                self._loop.add_job(self._protect_guest())
            self._exposed.append(pid)

    def attach(self, channel: Any, spec: dict[str, Any]) -> None:
        target = self.get(spec)
        start, credit = int(spec.get("seq") or 0), int(spec.get("window") or WINDOW)
        channel.send(RESULT, pack(target.describe()))
        Attachment(target, channel, start=start, credit=credit, owner=False)

    def get(self, spec: dict[str, Any]) -> Exec:
        try:
            return self._by_id[spec["id"]]
        except KeyError:
            raise LookupError("no exec {!r} in this sandbox".format(spec.get("id"))) from None

    def forget(self, target: Exec) -> None:
        """Forget an exec that has ended; its readers still get the rest."""
        if self._by_id.get(target.id) is target:
            del self._by_id[target.id]

    def listing(self) -> list[dict[str, Any]]:
        """The newest execs that fit into one answer, oldest first."""
        listed: list[dict[str, Any]] = []
        room = LISTED_BYTES
        for item in list(self._by_id.values())[: -LISTED - 1 : -1]:
            entry = item.describe(parts=4, part_size=80)
            room -= len(pack(entry))
            if room < 0:
                break
            listed.append(entry)
        listed.reverse()
        return listed

    def hold(self, held: bool) -> dict[str, Any]:
        """Stop the clocks of all time-outs before the sandbox is frozen, or let them go on."""
        for item in self._by_id.values():
            item.hold(held)
        return {}

    def reap(self) -> None:
        """Collect every child that ended, ours or orphaned; then report all their ends at once."""
        self._unseen = 0
        if self.link is None:
            self._reap()
            return
        self.link.hold()
        try:
            self._reap()
        finally:
            self.link.release()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                # It stopped, having made us its tracer (PTRACE_TRACEME), which we refuse to be.
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass  # a thread of many, which gVisor does not find: leave it
                continue
            ended = self._by_pid.pop(pid, None)
            if ended is None:
                self.warmth.lost(pid)
                continue
            ended.exited(status)
            if isinstance(ended, Exec):
                self.finished(ended)
            if not self._by_pid:
                self.warmth.on_quiet()

    def _protect_guest(self) -> Any:
        """Make the kernel kill a program and not the guest when memory runs out.

        A job of the loop: of many programs that were started at once, most have ended by then.
        """
        pids, self._exposed = self._exposed, []
        for pid in pids:
            if pid not in self._by_pid and not self.warmth.keeps(pid):
                continue
            try:
                fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.write(fd, b"%d" % self.oom_score_adj)
                finally:
                    os.close(fd)
            except OSError:
                pass  # already gone, or a kernel without it
        return
        yield

    def _forget_old(self) -> None:
        self._forget(self._finished[False], KEEP_SECONDS)
        self._forget(self._finished[True], KEEP_BACKGROUND)

    def _forget(self, finished: list[Exec], seconds: float) -> None:
        if not finished:
            return
        horizon = time.monotonic() - seconds
        count, size = len(finished), sum([item.output.held for item in finished])
        for item in finished[:]:
            if count < KEEP_COUNT and size < KEEP_BYTES and item.ended > horizon:
                return
            if not item.output.readers:
                count -= 1
                size -= item.output.held
                finished.remove(item)
                if self._by_id.get(item.id) is item:  # a terminal may have been forgotten before
                    del self._by_id[item.id]
