"""Sandboxes that are made ready before there is a session for them, and then become a session's."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

from k8e import errors
from k8e.conformance.behaviours import behaviour, equal, expect
from k8e.conformance.confinement import ask
from k8e.conformance.ending import count_processes, marker, none_left
from k8e.conformance.limits import BOMB, FILL, HOG, check_quarter
from k8e.conformance.sandbox import PATIENCE, PYTHON, Outcome, Sandbox, with_time
from k8e.conformance.stage import Stage
from k8e.conformance.warmth import ready
from k8e.model import MIB, Limits
from k8e.runtimes.base import Binding

_SMALL = Limits(cpus=0.5, memory=256 * MIB, pids=64, disk=16 * MIB)
_LARGE = Limits(cpus=2.0, memory=512 * MIB, pids=128, disk=128 * MIB)
_TINY = Limits(cpus=0.25, memory=64 * MIB, pids=40, disk=8 * MIB)
_TMP = "/tmp"  # noqa: S108 - a path in the sandbox
_HOLD = "data = b'x' * ({mib} << 20)\nprint(len(data) >> 20)"
_EVERYTHING = "find /workspace /tmp /var/tmp /dev/shm /home -not -type d; stat -c %u:%a /workspace"


async def _python(sandbox: Sandbox, code: str, **call: Any) -> Outcome:
    program = await sandbox.start(code=code.encode(), language="python", **call)
    return await program.finish()


async def _waiting(sandbox: Sandbox) -> int:
    return int((await sandbox.call("execs"))["warm"])


@behaviour("settle.ready")
async def ready_at_once(stage: Stage) -> None:
    """A sandbox that was made ready runs its session's first Python code warm, in its own place."""
    await with_time(lambda _: _check_ready(stage))  # one that waits must answer at once


async def _check_ready(stage: Stage) -> None:
    sandbox = await stage.settle()
    equal((await _waiting(sandbox), sandbox.left_out), (1, ()), "interpreters that wait")
    await sandbox.guest.bind(Binding(env={"OF_SESSION": "yes"}, cwd="/workspace/deep"))
    equal((await sandbox.call("execs"))["execs"], [], "programs of nobody")
    done = await _python(sandbox, "import os\nprint(os.getcwd(), sorted(os.environ))")
    equal(done.exit["warm"], True, f"the first run: {done.story()}")
    new = await _python(sandbox, "import os\nprint(os.getcwd(), sorted(os.environ))", warm=False)
    equal(done.stdout, new.stdout, "its folder and environment")
    equal((await sandbox.shell(_EVERYTHING)).text, "1000:755\n", "what was there before it")
    await sandbox.write("/workspace/file", b"written")
    equal((await sandbox.shell("cat /workspace/file")).stdout, b"written", "a file")
    await ready(sandbox)


@behaviour("settle.environment")
async def environment(stage: Stage) -> None:
    """An environment that decides how Python starts gets interpreters of its own, or none."""
    await with_time(lambda _: _check_environment(stage))  # one that waits must answer at once


async def _check_environment(stage: Stage) -> None:
    sandbox = await stage.settle()
    await sandbox.guest.bind(Binding(env={"PYTHONUTF8": "0", "TZ": "Asia/Tokyo"}))
    done = await _python(sandbox, "import sys\nprint(sys.flags.utf8_mode)")
    equal((done.stdout, done.exit["warm"]), (b"0\n", False), done.story())
    equal(await _waiting(sandbox), 0, "interpreters that wait in vain")
    sandbox = await stage.settle()
    await sandbox.guest.bind(Binding(env={"TZ": "Asia/Tokyo"}))
    await ready(sandbox)
    done = await _python(sandbox, "import time\nprint(time.tzname)")
    equal((done.stdout, done.exit["warm"]), (b"('JST', 'JST')\n", True), done.story())


async def _settled(stage: Stage, launched: Limits, bound: Limits) -> Sandbox:
    sandbox = await stage.settle(
        cpus=launched.cpus, memory=launched.memory, pids=launched.pids, disk=launched.disk
    )
    await sandbox.guest.bind(Binding(env={}, limits=bound))
    return sandbox


async def _check_places(sandbox: Sandbox, limits: Limits) -> None:
    """The workspace and /tmp hold what the limits say, and no more."""
    for place, most in (("/workspace", limits.disk), (_TMP, limits.memory // 4)):
        size, number = await ask(sandbox, FILL, place)
        equal(number, errno.ENOSPC, f"error in {place} after {size} bytes")
        expect(most * 0.7 <= size <= most, f"{size} bytes went into {place} of {most}")


async def _check_processes(sandbox: Sandbox, least: int, most: int) -> None:
    made, refused = await ask(sandbox, BOMB, "thread")
    expect(refused and least <= made <= most, f"{made} threads, of {least} to {most}")


@behaviour("settle.more")
async def more(stage: Stage) -> None:
    """A session may have more than the sandbox was launched with, and gets all of it."""
    await with_time(lambda _: _check_more(stage))  # one that waits must answer at once


async def _check_more(stage: Stage) -> None:
    sandbox = await _settled(stage, _SMALL, _LARGE)
    done = await _python(sandbox, "print(1)")
    equal((done.stdout, done.exit["warm"]), (b"1\n", True), done.story())
    await _check_places(sandbox, _LARGE)
    await _check_processes(sandbox, _SMALL.pids, _LARGE.pids)
    done = await sandbox.run([PYTHON, "-c", _HOLD.format(mib=380)])
    equal(done.stdout, b"380\n", f"memory: {done.story()}")


@behaviour("settle.less")
async def less(stage: Stage) -> None:
    """A session may have less than the sandbox was launched with, and gets no more than that."""
    sandbox = await _settled(stage, _LARGE, _TINY)
    equal(await _waiting(sandbox), 0, "interpreters that wait in a small session")
    await _check_places(sandbox, _TINY)
    await _check_processes(sandbox, 8, _TINY.pids)
    await check_quarter(sandbox, await stage.shared())
    await stage.restart()
    try:
        done = await sandbox.run([PYTHON, "-c", HOG.format(mib=200)])
    except errors.GuestFailed:
        reason = await sandbox.guest.wait()
        expect("its limit is 64 MiB" in reason, f"the sandbox ended: {reason}")
    else:
        expect(done.code in (1, 137), f"a program that wanted too much: {done.story()}")


@behaviour("settle.modules")
async def modules(stage: Stage) -> None:
    """Modules are loaded before there is code; one that cannot be is told, and left out."""
    await with_time(lambda _: _check_modules(stage))  # one that waits must answer at once


async def _check_modules(stage: Stage) -> None:
    sandbox = await stage.settle("json", "decimal", "this", "no_such_module", "no name")
    names = sorted(text.split(": ")[1] for text in sandbox.left_out)
    equal(names, ["no name", "no_such_module", "this"], f"{sandbox.left_out}")
    await sandbox.guest.bind(Binding(env={"OF_SESSION": "yes"}))
    code = "import sys, json\nprint('decimal' in sys.modules, 'this' in sys.modules, sys.path[0])"
    for _ in range(2):
        await ready(sandbox)
        done = await _python(sandbox, code)
        equal((done.stdout, done.exit["warm"]), (b"True False /workspace\n", True), done.story())
    await ready(sandbox)
    await sandbox.write("/workspace/decimal.py", b"VALUE = 7")
    done = await _python(sandbox, "import decimal\nprint(decimal.VALUE)")
    equal((done.stdout, done.exit["warm"]), (b"7\n", False), f"its own module: {done.story()}")


@behaviour("settle.strays")
async def strays(stage: Stage) -> None:
    """What ran before there was a session does not run in it, but for interpreters that wait."""
    await with_time(lambda _: _check_strays(stage))  # one that waits must answer at once


async def _check_strays(stage: Stage) -> None:
    sandbox, word = await stage.settle(), marker()
    loop = f"(while :; do sleep 1; done; : {word}) >/dev/null 2>&1 &"
    await sandbox.shell(f"setsid sh -c '{loop}'; {loop}")
    async with asyncio.timeout(PATIENCE):  # the shells that began them may still be there
        while await count_processes(sandbox, word) != 2:
            pass
    await sandbox.guest.bind(Binding(env={"OF_SESSION": "yes"}))
    done = await _python(sandbox, "print(1)")
    equal((done.stdout, done.exit["warm"]), (b"1\n", True), done.story())
    await none_left(sandbox, word)
