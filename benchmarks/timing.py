"""Timing of whole programs, beside what :mod:`k8e.bench.measure` has."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from k8e.bench.measure import Timed, interleave, megabytes_per_second, milliseconds, timed

__all__ = [
    "Timed",
    "interleave",
    "megabytes_per_second",
    "milliseconds",
    "timed",
]

PATIENCE = 120.0
SYSTEM_PYTHON = "/usr/bin/python3"


class ProgramFailed(Exception):
    """A program that is measured must not fail."""


def spawn(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Start a program with nothing on its stdio; its pid."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    return os.posix_spawn(argv[0], list(argv), env or _plain_env(), file_actions=null)


def wait(pid: int, argv: Sequence[str]) -> None:
    """Wait for a program of ours without polling; ProgramFailed unless it ended well."""
    code = os.waitstatus_to_exitcode(_reap(pid))
    if code:
        raise ProgramFailed(f"exit code {code} of {' '.join(argv)}")


def run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a program to its end."""
    wait(spawn(argv, env), argv)


def output(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What a program prints that must end well, its complaints in the error; nothing is timed."""
    done = subprocess.run(
        list(argv),
        env=dict(env or _plain_env()),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["without a word"]
        raise ProgramFailed(said[0][:300])
    return done.stdout


def program(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Timed:
    """The whole life of a process, from its start until it is reaped."""
    return timed(lambda: run(argv, env))


def first_line(argv: Sequence[str], env: Mapping[str, str] | None = None) -> float:
    """Seconds until a program has printed its first line; what comes after is off the clock."""
    return burst([argv], env)[0]


def burst(argvs: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> list[float]:
    """Start programs all at once; seconds until each has printed its first line.

    Returns when all have ended; that is off the clock, and so is what they clean up.
    """
    poll = select.poll()
    waiting: dict[int, int] = {}
    pids: list[int] = []
    took = [0.0] * len(argvs)
    began = time.perf_counter()
    try:
        for number, argv in enumerate(argvs):
            ours, theirs = os.pipe2(os.O_CLOEXEC)
            waiting[ours] = number
            poll.register(ours, select.POLLIN)
            try:
                pids.append(_spawn_with_output(argv, env, theirs))
            finally:
                os.close(theirs)
        while waiting:
            ready = poll.poll(PATIENCE * 1000)
            now = time.perf_counter() - began
            if not ready:
                raise ProgramFailed(f"no further line in {PATIENCE:g} s from {' '.join(argvs[0])}")
            for fd, _ in ready:
                number = waiting.pop(fd)
                poll.unregister(fd)
                said = os.read(fd, 4096)
                os.close(fd)
                if not said:
                    raise ProgramFailed(f"no output of {' '.join(argvs[number])}")
                took[number] = now
    finally:
        for fd in waiting:
            os.close(fd)
        for pid in pids:
            _reap(pid)
    return took


def staggered(work: Timed, count: int, spacing: float) -> list[float]:
    """Seconds of each of many, begun one after the other whether or not those before are done."""

    def one(number: int) -> float:
        time.sleep(max(0.0, origin + number * spacing - time.perf_counter()))
        return work()

    origin = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def _spawn_with_output(argv: Sequence[str], env: Mapping[str, str] | None, output: int) -> int:
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    return os.posix_spawn(argv[0], list(argv), env or _plain_env(), file_actions=actions)


def _reap(pid: int) -> int:
    """Wait for a program, and not longer than our patience; its wait status."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(PATIENCE * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return os.waitpid(pid, 0)[1]


def python_pass(env: Mapping[str, str] | None = None) -> Timed:
    """The yardstick for programs: the system's Python doing nothing."""
    return program([SYSTEM_PYTHON, "-c", "pass"], env)


def _plain_env() -> dict[str, str]:
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
