"""Mazes: links and folders by which code makes the guest walk for ever, or further than it can."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable
from typing import Any

from k8e.conformance.behaviour import behaviour, equal, expect
from k8e.conformance.promises.file_refusals import refused
from k8e.conformance.sandbox import PATIENCE, PYTHON, Sandbox
from k8e.conformance.stage import Stage
from k8e.link import request

SLOW = 20.0
"""Seconds in which the guest must answer whatever else it does; much, because hosts are busy."""
DEPTH = 10_000
CHAIN = (
    "import os\n"
    "os.makedirs('maze/a'); os.chdir('maze')\n"
    "for n in range(3000): os.symlink('a/../' * 390 + f'l{n + 1}', f'l{n}')\n"
    "os.symlink('l2990', 'short')\n"
)
"""Each link leads to the next by 780 lookups."""
LONG_WAY = (
    "import os\n"
    "os.makedirs('way/a'); os.makedirs('way/end'); os.chdir('way')\n"
    "for n in range(38): os.symlink('a/../' * 300 + (f'l{n + 1}' if n < 37 else 'end'), f'l{n}')\n"
    "for n in range(600): open(f'end/{n}', 'w').close()\n"
    "os.mkdir('end/sub')\n"
)
"""As many links as a kernel follows, each by hundreds of lookups."""
DEEP = (
    "import os\n"
    "os.mkdir('pit'); os.chdir('pit')\n"
    "os.mkdir('d'); open('d/bottom', 'w').close()\n"
    f"for n in range({DEPTH}):\n"
    "    os.mkdir('n'); os.rename('d', 'n/d'); os.rename('n', 'd')\n"
    "    if n % 200 == 0: print(n, flush=True)\n"  # so that the caller sees that it goes on
)
"""Made from the bottom up, so that its maker needs no descriptor for each level."""
LEASES = (
    "import fcntl, os, signal, time\n"
    "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
    "with open('tool', 'w') as file: file.write('#!/bin/sh\\necho run\\n')\n"
    "os.chmod('tool', 0o755)\n"
    "kept = [os.open(name, os.O_RDWR | os.O_CREAT) for name in ('tool', 'file')]\n"
    "for fd in kept:\n"
    "    try: fcntl.fcntl(fd, 1024, fcntl.F_WRLCK)\n"
    "    except OSError as error: print(error.errno)\n"
    "print('done', flush=True); time.sleep(600)\n"
)
"""Opening or starting a file with a lease waits up to 45 seconds for the lease's holder."""


async def at_once(sandbox: Sandbox, what: str, work: Awaitable[Any]) -> Any:
    """The result of ``work``; meanwhile, the guest must answer others."""
    task = asyncio.ensure_future(work)
    worst = 0.0
    while not task.done():
        before = time.monotonic()
        await sandbox.call("ping")
        worst = max(worst, time.monotonic() - before)
        await asyncio.wait({task}, timeout=0.02)
    expect(worst < SLOW, f"{what}: the guest was silent for {worst:.1f} s")
    return await task


async def remove(sandbox: Sandbox, path: str) -> dict[str, Any]:
    """Remove a tree, which may take longer than other operations."""
    link = await sandbox.guest.connect()
    call = {"op": "remove", "path": path, "recursive": True}
    return await request(link, call, seconds=2 * PATIENCE)


@behaviour("maze.links")
async def links(stage: Stage) -> None:
    """A chain of more links than a kernel follows is ELOOP, for every operation, and at once."""
    sandbox = await stage.launch()
    equal((await sandbox.python(CHAIN)).code, 0, "making the chain")
    calls = {
        "writing": sandbox.write("maze/l0", b"x"),
        "appending": sandbox.write("maze/l0", b"x", append=True),
        "writing below": sandbox.write("maze/l0/new/file", b"x"),
        "reading": sandbox.read("maze/l0"),
        "listing": sandbox.list("maze/l0"),
        "stat": sandbox.call("stat", path="maze/l0", follow=True),
        "mkdir": sandbox.call("mkdir", path="maze/l0/new/folder"),
        "renaming": sandbox.call("rename", path="maze/a", to="maze/l0/new/folder"),
        "linking": sandbox.call("symlink", path="maze/l0/new/link", target="x"),
        "chmod": sandbox.call("chmod", path="maze/l0", mode=0o600),
    }
    for what, call in calls.items():
        await refused(what, at_once(sandbox, what, call), errno.ELOOP)
    try:
        await at_once(sandbox, "running", sandbox.run(["pwd"], cwd="/workspace/maze/l0"))
    except OSError as error:
        equal(error.errno, errno.ELOOP, "a program in a folder behind the chain")
    wrote = await sandbox.write("maze/short", b"x")
    equal(wrote["path"], "/workspace/maze/l3000", "where ten links lead")
    await sandbox.call("remove", path="maze", recursive=True)


@behaviour("maze.long-way")
async def long_way(stage: Stage) -> None:
    """The longest path that a kernel follows delays no other call, whatever is done at its end."""
    sandbox = await stage.launch()
    equal((await sandbox.python(LONG_WAY)).code, 0, "making the way")
    below = "way/l0/" + "x/" * 1000
    await at_once(sandbox, "mkdir", sandbox.call("mkdir", path=below))
    wrote = await at_once(sandbox, "writing", sandbox.write("way/l0/new/file", b"x"))
    equal(wrote["path"], "/workspace/way/end/new/file", "the file that was written")
    listed = await at_once(sandbox, "listing", sandbox.list("way/l0", depth=2))
    paths = {item["path"] for item in listed}
    expect("/workspace/way/l0/new/file" in paths, "the file is not listed")
    equal(len(paths), 600 + len(["sub", "x", "x/x", "new", "new/file"]), "entries")
    done = await at_once(sandbox, "running", sandbox.run(["pwd"], cwd="/workspace/way/l0/sub"))
    equal(done.text, "/workspace/way/end/sub\n", "the working directory")
    looking = sandbox.run(["nothing-of-this-name"], env={"PATH": ":".join(["way/l0"] * 500)})
    await refused("running", at_once(sandbox, "PATH", looking), errno.ENOENT, errno.ETIMEDOUT)
    await at_once(sandbox, "removing", sandbox.call("remove", path="way", recursive=True))


@behaviour("maze.packages")
async def packages(stage: Stage) -> None:
    """A long path to the packages of the user slows runs of Python, and stops no other call."""
    sandbox = await stage.launch()
    equal((await sandbox.python(LONG_WAY)).code, 0, "making the way")
    done = await sandbox.shell(
        "mkdir -p way/end/lib/python3.{9..11}/site-packages; rm -rf ~/.local; "
        "ln -s /workspace/way/l0 ~/.local; touch way/end/lib/python3.9/site-packages/{1..40}.pth"
    )
    equal(done.code, 0, done.story())
    for number in range(3):
        running = sandbox.run(code=b"print(%d)" % number, language="python", timeout=PATIENCE)
        run = await at_once(sandbox, "a run of Python", running)
        equal(run.text, f"{number}\n", "output")


@behaviour("maze.depth")
async def depth(stage: Stage) -> None:
    """A tree of 10,000 levels is removed, and runs before and after it work."""
    sandbox = await stage.launch()
    equal((await sandbox.python(DEEP)).code, 0, "making the tree")
    listed = await at_once(sandbox, "listing", sandbox.list("pit", depth=40))
    equal(len(listed), 40, "levels listed")
    await sandbox.shell("mkdir -p pit/closed/in; touch pit/closed/in/file; chmod 500 pit/closed/in")
    removing = at_once(sandbox, "removing", remove(sandbox, "pit"))
    await refused("a closed folder in it", removing, errno.EACCES)
    equal((await sandbox.shell("chmod 700 pit/closed/in; echo on")).text, "on\n", "a run after it")
    await at_once(sandbox, "removing", remove(sandbox, "pit"))
    equal((await sandbox.shell("ls -A; echo on")).text, "on\n", "what is left, and a run after it")


@behaviour("maze.leases")
async def leases(stage: Stage) -> None:
    """No program makes the guest wait for a file that it starts or opens: there are no leases."""
    sandbox = await stage.launch()
    program = await sandbox.start([PYTHON, "-I", "-c", LEASES])
    await program.until(b"done\n")
    equal(program.outcome.text, f"{errno.EINVAL}\n{errno.EINVAL}\ndone\n", "leases")
    try:
        await at_once(sandbox, "starting", sandbox.run(["/workspace/tool"], timeout=PATIENCE))
    except OSError as error:  # a kernel starts no file that is open for writing
        equal(error.errno, errno.ETXTBSY, "why it is not started")
    await at_once(sandbox, "reading", sandbox.read("file"))
