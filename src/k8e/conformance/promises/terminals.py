"""Programs on a terminal."""

from __future__ import annotations

from k8e.conformance.behaviour import behaviour, equal, expect
from k8e.conformance.sandbox import PYTHON, with_time
from k8e.conformance.stage import Stage

SIZE = [30, 100]


@behaviour("tty.is-a-terminal")
async def is_a_terminal(stage: Stage) -> None:
    """A program on a terminal sees one on its three descriptors, as its controlling terminal."""
    script = (
        "import os; print([os.isatty(fd) for fd in (0, 1, 2)], os.environ['TERM'],"
        "os.ttyname(0) == os.ttyname(1), os.tcgetpgrp(0) == os.getpid(),"
        "os.isatty(os.open('/dev/tty', os.O_RDWR)))"
    )
    done = await (await stage.shared()).python(script, tty=SIZE)
    wanted = "[True, True, True] xterm-256color True True True"
    equal((done.text.strip(), done.code), (wanted, 0), "terminal")


@behaviour("tty.size")
async def size(stage: Stage) -> None:
    """A terminal has the size that was asked for, and resizing it tells the program."""
    sandbox = await stage.shared()
    script = (
        "import os, signal\n"
        "def show(*_): os.write(1, str(tuple(os.get_terminal_size())).encode())\n"
        "signal.signal(signal.SIGWINCH, show); show()\n"
        "while True: signal.pause()"
    )
    program = await sandbox.start([PYTHON, "-c", script], tty=SIZE)
    await program.until(b"(100, 30)")
    await sandbox.call("resize", id=program.id, rows=50, cols=132)
    await program.until(b"(132, 50)")
    await sandbox.call("signal", id=program.id, terminate=True)
    equal((await program.finish()).status, "killed", "status")


@behaviour("tty.ctrl-c")
async def ctrl_c(stage: Stage) -> None:
    """Ctrl-C on a terminal interrupts the program in front."""
    program = await (await stage.shared()).start(
        ["/bin/sh", "-c", "echo ready; exec sleep 1000"], tty=SIZE
    )
    await program.until(b"ready")
    await program.type(b"\x03")
    equal((await program.finish()).code, 130, "exit code")


@behaviour("tty.shell")
async def shell(stage: Stage) -> None:
    """An interactive shell echoes, runs jobs in front, survives Ctrl-C and ends by Ctrl-D."""
    sandbox = await stage.shared()
    program = await sandbox.start(
        ["/bin/bash", "--norc", "-i"], tty=SIZE, env={"PS1": "prompt> ", "TERM": "dumb"}
    )
    await program.until(b"prompt> ")
    # The job itself says that it is in front; before that, Ctrl-C would be the shell's.
    await program.type(b"sh -c 'echo $((40 + 2)); exec sleep 1000'\n")
    await program.until(b"42\r\n")
    await program.type(b"\x03")
    await program.until(b"prompt> ", times=2)
    await program.type(b"echo alive $((50 + 5))\n")
    await program.until(b"alive 55\r\n")
    await program.until(b"prompt> ", times=3)  # only there does Ctrl-D mean the end
    program.end_input()
    done = await program.finish()
    expect(b"job control" not in done.stdout, "the shell has no job control")
    equal(done.status, "completed", done.story())


@behaviour("tty.hang-up")
async def hang_up(stage: Stage) -> None:
    """A time-out ends a program on a terminal and whatever it runs."""
    sandbox = await stage.shared()

    async def check(seconds: float) -> None:
        done = await sandbox.run(
            ["/bin/bash", "-c", "trap '' TERM HUP; sleep 1000"], tty=SIZE, timeout=seconds / 2
        )
        equal((done.status, done.code), ("timed_out", 137), done.story())

    await with_time(check)
