"""How programs end: time-outs, signals, cancelling, and outliving the client that started them."""

from __future__ import annotations

import asyncio
import secrets

from k8e import errors
from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.sandbox import PATIENCE, PYTHON, Sandbox, with_time
from k8e.conformance.stage import Stage

_FIND = (
    "import glob, sys\n"
    "def text(name):\n"
    "    try: return open(name, 'rb').read()\n"
    "    except OSError: return b''\n"
    "mine = '/proc/self/cmdline'\n"
    "found = [n for n in glob.glob('/proc/[0-9]*/cmdline')\n"
    "         if sys.argv[1].encode() in text(n) and text(n) != text(mine)]\n"
    "print(len(found))"
)
_STUBBORN = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "for _ in range(int(sys.argv[2])):\n"
    "    if not os.fork(): break\n"
    "print('started', flush=True)\n"
    "while True: time.sleep(1)"
)

_VICTIM = (
    "import ctypes, os, time\n"
    "ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)\n"  # anybody may trace it
    "print(os.getpid(), flush=True)\n"
    "time.sleep(1000)"
)
_TRACER = (
    "import ctypes, sys, time\n"
    "libc = ctypes.CDLL(None)\n"
    "seized = libc.ptrace(0x4206, int(sys.argv[1]), None, None)\n"
    "print('refused' if seized else 'seized', flush=True)\n"
    "time.sleep(1000)"
)


def marker() -> str:
    """A word by which the processes of one behaviour are found."""
    return "marker-" + secrets.token_hex(8)


async def count_processes(sandbox: Sandbox, word: str) -> int:
    return int((await sandbox.python(_FIND, word)).text)


async def none_left(sandbox: Sandbox, word: str) -> None:
    """Wait until no process has ``word`` in its command line."""
    try:
        async with asyncio.timeout(PATIENCE):
            while await count_processes(sandbox, word):
                pass
    except TimeoutError:
        raise BrokenPromise("processes were left behind") from None


@behaviour("exec.timeout")
async def timeout(stage: Stage) -> None:
    """A program that exceeds its time-out is ended, and its status says why."""
    sandbox = await stage.shared()

    async def check(seconds: float) -> None:
        done = await sandbox.run(["sleep", "1000"], timeout=seconds / 5)
        equal((done.status, done.code), ("timed_out", 143), "end of sleep")
        expect(done.exit["duration_ms"] >= 200 * seconds, f"the end came early: {done.story()}")

    await with_time(check)


@behaviour("exec.timeout-not-reached")
async def timeout_not_reached(stage: Stage) -> None:
    """A program that ends within its time-out is not touched by it."""
    done = await (await stage.shared()).run(["/bin/sh", "-c", "echo fine"], timeout=20.0)
    equal((done.stdout, done.status, done.code), (b"fine\n", "completed", 0), "program")


@behaviour("exec.timeout-stubborn")
async def timeout_stubborn(stage: Stage) -> None:
    """A program that ignores SIGTERM is killed after a short grace, and its output is kept."""
    sandbox, word = await stage.shared(), marker()

    async def check(seconds: float) -> None:
        done = await sandbox.run([PYTHON, "-c", _STUBBORN, word, "0"], timeout=seconds)
        equal((done.status, done.code), ("timed_out", 137), done.story())
        equal(done.stdout, b"started\n", "output before the end")

    await with_time(check)


@behaviour("exec.kill-traced")
async def kill_traced(stage: Stage) -> None:
    """Who traces a program can keep neither its end from those that wait, nor the guest busy."""
    sandbox = await stage.shared()
    victim = await sandbox.start([PYTHON, "-c", _VICTIM])
    await victim.until(b"\n")
    pid = bytes(victim.outcome.stdout).decode().strip()
    tracer = await sandbox.start([PYTHON, "-c", _TRACER, pid])
    await tracer.until(b"ed\n")
    await sandbox.call("signal", id=victim.id, terminate=True)
    done = await victim.finish()
    seized = tracer.outcome.stdout == b"seized\n"
    # A busy machine may take longer for a gentle end than a program is given.
    equal(done.status, "killed", "the traced program")
    expect(done.code == 137 or (done.code == 143 and not seized), f"its end: {done.story()}")
    await sandbox.call("signal", id=tracer.id, terminate=True)
    equal((await tracer.finish()).status, "killed", "who traced it")
    equal((await sandbox.describe(victim.id))["code"], done.code, "its code afterwards")


@behaviour("exec.timeout-children")
async def timeout_children(stage: Stage) -> None:
    """A time-out also ends children and grandchildren that ignore SIGTERM."""
    sandbox, word = await stage.shared(), marker()

    async def check(seconds: float) -> None:
        done = await sandbox.run([PYTHON, "-c", _STUBBORN, word, "3"], timeout=seconds)
        equal((done.status, done.code), ("timed_out", 137), done.story())
        equal(done.stdout.count(b"started"), 4, "programs that were there")
        await none_left(sandbox, word)

    await with_time(check)


@behaviour("exec.timeout-background")
async def timeout_background(stage: Stage) -> None:
    """A time-out also ends background jobs in process groups of their own."""
    sandbox, word = await stage.shared(), marker()
    # -m gives every job its own process group, out of reach of a kill of the leader's group.
    script = f"set -m; for i in 1 2 3; do (exec -a {word} sleep 1000) & done; echo up; wait"

    async def check(seconds: float) -> None:
        done = await sandbox.run(["/bin/bash", "-c", script], timeout=seconds)
        equal((done.status, done.stdout), ("timed_out", b"up\n"), done.story())
        await none_left(sandbox, word)

    await with_time(check)


@behaviour("exec.daemon")
async def daemon(stage: Stage) -> None:
    """A daemon does not hold up the end of the program that started it, and goes on."""
    sandbox, word = await stage.shared(), marker()
    # It even keeps the program's stdout, and writes to it after the program's end.
    script = f"setsid bash -c 'exec -a {word} sleep 1000; echo' & echo parent"
    done = await sandbox.run(["/bin/bash", "-c", script], timeout=20.0)
    equal((done.stdout, done.status, done.code), (b"parent\n", "completed", 0), "parent")
    try:
        async with asyncio.timeout(PATIENCE):
            while await count_processes(sandbox, word) != 1:
                pass
    except TimeoutError:
        raise BrokenPromise("the daemon did not go on") from None
    await sandbox.shell(f"pkill -f {word}")
    await none_left(sandbox, word)


@behaviour("exec.last-words")
async def last_words(stage: Stage) -> None:
    """Output that passes through a helper which outlives the program is not lost."""
    sandbox = await stage.shared()
    for number in range(10):
        done = await sandbox.shell(f"exec > >(read -r line; echo helped $line); echo {number}")
        equal((done.stdout, done.code), (b"helped %d\n" % number, 0), "output through a helper")


@behaviour("exec.daemon-duration")
async def daemon_duration(stage: Stage) -> None:
    """A program's duration is its own, whatever it leaves running."""
    sandbox, word = await stage.shared(), marker()
    script = f"(exec -a {word} sleep 1000) & exit 3"
    for _ in range(25):  # a busy machine is not always slow, and what is left is there always
        done = await sandbox.shell(script)
        equal(done.code, 3, "exit code")
        if done.exit["duration_ms"] < 150:
            break
    else:
        raise BrokenPromise("the end was recorded late")
    await sandbox.shell(f"pkill -f {word}")
    await none_left(sandbox, word)


@behaviour("exec.daemon-output")
async def daemon_output(stage: Stage) -> None:
    """A daemon that goes on printing to its dead parent's stdout is neither blocked nor killed."""
    sandbox = await stage.shared()
    script = (
        "rm -f daemon-done; (setsid bash -c "
        "'head -c 3000000 /dev/zero && touch daemon-done || echo broken > daemon-done' &) ; exit 5"
    )
    done = await sandbox.shell(script)
    equal(done.code, 5, "exit code of the parent")
    waiting = "for i in $(seq 500); do test -e daemon-done && exit 0; sleep 0.02; done; exit 1"
    equal((await sandbox.shell(waiting)).code, 0, "the daemon's end")
    equal(await sandbox.read("daemon-done"), b"", "what the daemon wrote")


@behaviour("exec.signal")
async def signal(stage: Stage) -> None:
    """A signal reaches a running program, and a program can handle it."""
    sandbox = await stage.shared()
    script = "trap 'echo got it; exit 9' USR1; echo ready; while :; do sleep 0.05; done"
    program = await sandbox.start(["/bin/bash", "-c", script])
    await program.until(b"ready")
    await sandbox.call("signal", id=program.id, signal=10)
    done = await program.finish()
    equal((done.text.split("\n")[1], done.code), ("got it", 9), done.story())


@behaviour("exec.terminate")
async def terminate(stage: Stage) -> None:
    """Terminating an exec ends its whole session, and its status says so."""
    sandbox, word = await stage.shared(), marker()
    program = await sandbox.start([PYTHON, "-c", _STUBBORN, word, "2"])
    await program.until(b"started")
    await sandbox.call("signal", id=program.id, terminate=True)
    done = await program.finish()
    equal((done.status, done.code), ("killed", 137), done.story())
    await none_left(sandbox, word)


@behaviour("exec.kill-on-disconnect")
async def kill_on_disconnect(stage: Stage) -> None:
    """Cancelling kills a program that asked for it, and no other."""
    sandbox = await stage.shared()
    bound = await sandbox.start(["sleep", "1000"], kill_on_disconnect=True)
    free = await sandbox.start(["sleep", "1000"])
    bound.cancel()
    free.cancel()
    watching = await sandbox.attach(bound.id)
    equal((await watching.finish()).status, "killed", "status of the bound program")
    equal((await sandbox.describe(free.id))["status"], "running", "status of the free program")
    await sandbox.call("signal", id=free.id, terminate=True)


@behaviour("exec.reader-leaves")
async def reader_leaves(stage: Stage) -> None:
    """A reader that only attached may leave without harm to a program, whatever it asked for."""
    sandbox = await stage.shared()
    program = await sandbox.start(["cat"], stdin=True, kill_on_disconnect=True)
    (await sandbox.attach(program.id)).cancel()
    await program.type(b"still here")
    program.end_input()
    equal((await program.finish()).stdout, b"still here", "output")


@behaviour("exec.link-lost")
async def link_lost(stage: Stage) -> None:
    """Losing the link kills nothing: the guest dials again, and all output can still be read."""
    sandbox = await stage.shared()
    script = (
        "rm -f go; seq 1000; echo ready; until test -e go; do sleep 0.02; done; echo end; exit 4"
    )
    program = await sandbox.start(["/bin/bash", "-c", script], kill_on_disconnect=True)
    await program.until(b"ready\n")
    before = await sandbox.guest.connect()
    before.close()
    async with asyncio.timeout(PATIENCE):
        await program.lost.wait()
    after = await sandbox.guest.connect()
    expect(after is not before, "the lost link was handed out again")
    again = await sandbox.attach(program.id)
    await sandbox.write("go", b"")
    done = await again.finish()
    numbers = "".join(f"{number}\n" for number in range(1, 1001))
    equal((done.text, done.code), (numbers + "ready\nend\n", 4), "output and exit code")


@behaviour("exec.unknown")
async def unknown(stage: Stage) -> None:
    """Asking for an exec that does not exist is an error of its own kind."""
    sandbox = await stage.shared()
    for op in ("attach", "signal", "resize"):
        try:
            await sandbox.call(op, id="nobody", signal=1, rows=1, cols=1)
        except errors.ExecNotFound:
            continue
        raise BrokenPromise(f"{op} of an unknown exec succeeded")
