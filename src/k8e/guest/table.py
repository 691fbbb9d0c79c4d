"""The execs of the sandbox by id, who reads them, and the reaping of everything that ends in it."""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any

from k8e.guest.dial import Link
from k8e.guest.execs import Exec
from k8e.guest.hits import SESSION_LIMITS, no_more_processes
from k8e.guest.loop import Loop
from k8e.guest.spawn import WORKSPACE
from k8e.guest.transcript import Transcript
from k8e.guest.warm import Warmth
from k8e.guest.wire import (
    CANCEL,
    CREDIT,
    CREDIT_BODY,
    RESULT,
    STDIN,
    STDIN_END,
    WINDOW,
    WireError,
    pack,
)

KEEP_SECONDS = 600  # how long a finished exec can still be read
KEEP_BACKGROUND = 24 * 3600  # the same, for one that nobody waited for
KEEP_COUNT = 64
KEEP_BYTES = 4 << 20
STARTS = 4  # of many at once, after which those that have ended are told
LISTED = 256  # the most execs in one answer, and the most bytes: the host takes 256 KiB
LISTED_BYTES = 192 << 10


class Attachment:
    """A reader of an exec, and what its channel may say."""

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
        self.link: Link | None = None
        self._loop = loop
        self._by_id: dict[str, Exec] = {}
        self._by_pid: dict[int, Any] = {}  # execs, and the leaders of contexts
        self.contexts: Any = None
        self.transcript = Transcript()
        # In the order of their ends: a long one that quick ones overtook has only just become
        # readable. Apart, so that quick commands push out no background run, nor the other way.
        self._finished: tuple[list[Exec], list[Exec]] = ([], [])
        self._exposed: list[int] = []  # programs that the kernel may spare and take the guest
        self._unseen = 0  # starts since the last look for ends
        self.warmth = Warmth(loop, lambda: self._by_pid)
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
        """An exec that nobody can ask for; whoever wants to know of its end adopts it."""
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
            # Where no more processes are allowed, those that only wait make room.
            if error.errno != errno.EAGAIN:
                raise
            if not self.warmth.clear():
                raise no_more_processes() from None
            self._start_last(made, spec)
        return made

    def _start_last(self, made: Exec, spec: dict[str, Any]) -> None:
        """Start a program where nothing is left that could make room."""
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
        """Keep nothing of an exec that has ended; who reads it still gets the rest."""
        if self._by_id.get(target.id) is target:
            del self._by_id[target.id]

    def listing(self) -> list[dict[str, Any]]:
        """The newest execs, as many as fit into one answer; the oldest of them first."""
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
        """Stop the clocks of all time-outs, because the sandbox is to be frozen; or go on."""
        for item in self._by_id.values():
            item.hold(held)
        return {}

    def reap(self) -> None:
        """Collect every child that ended, ours or orphaned; all their ends are told at once."""
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
                # It stopped, having made us its tracer (PTRACE_TRACEME), which we will not be.
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass  # one thread of many, which gVisor does not find: let it be
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
        """When memory runs out, the kernel shall take a program and not the guest.

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
