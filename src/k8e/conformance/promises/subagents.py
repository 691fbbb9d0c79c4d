"""Sandboxes that share a workspace: one sees at once what another does there, and nothing else."""

from __future__ import annotations

import asyncio

from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.sandbox import PYTHON, Program, Sandbox
from k8e.conformance.stage import Stage
from k8e.conformance.traces import traces
from k8e.model import MIB

# Holds a file open, and answers with what it reads there for every line that it gets.
_HOLDER = """
import os, sys
file = os.open("held", os.O_RDWR | os.O_CREAT, 0o644)
print("open", flush=True)
for line in sys.stdin:
    print(os.pread(file, 100, 0).decode(), os.fstat(file).st_size, flush=True)
"""
_MAPPER = """
import mmap, sys
file = open("mapped", "r+b")
memory = mmap.mmap(file.fileno(), 4096)
print("open", flush=True)
for line in sys.stdin:
    print(memory[:5].decode(), flush=True)
    memory[100:104] = b"back"
"""

_SERVER = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], "open", flush=True)
time.sleep(1000)
"""
_FORKER = """
import os, time
try:
    while os.fork():
        pass
    time.sleep(1000)
except OSError:
    print("open", flush=True)
    time.sleep(1000)
"""


async def _pair(stage: Stage) -> tuple[Sandbox, Sandbox]:
    parent = await stage.launch()
    return parent, await stage.launch(sharing=parent)


async def _start(sandbox: Sandbox, script: str) -> Program:
    program = await sandbox.start([PYTHON, "-I", "-c", script], stdin=True)
    await program.until(b"open\n")
    return program


async def _ask(program: Program) -> str:
    before = len(program.outcome.stdout)
    await program.type(b"\n")
    while not program.outcome.stdout[before:].endswith(b"\n"):
        if not await program.take():
            raise BrokenPromise(f"the program ended: {program.outcome.story()}")
    return program.outcome.stdout[before:].decode().strip()


@behaviour("share.files")
async def files(stage: Stage) -> None:
    """What one writes, appends to, renames or deletes, the other sees at once, both ways."""
    parent, child = await _pair(stage)
    for writer, reader in ((parent, child), (child, parent)):
        for number in range(20):
            done = await writer.shell(f"echo {number} > file; mkdir -p dir; echo x > dir/deep")
            equal(done.code, 0, "writing")
            done = await reader.shell("cat file dir/deep")
            equal(done.text, f"{number}\nx\n", "what the other reads")
        await writer.shell("echo more >> file")
        equal((await reader.shell("cat file")).text, "19\nmore\n", "after an append")
        await writer.shell("mv file other; mv dir moved")
        done = await reader.shell("cat other moved/deep; ls")
        equal(done.text, "19\nmore\nx\nmoved\nother\n", "after a rename")
        await writer.shell("truncate -s 3 other; chmod 700 other")
        equal((await reader.shell("cat other; stat -c %a other")).text, "19\n700\n", "when cut")
        await writer.shell("rm -r other moved")
        equal((await reader.shell("ls -A")).text, "", "after a delete")


@behaviour("share.open-file")
async def open_file(stage: Stage) -> None:
    """A file that one holds open shows what another writes and cuts off; deleted, it stays."""
    parent, child = await _pair(stage)
    for holder, writer in ((parent, child), (child, parent)):
        program = await _start(holder, _HOLDER)
        await writer.shell("printf hello > held")
        equal(await _ask(program), "hello 5", "after a write")
        await writer.shell("printf ' you' >> held")
        equal(await _ask(program), "hello you 9", "after an append")
        await writer.shell("truncate -s 4 held")
        equal(await _ask(program), "hell 4", "after a cut")
        await writer.shell("rm held")
        equal(await _ask(program), "hell 4", "after a delete")
        program.end_input()
        equal((await program.finish()).code, 0, "the exit code")


@behaviour("share.mapped-file")
async def mapped_file(stage: Stage) -> None:
    """A file that one has mapped into memory shows what another writes, both ways."""
    parent, child = await _pair(stage)
    for holder, writer in ((parent, child), (child, parent)):
        await writer.shell("head -c 4096 /dev/zero > mapped")
        program = await _start(holder, _MAPPER)
        for word in ("first", "again"):
            await writer.shell(f"printf {word} | dd of=mapped conv=notrunc status=none")
            equal(await _ask(program), word, "what is in memory")
        equal((await writer.shell("tail -c +101 mapped | head -c 4")).text, "back", "in the file")
        program.end_input()
        equal((await program.finish()).code, 0, "the exit code")


@behaviour("share.locks")
async def locks(stage: Stage) -> None:
    """A file is created by exactly one of many who try at once."""
    parent, child = await _pair(stage)
    script = "n=0; for i in $(seq 50); do mkdir lock.$i 2>/dev/null && n=$((n+1)); done; echo $n"
    counts = await asyncio.gather(*(sandbox.shell(script) for sandbox in (parent, child)))
    equal(sum(int(done.text) for done in counts), 50, "folders that somebody made")


@behaviour("share.apart")
async def apart(stage: Stage) -> None:
    """A child has neither processes nor other files nor the loopback network of its parent."""
    parent, child = await _pair(stage)
    marked = await parent.start(["/bin/bash", "-c", "echo up; exec sleep 98765"])
    await marked.until(b"up")
    await parent.shell("echo secret > /tmp/secret; echo secret > ~/secret; echo x > /dev/shm/x")
    done = await child.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls -A /tmp /dev/shm; ls ~")
    expect("98765" not in done.text, "the processes of the parent are visible")
    expect("secret" not in done.text, "files of the parent are visible")
    server = await _start(parent, _SERVER)
    port = server.outcome.text.split()[0]
    connect = f"exec 3<> /dev/tcp/127.0.0.1/{port}"
    equal((await parent.shell(connect)).code, 0, "the parent's own connection")
    expect((await child.shell(connect)).code, "the child reaches the parent's loopback")


@behaviour("share.disk-limit")
async def disk_limit(stage: Stage) -> None:
    """The limit of the workspace is that of all who share it."""
    parent = await stage.launch(disk=8 * MIB)
    child = await stage.launch(sharing=parent, disk=8 * MIB)
    done = await parent.shell("head -c 5M /dev/zero > mine; stat -c %s mine")
    equal(done.text, f"{5 * MIB}\n", "what the parent wrote")
    done = await child.shell("head -c 5M /dev/zero > its")
    expect(done.code and b"No space left" in done.stderr, f"the child wrote it: {done.story()}")


@behaviour("share.own-limits")
async def own_limits(stage: Stage) -> None:
    """A child that uses up its processes takes none from its parent."""
    parent = await stage.launch(pids=32)
    child = await stage.launch(sharing=parent, pids=32)
    await _start(child, _FORKER)
    done = await parent.shell("for i in $(seq 10); do sleep 0 & done; wait; echo fine")
    equal(done.text, "fine\n", "ten processes of the parent")


@behaviour("share.child-ends-alone")
async def child_ends_alone(stage: Stage) -> None:
    """The end of a child leaves the parent, the workspace and other children as they were."""
    parent, child = await _pair(stage)
    other = await stage.launch(sharing=parent)
    await child.shell("echo kept > file; sleep 1000 > /dev/null 2>&1 &")
    child_id = child.guest.sandbox_id
    await child.guest.kill()
    left = await asyncio.to_thread(traces, child_id, stage.folders)
    equal(left, [], "left of the child")
    for sandbox in (parent, other):
        equal((await sandbox.shell("cat file")).text, "kept\n", "the workspace")
    await other.shell("echo new > file")
    equal((await parent.shell("cat file")).text, "new\n", "the workspace, later")


@behaviour("share.working-directory")
async def working_directory(stage: Stage) -> None:
    """Commands of a child start in its folder, which is made if it is missing."""
    parent = await stage.launch()
    child = await stage.launch(sharing=parent, cwd="/workspace/a/b")
    done = await child.shell("pwd; echo $PWD; stat -c %u .; echo x > here")
    equal(done.text, "/workspace/a/b\n/workspace/a/b\n1000\n", "where it starts")
    equal((await parent.shell("cat a/b/here; pwd")).text, "x\n/workspace\n", "for the parent")
    equal((await child.run(["pwd"], cwd="/tmp")).text, "/tmp\n", "when it is said")  # noqa: S108
    equal((await child.run(["pwd"], cwd="a")).text, "/workspace/a\n", "when it is relative")


@behaviour("share.adopt")
async def adopt(stage: Stage) -> None:
    """After a restart both are found, and still share the workspace."""
    parent, child = await _pair(stage)
    await stage.restart()
    await child.shell("echo after > file")
    equal((await parent.shell("cat file")).text, "after\n", "the workspace")
    await child.guest.kill()
    equal((await parent.shell("cat file")).text, "after\n", "the workspace without the child")
