"""Running the runtimes' own programs. One helper, so that every failure tells the whole story."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from k8e import errors

LOG_TAIL = 600  # bytes of a tool's output that an error repeats


async def run_tool(argv: list[str], *, log: Path, seconds: float) -> None:
    """Run a program to its end with its output in ``log``.

    Not a pipe: ``runsc create`` hands its stdio to the sandbox, and a pipe would never end. The
    file is closed to others, since the guest has it open and ``/proc/self/fd`` would lead there.
    """
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with open(fd, "ab") as output:  # noqa: ASYNC230 - a local file
        start = output.tell()
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")},
        )
        try:
            async with asyncio.timeout(seconds):
                status = await process.wait()
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
            if isinstance(error, TimeoutError):
                raise errors.ToolFailed(
                    f"{Path(argv[0]).name} did not finish in {seconds:g} s: {tail(log, start)}"
                ) from None
            raise
    if status:
        raise errors.ToolFailed(f"{Path(argv[0]).name} failed (exit {status}): {tail(log, start)}")


def tail(log: Path, start: int = 0) -> str:
    """The end of what was written to ``log`` since ``start``, on one line."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - LOG_TAIL))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "no output"
    return " ".join(text.split()) or "no output"
