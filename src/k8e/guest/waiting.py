"""An interpreter that has started already and waits for code, to be used once.

A program never runs twice and is never lost. What is sent to an interpreter ends with one byte
that it must take before it begins; if it does not answer in time, that byte is taken back, and
whoever got it decides where the program runs.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from typing import Any

from k8e.guest.conditions import site_changed, suits
from k8e.guest.spawn import find_program, spawn

MESSAGE_MOST = 60 << 10
ANSWER_SECONDS = 0.2
SAID_MOST = 64 << 10  # bytes that one may say before it is ready
TOKEN = b"!"
END_SECONDS = 0.1  # that one may wait for those that were killed


class Waiting:
    """One interpreter, its streams, and what it saw when it was started."""

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
        given: list[int] = []  # what it gets: its three streams, and the input it may have later
        try:
            given.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            self.stdout = self._new_pipe(given, 1)
            self.stderr = self._new_pipe(given, 1)
            for fd in (self.stdout, self.stderr):
                os.set_blocking(fd, False)  # now, while nobody waits
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
        """A new pipe: one end is given away, and this is the other."""
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
        """Whether a new one would start, in this environment, as it did."""
        if kind.conditions(env) != self.conditions:
            return False
        return not self.modules or suits(self.read, self.env, env)

    def is_current(self, kind: Any, env: dict[str, str], cwd: str) -> bool:
        """Whether it is the program that would be started, with the same packages."""
        try:
            found = find_program(kind.program, env["PATH"], cwd)
        except OSError:
            return False
        return found == self.program and not site_changed(self.site)

    def listen(self) -> tuple[str, list[str]] | None:
        """Its first word and what goes with it, once it is whole.

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


def end_process(pid: int) -> None:
    """Kill a child that has not been reaped."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def wait_for_ends(pids: list[int]) -> None:
    """Reap children that were killed, or leave them to whoever reaps all.

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
