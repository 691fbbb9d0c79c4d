"""Sandboxes that are prepared before there is a session for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import json
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from k8e import errors
from k8e.conformance.behaviour import behaviour, equal, expect, in_a_room
from k8e.conformance.lab.far import CDN, OTHER, WEB
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.rooms import Room, Words
from k8e.conformance.promises.confinement import ask
from k8e.conformance.promises.ending import count_processes, marker, none_left
from k8e.conformance.promises.limits import BOMB, FILL, HOG, check_quarter
from k8e.conformance.promises.warm import ready
from k8e.conformance.sandbox import PATIENCE, PYTHON, Outcome, Sandbox, with_time
from k8e.conformance.stage import Stage
from k8e.egress.router import Slot
from k8e.model import MIB, Limits
from k8e.runtimes.base import Binding

_NAMED = {"web.test": WEB, "other.test": OTHER, "a.cdn.test": CDN}
_POLICIES: tuple[tuple[str, ...], ...] = (
    ("web.test:8080",),
    ("other.test:8080",),
    ("strict", "a.cdn.test"),
    (),
)
"""What sessions ask for that claim at the same moment; each of them something else."""


@in_a_room("policy.claimed")
def claimed(room: Room) -> None:
    """A sandbox that waits reaches nothing; claimed, it reaches its session's hosts alone."""
    before = _sandboxes(room)
    with _ready(room, len(_POLICIES)) as waiting, _claimed(room, _POLICIES) as claimants:
        names = [claimant.record.stem for claimant in claimants]
        equal(sorted(names), sorted(waiting), "sandboxes of sessions, beside those that waited")
        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(_reaches_its_own, claimants, _POLICIES))
        # By now, names have opened addresses to their neighbours.
        for claimant, words in zip(claimants, _POLICIES, strict=True):
            _reaches_no_other(claimant, words)
        others = _sandboxes(room).items()
        successors = [slot for name, slot in others if name not in {*before, *names}]
        _have_no_policy(room, successors)


@contextlib.contextmanager
def _ready(room: Room, count: int) -> Generator[dict[str, Slot]]:
    """Have sandboxes wait, which reach nothing; none does after the block."""
    client, before = room.scene.client, _sandboxes(room)
    client.set_pool(runtime=room.runtime, min_ready=count, max_ready=count, wait=True)
    try:
        waiting = {name: slot for name, slot in _sandboxes(room).items() if name not in before}
        equal(len(waiting), count, "sandboxes that wait")
        _have_no_policy(room, waiting.values())
        yield waiting
    finally:
        client.set_pool(runtime=room.runtime, min_ready=0, max_ready=0)
        eventually(lambda: set(_sandboxes(room)) <= set(before))


def _sandboxes(room: Room) -> dict[str, Slot]:
    """Every sandbox of the gateway, with its slot at the router."""
    found: dict[str, Slot] = {}
    for path in (room.scene.net / "sandboxes").glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # it ends while we look
            found[path.stem] = Slot(json.loads(path.read_text("utf-8"))["slot"])
    return found


def _have_no_policy(room: Room, slots: Iterable[Slot]) -> None:
    held = room.scene.elements()
    equal([slot for slot in slots if f'"{slot.interface}"' in held], [], "that have a policy")


@contextlib.contextmanager
def _claimed(room: Room, policies: Sequence[tuple[str, ...]]) -> Generator[list[Room]]:
    """Sessions that were made at once, each with its own words and tenant."""
    with contextlib.ExitStack() as ending, concurrent.futures.ThreadPoolExecutor() as threads:
        rooms = [
            threads.submit(Room, room.scene, room.runtime, *words, tenant=f"tenant-{number}")
            for number, words in enumerate(policies)
        ]
        for made in concurrent.futures.wait(rooms).done:
            if made.exception() is None:
                ending.callback(made.result().close)
        yield [made.result() for made in rooms]


def _own(words: tuple[str, ...]) -> str:
    """The host that a policy allows; empty if there is none."""
    return words[-1].partition(":")[0] if words else ""


def _reaches_its_own(claimant: Room, words: tuple[str, ...]) -> None:
    own = _own(words)
    if "strict" in words:
        said = str(claimant.ask("fetch", f"http://{own}/").said)
        expect(f'"host": "{own}"' in said, f"{own} is not reached under {words}: {said}")
    elif own:
        equal(claimant.ask("tcp", own, 8080).said, _NAMED[own], f"{own} under {words}")
        equal(claimant.ask("tcp", _NAMED[own], 8080).said, _NAMED[own], f"its address ({words})")


def _reaches_no_other(claimant: Room, words: tuple[str, ...]) -> None:
    """Expect that none is reached by name or address, and that no packet gets out."""
    others = {name: at for name, at in _NAMED.items() if name != _own(words)}
    attempts: list[Words] = [["lookup", name] for name in others]
    for name, address in others.items():
        attempts += [["tcp", address, 8080], ["udp", address, 443]]
        attempts += [["fetch", f"http://{address}/", "", name]]
    claimant.scene.become_quiet()
    claimant.scene.forget()
    claimant.refused(*attempts)
    claimant.silence(f"under {words}")
    expect(not claimant.scene.internet.asked, f"a name of others was asked for under {words}")


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
    """Expect that the workspace and /tmp hold as much as the limits say, and no more."""
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
    """Modules are loaded before there is code; one that cannot be is reported and left out."""
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
