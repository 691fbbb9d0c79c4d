"""Timing, interleaved: whatever disturbs the machine disturbs everything that is compared."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

Timed = Callable[[], float]
"""Does something once and says how long that took, in seconds."""

PATIENCE = 120.0
SYSTEM_PYTHON = "/usr/bin/python3"


def timed(work: Callable[[], object]) -> Timed:
    """``work`` with a stop-watch around it."""

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def interleave(
    rounds: int, contenders: Mapping[str, Timed], *, warm_up: int = 0
) -> dict[str, list[float]]:
    """Seconds of each contender, once per round.

    Each round has another order, because what runs before leaves its traces in caches.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    order = random.Random(0)
    for turn in range(-warm_up, rounds):
        for name in names:
            took = contenders[name]()
            if turn >= 0:
                samples[name].append(took)
        order.shuffle(names)
    return samples


class ProgramFailed(Exception):
    """A program that is measured must not fail."""


def spawn(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Start a program with nothing on its stdio; its pid."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    return os.posix_spawn(argv[0], list(argv), env or _plain_env(), file_actions=null)


def wait(pid: int, argv: Sequence[str]) -> None:
    """Wait for a program of ours without polling; ProgramFailed unless it ended well."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(PATIENCE * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise ProgramFailed(f"exit code {code} of {' '.join(argv)}")


def run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a program to its end."""
    wait(spawn(argv, env), argv)


def program(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Timed:
    """The whole life of a process, from its start until it is reaped."""
    return timed(lambda: run(argv, env))


def python_pass(env: Mapping[str, str] | None = None) -> Timed:
    """The yardstick for programs: the system's Python doing nothing."""
    return program([SYSTEM_PYTHON, "-c", "pass"], env)


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1000 * value for value in seconds]


def megabytes_per_second(size: int, seconds: Sequence[float]) -> list[float]:
    return [size / 1e6 / value for value in seconds]


def _plain_env() -> dict[str, str]:
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
