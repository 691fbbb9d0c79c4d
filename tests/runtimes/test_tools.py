"""Running the runtimes' own programs."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k8e import errors
from k8e.runtimes import gvisor, tools

SH = "/bin/sh"
TRAP_CPUID = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(158, 0x1012, 1), ctypes.get_errno(), libc.syscall(158, 0x1011, 0))
"""  # arch_prctl: let cpuid answer, as it does; and whether it does


def run(argv: list[str], log: Path, seconds: float = 10, **starter: Callable[[], None]) -> None:
    asyncio.run(tools.run_tool(argv, log=log, seconds=seconds, starter=tools.Starter(**starter)))


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    run([SH, "-c", "echo one; echo two >&2"], tmp_path / "log")
    assert (tmp_path / "log").read_text() == "one\ntwo\n"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_failure_tells_the_status_and_the_last_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of another time\n")
    with pytest.raises(errors.ToolFailed, match=r"^sh failed \(exit 3\): no such thing$"):
        run([SH, "-c", "echo no such thing; exit 3"], tmp_path / "log")


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(["/nowhere/runsc"], tmp_path / "log")


def is_gone(pid_file: Path) -> bool:
    return not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_a_program_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; echo begun; exec sleep 60"
    with pytest.raises(errors.ToolFailed, match=r"did not finish in 0\.5 s: begun"):
        run([SH, "-c", script], tmp_path / "log", 0.5)
    assert is_gone(tmp_path / "pid")


async def cancel_while_running(pid_file: Path, log: Path) -> None:
    os.mkfifo(pid_file.with_name("begun"))
    script = f"echo $$ > {pid_file}; echo > {pid_file.with_name('begun')}; exec sleep 60"
    starter = tools.Starter()
    work = tools.run_tool([SH, "-c", script], log=log, seconds=30, starter=starter)
    task = asyncio.create_task(work)
    async with asyncio.timeout(10):
        await asyncio.to_thread(pid_file.with_name("begun").read_text)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_while_starting(log: Path) -> None:
    starter = tools.Starter()
    work = tools.run_tool(["/bin/sleep", "60"], log=log, seconds=30, starter=starter)
    task = asyncio.create_task(work)
    await asyncio.sleep(0)  # the thread has been told to start it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_program_that_ends_while_it_is_killed_has_ended() -> None:
    process = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    asyncio.run(tools._end(process))  # pyright: ignore[reportPrivateUsage]
    assert process.returncode == 0


def test_whoever_is_cancelled_leaves_no_program(tmp_path: Path) -> None:
    asyncio.run(cancel_while_running(tmp_path / "pid", tmp_path / "log"))
    assert is_gone(tmp_path / "pid")
    asyncio.run(cancel_while_starting(tmp_path / "log"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    left = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    assert b"/bin/sleep\x0060\0" not in left


@pytest.mark.skipif(platform.machine() != "x86_64", reason="cpuid is an instruction of x86")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a filter on system calls")
def test_what_is_started_cannot_make_cpuid_trap_and_nobody_else_is_kept_from_it(
    tmp_path: Path,
) -> None:
    run([sys.executable, "-c", TRAP_CPUID], tmp_path / "log", prepare=gvisor.keep_native)
    assert (tmp_path / "log").read_text().split() == ["-1", str(errno.ENODEV), "1"]
    filters = Path("/proc/self/status").read_text().split("Seccomp_filters:\t")[1].split()[0]
    plain = subprocess.run(
        [sys.executable, "-c", "print(open('/proc/self/status').read())"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"Seccomp_filters:\t{filters}\n" in plain.stdout
