"""Running the runtimes' own programs, with errors that tell the whole story."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from k8e import errors

LOG_TAIL = 600  # bytes of a tool's output that an error repeats


class Starter:
    """A thread that starts programs; they inherit changes that ``prepare`` makes to the thread.

    With it, the event loop does not stand still until a program has been started.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._thread = ThreadPoolExecutor(1, "starter", initializer=prepare)

    async def start(self, argv: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        work = asyncio.get_running_loop().run_in_executor(self._thread, _start, argv, output)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await _end(await asyncio.shield(work))
            raise


def _start(argv: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={"PATH": path}
    )


async def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    await asyncio.shield(_exited(process))


async def _exited(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a process, once it has one."""
    if process.returncode is not None:  # whoever killed it has looked, and its pid is free again
        return process.returncode
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    fd = os.pidfd_open(process.pid)
    try:
        loop.add_reader(fd, lambda: ended.done() or ended.set_result(None))
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return process.wait()


async def run_tool(argv: list[str], *, log: Path, seconds: float, starter: Starter) -> None:
    """Run a program to its end with its output in ``log``.

    Not a pipe: ``runsc create`` hands its stdio to the sandbox, and a pipe would never end. The
    file is closed to others, since the guest has it open and ``/proc/self/fd`` would lead there.
    """
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with open(fd, "ab") as output:  # noqa: ASYNC230 - a local file
        start = output.tell()
        process = await starter.start(argv, output)
        try:
            async with asyncio.timeout(seconds):
                status = await _exited(process)
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise errors.ToolFailed(
                    f"{Path(argv[0]).name} did not finish in {seconds:g} s: {tail(log, start)}"
                ) from None
            raise
    if status:
        raise errors.ToolFailed(f"{Path(argv[0]).name} failed (exit {status}): {tail(log, start)}")


def tail(log: Path, start: int = 0) -> str:
    """The end of the output in ``log`` since ``start``, on one line."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - LOG_TAIL))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "no output"
    return " ".join(text.split()) or "no output"
