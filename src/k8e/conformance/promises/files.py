"""Files: read, written, listed and moved inside the sandbox."""

from __future__ import annotations

import asyncio
import errno
import hashlib

from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.promises.output import GUEST_GROWTH, guest_memory
from k8e.conformance.sandbox import PYTHON, OperationStream
from k8e.conformance.stage import Stage
from k8e.guest import wire
from k8e.model import MIB

EVERY_BYTE = bytes(range(256))
LARGE = 100 * MIB
ENTRIES = 3000


@behaviour("files.round-trip")
async def round_trip(stage: Stage) -> None:
    """A file of any bytes is read as it was written, and programs see the same."""
    sandbox = await stage.shared()
    for data in (b"", b"\0", EVERY_BYTE, EVERY_BYTE * 5000):
        wrote = await sandbox.write("round-trip", data)
        equal((wrote["path"], wrote["size"]), ("/workspace/round-trip", len(data)), "answer")
        equal(await sandbox.read("/workspace/round-trip") == data, True, f"{len(data)} bytes")
        done = await sandbox.run(["cat", "round-trip"])
        equal(done.stdout == data, True, f"{len(data)} bytes for cat")


@behaviour("files.large")
async def large(stage: Stage) -> None:
    """A hundred megabytes go in and out while the guest stays small."""
    sandbox = await stage.shared()
    block = EVERY_BYTE * 1024
    before = await guest_memory(sandbox)
    await sandbox.write_all("large", (block for _ in range(LARGE // len(block))))
    expect(await guest_memory(sandbox) - before < GUEST_GROWTH, "the guest grew while writing")
    digest, size = hashlib.sha256(), 0
    link = await sandbox.guest.connect()
    download = OperationStream().open(link, {"op": "read", "path": "large"})
    equal((await download.result())["size"], LARGE, "size")
    while (frame := await download.next())[0] == wire.DATA:
        digest.update(frame[1])
        size += len(frame[1])
    equal(size, LARGE, "bytes read")
    equal(digest.digest(), hashlib.sha256(block * (LARGE // len(block))).digest(), "digest")
    expect(await guest_memory(sandbox) - before < GUEST_GROWTH, "the guest grew while reading")
    await sandbox.call("remove", path="large")


@behaviour("files.part")
async def part(stage: Stage) -> None:
    """A part of a file can be read by offset and length, also past its end."""
    sandbox = await stage.shared()
    await sandbox.write("part", b"0123456789")
    for offset, length, wanted in (
        (0, 3, b"012"),
        (4, None, b"456789"),
        (8, 100, b"89"),
        (10, None, b""),
        (100, 5, b""),
        (3, 0, b""),
    ):
        data = await sandbox.read("part", offset=offset, length=length)
        equal(data, wanted, f"offset {offset}, length {length}")


@behaviour("files.append")
async def append(stage: Stage) -> None:
    """Appending adds to a file, and makes it where there is none."""
    sandbox = await stage.shared()
    await sandbox.shell("rm -rf appended")
    await sandbox.write("appended", b"one ", append=True)
    await sandbox.write("appended", b"two", append=True)
    equal(await sandbox.read("appended"), b"one two", "content")


@behaviour("files.mode")
async def mode(stage: Stage) -> None:
    """A file gets the mode that was asked for, keeps it when rewritten, and belongs to the user."""
    sandbox = await stage.shared()
    await sandbox.write("plain", b"")
    await sandbox.write("script", b"#!/bin/sh\necho 1\n", mode=0o750)
    await sandbox.write("script", b"#!/bin/sh\necho 2\n")
    done = await sandbox.shell("stat -c '%a %u:%g' plain script; ./script")
    equal(done.text.split("\n")[:3], ["644 1000:1000", "750 1000:1000", "2"], "modes and owners")


@behaviour("files.parents")
async def parents(stage: Stage) -> None:
    """Writing, renaming and mkdir make the directories that are missing."""
    sandbox = await stage.shared()
    await sandbox.shell("rm -rf a b c")
    await sandbox.write("a/b/c/file", b"1")
    await sandbox.call("rename", path="a/b/c/file", to="b/x/y/file")
    await sandbox.call("mkdir", path="c/d/e")
    await sandbox.call("mkdir", path="c/d/e")
    done = await sandbox.shell("cat b/x/y/file; stat -c ' %u %F' c/d/e")
    equal(done.text, "1 1000 directory\n", "what a program sees")


@behaviour("files.atomic")
async def atomic(stage: Stage) -> None:
    """A file that is being replaced shows its old content until the new one is whole."""
    sandbox = await stage.shared()
    await sandbox.write("atomic", b"old content")
    upload = OperationStream().open(
        await sandbox.guest.connect(), {"op": "write", "path": "atomic"}
    )
    await upload.result()
    await upload.feed(wire.DATA, bytes(600_000))
    equal(await sandbox.read("atomic"), b"old content", "content while writing")
    upload.cancel()
    equal(await sandbox.read("atomic"), b"old content", "content after a cancelled write")
    left = [item["path"] for item in await sandbox.list(".") if "atomic" in item["path"]]
    equal(left, ["/workspace/./atomic"], "what a cancelled write leaves")
    await sandbox.write("atomic", b"new")
    equal(await sandbox.read("atomic"), b"new", "content in the end")


@behaviour("files.stat")
async def stat(stage: Stage) -> None:
    """Stat tells type, size, mode, time and a link's target."""
    sandbox = await stage.shared()
    await sandbox.write("statted", b"12345", mode=0o640)
    await sandbox.shell("ln -sfn statted link; rm -f pipe2; mkfifo pipe2; touch -d @1000.5 statted")
    info = await sandbox.call("stat", path="statted")
    seen = (info["type"], info["size"], info["mode"], info["modified_ns"])
    equal(seen, ("file", 5, 0o640, 1000_500_000_000), "a file")
    link = await sandbox.call("stat", path="link")
    equal((link["type"], link["target"]), ("link", "statted"), "a link")
    equal((await sandbox.call("stat", path="link", follow=True))["size"], 5, "through a link")
    equal((await sandbox.call("stat", path="pipe2"))["type"], "fifo", "a FIFO")
    equal((await sandbox.call("stat", path="/workspace"))["type"], "dir", "a directory")


@behaviour("files.list")
async def listing(stage: Stage) -> None:
    """A directory is listed, to a depth, without following links."""
    sandbox = await stage.shared()
    await sandbox.shell(
        "rm -rf tree; mkdir -p tree/sub/deep; cd tree; touch a sub/b sub/deep/c; ln -s / sub/l"
    )
    for depth, wanted in (
        (1, ["a", "sub"]),
        (2, ["a", "sub", "sub/b", "sub/deep", "sub/l"]),
        (9, ["a", "sub", "sub/b", "sub/deep", "sub/deep/c", "sub/l"]),
    ):
        entries = await sandbox.list("/workspace/tree", depth=depth)
        names = sorted(item["path"].removeprefix("/workspace/tree/") for item in entries)
        equal(names, wanted, f"names to depth {depth}")
        kinds = {item["path"].rpartition("/")[2]: item["type"] for item in entries}
        equal(kinds["a"], "file", "type of a")
        equal(kinds["sub"], "dir", "type of sub")


@behaviour("files.list-many")
async def list_many(stage: Stage) -> None:
    """Thousands of entries are listed under flow control, and the list can be given up."""
    sandbox = await stage.shared()
    script = (
        "import os; os.makedirs('many', exist_ok=True)\n"
        f"for n in range({ENTRIES}): open(f'many/{{n:05}}', 'w').close()"
    )
    equal((await sandbox.python(script)).code, 0, "making files")
    entries = await sandbox.list("many", window=64 << 10)
    names = sorted(item["path"].rpartition("/")[2] for item in entries)
    equal(names, [f"{number:05}" for number in range(ENTRIES)], "names")
    link = await sandbox.guest.connect()
    given_up = OperationStream(generous=False).open(
        link, {"op": "list", "path": "many", "window": 64 << 10}
    )
    await given_up.next()
    given_up.cancel()
    await sandbox.call("remove", path="many", recursive=True)


@behaviour("files.list-long-paths")
async def list_long_paths(stage: Stage) -> None:
    """Entries whose paths together exceed what may be under way are listed all the same."""
    sandbox = await stage.shared()
    top = "/".join(["long", *("d" * 240 for _ in range(15))])
    script = (
        f"import os; top = {top!r}; os.makedirs(top)\n"
        "for n in range(300): open(f'{top}/{n:0200}', 'w').close()"
    )
    done = await sandbox.python(script)
    equal(done.code, 0, done.story())
    for window in (wire.WINDOW, 64 << 10):
        entries = await sandbox.list(f"/workspace/{top}", window=window)
        names = sorted(int(item["path"].rpartition("/")[2]) for item in entries)
        equal(names, [*range(300)], f"names through a window of {window} bytes")
    await sandbox.call("remove", path="long", recursive=True)


@behaviour("files.dates")
async def dates(stage: Stage) -> None:
    """Files of every date are listed, the first of Unix time and the far future included."""
    sandbox = await stage.shared()
    script = (
        "import os; os.makedirs('dated')\n"
        "for when in (0, 1, 4_000_000_000, 15_000_000_000):\n"
        "    open(f'dated/{when}', 'w').close(); os.utime(f'dated/{when}', (when, when))"
    )
    equal((await sandbox.python(script)).code, 0, "dating files")
    found = {item["path"]: item["modified_ns"] for item in await sandbox.list("/workspace/dated")}
    equal(len(found), 4, "files listed")
    dates = [found[f"/workspace/dated/{when}"] for when in (0, 1, 4_000_000_000)]
    equal(dates, [0, 10**9, 4 * 10**18], "dates")
    newer = {item["path"] for item in await sandbox.list("/workspace/dated", since_ns=10**9)}
    newer.discard("/workspace/dated/15000000000")  # which kernels may take for the past
    equal(newer, {"/workspace/dated/4000000000"}, "files that are newer than the first second")
    await sandbox.call("remove", path="dated", recursive=True)


@behaviour("files.remove-large")
async def remove_large(stage: Stage) -> None:
    """Removing a large tree delays no other call, can be cancelled, and no tree is too deep."""
    sandbox = await stage.shared()
    script = (
        "import os; os.makedirs('forest/kept'); open('forest/kept/file', 'w').close()\n"
        "os.makedirs('forest/tree/many')\n"
        f"for n in range({ENTRIES}): open(f'forest/tree/many/{{n}}', 'w').close()\n"
        f"for n in range({ENTRIES // 4}): os.mkdir(f'forest/tree/many/d{{n}}')\n"
        "os.symlink('../kept', 'forest/tree/link'); os.chdir('forest/tree')\n"
        "for n in range(400): os.mkdir('deep' * 10); os.chdir('deep' * 10)\n"
        "open('bottom', 'w').close(); os.symlink('/workspace/forest/kept', 'link')"
    )
    done = await sandbox.python(script)
    equal(done.code, 0, done.story())
    link = await sandbox.guest.connect()
    call = {"op": "remove", "path": "forest/tree", "recursive": True}
    OperationStream().open(link, call).cancel()
    equal((await sandbox.call("stat", path="forest/tree"))["type"], "dir", "a removal given up")
    removal = asyncio.create_task(OperationStream().open(link, call).result())
    await sandbox.call("ping")
    expect(not removal.done(), "a large removal held up everything else")
    equal((await removal)["path"], "/workspace/forest/tree", "answer")
    done = await sandbox.shell("ls -A forest forest/kept; rm -r forest")
    equal(done.text.split(), ["forest:", "kept", "forest/kept:", "file"], "what is left")


@behaviour("files.remove-refused")
async def remove_refused(stage: Stage) -> None:
    """A tree that the user may not remove is an error that names what stood in the way."""
    sandbox = await stage.shared()
    await sandbox.shell(
        "mkdir -p sealed/in/side; touch sealed/in/side/file; chmod 500 sealed/in/side"
    )
    try:
        await sandbox.call("remove", path="sealed", recursive=True)
    except PermissionError as error:
        expect("sealed/in/side/file" in str(error), f"it does not say where: {error}")
    else:
        raise BrokenPromise("a closed directory was emptied")
    await sandbox.shell("chmod 700 sealed/in/side; rm -r sealed")


@behaviour("files.rename-remove")
async def rename_remove(stage: Stage) -> None:
    """Renaming replaces, removing removes, and a tree needs to be asked for."""
    sandbox = await stage.shared()
    await sandbox.shell(
        "rm -rf r; mkdir -p r/tree/x; echo keep > r/kept; ln -s ../kept r/tree/x/l; "
        "echo 1 > r/one; echo 2 > r/two"
    )
    await sandbox.call("rename", path="r/one", to="r/two")
    equal(await sandbox.read("r/two"), b"1\n", "the renamed file")
    await sandbox.call("remove", path="r/two")
    try:
        await sandbox.call("remove", path="r/tree")
    except OSError as error:
        equal(error.errno, errno.ENOTEMPTY, "removing a full directory")
    else:
        raise BrokenPromise("a full directory was removed")
    await sandbox.call("remove", path="r/tree", recursive=True)
    equal((await sandbox.shell("ls r")).text, "kept\n", "what is left")


@behaviour("files.links")
async def links(stage: Stage) -> None:
    """Links mean what they mean to programs in the sandbox, absolute ones and chains included."""
    sandbox = await stage.shared()
    await sandbox.write("target", b"before")
    await sandbox.shell(
        "ln -sfn /workspace/target abs; ln -sfn abs chain; mkdir -p real; ln -sfn real linked"
    )
    await sandbox.write("chain", b"after")
    await sandbox.write("linked/inner", b"x")
    done = await sandbox.shell(
        "cat target real/inner; test -L chain && test -L abs && echo ' still links'"
    )
    equal(done.text, "afterx still links\n", "what a program sees")
    equal(await sandbox.read("chain"), b"after", "read through links")
    await sandbox.shell("ln -sfn /etc/hostname outside")
    equal(await sandbox.read("outside"), b"sandbox\n", "a link to the sandbox's own /etc")


@behaviour("files.anywhere", kubernetes="the image says what is in /etc")
async def anywhere(stage: Stage) -> None:
    """Any path of the sandbox can be read, and its writable places written."""
    sandbox = await stage.shared()
    equal((await sandbox.read("/etc/passwd")).splitlines()[1][:5], b"user:", "/etc/passwd")
    for folder in ("/tmp", "/home/user", "/var/tmp", "/dev/shm"):  # noqa: S108 - paths in the sandbox
        await sandbox.write(f"{folder}/note", folder.encode())
        equal((await sandbox.run(["cat", f"{folder}/note"])).text, folder, folder)
        await sandbox.call("remove", path=f"{folder}/note")
    equal(await sandbox.read("../etc/../etc/hostname"), b"sandbox\n", "a path with dots")


@behaviour("files.growing")
async def growing(stage: Stage) -> None:
    """Reading a file that grows without end comes to an end."""
    sandbox = await stage.shared()
    program = await sandbox.start(
        [
            PYTHON,
            "-c",
            "f = open('grows', 'wb', 0)\nwhile f.tell() < 200 << 20: f.write(bytes(65536))",
        ]
    )
    async with asyncio.timeout(30):
        while True:
            try:
                if (await sandbox.call("stat", path="grows"))["size"]:
                    break
            except FileNotFoundError:
                pass
    data = await sandbox.read("grows")
    expect(data.count(0) == len(data), "the bytes are wrong")
    await sandbox.call("signal", id=program.id, signal=9)
    await program.finish()
    await sandbox.call("remove", path="grows")


@behaviour("files.unicode")
async def unicode(stage: Stage) -> None:
    """Names in any script, with spaces, newlines or bytes that are no text, work."""
    sandbox = await stage.shared()
    await sandbox.shell("rm -rf names")
    for name in (
        "grüße.txt",
        "文件",
        "a b\n'c\"$d",
        "-rf",
        "emoji 🦊",
        "文" * 85,
        "bad-\udcff-byte",
        "x" * 255,
    ):
        await sandbox.write(f"names/{name}", name.encode(errors="surrogateescape"))
        equal(await sandbox.read(f"names/{name}"), name.encode(errors="surrogateescape"), name)
        found = [
            item["path"].removeprefix("/workspace/names/") for item in await sandbox.list("names")
        ]
        equal(found, [name], "listed name")
        await sandbox.call("remove", path=f"names/{name}")
