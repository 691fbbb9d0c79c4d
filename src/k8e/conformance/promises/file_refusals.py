"""Refused operations on files: codes of failures, and paths that lead astray."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Awaitable
from typing import Any

from k8e import errors
from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.promises.confinement import ask
from k8e.conformance.sandbox import PYTHON, OperationStream, Sandbox
from k8e.conformance.stage import Stage
from k8e.guest import wire
from k8e.model import MIB

SEALED = (
    errno.EACCES,
    errno.EBADF,
    errno.EINVAL,
    errno.ENODEV,
    errno.ENOENT,
    errno.ENXIO,
    errno.EPERM,
)
"""How kernels say no to what must not be opened; they differ, and any of these will do."""


async def refused(what: str, work: Awaitable[Any], *codes: int) -> None:
    """Expect ``work`` to fail with one of these error numbers."""
    try:
        await work
    except OSError as error:
        if error.errno in codes and str(error):
            return
        raise BrokenPromise(f"{what}: {errno.errorcode.get(error.errno or 0)} ({error})") from None
    raise BrokenPromise(f"{what}: it succeeded")


@behaviour("refusals.missing")
async def missing(stage: Stage) -> None:
    """What does not exist is ENOENT."""
    sandbox = await stage.shared()
    await sandbox.shell("ln -sfn /nowhere/at/all dangling")
    for path in ("nothing", "/nothing/at/all", "dangling"):
        await refused(f"reading {path}", sandbox.read(path), errno.ENOENT)
    await refused("listing", sandbox.list("nothing"), errno.ENOENT)
    for op in ("stat", "remove"):
        await refused(op, sandbox.call(op, path="nothing"), errno.ENOENT)
    await refused("renaming", sandbox.call("rename", path="nothing", to="x"), errno.ENOENT)


@behaviour("refusals.kind")
async def kind(stage: Stage) -> None:
    """A directory is no file and a file is no directory: EISDIR and ENOTDIR."""
    sandbox = await stage.shared()
    await sandbox.call("mkdir", path="folder")
    await sandbox.write("plain", b"1")
    await refused("reading a directory", sandbox.read("folder"), errno.EISDIR)
    await refused("writing a directory", sandbox.write("folder", b""), errno.EISDIR)
    await refused("appending to one", sandbox.write("folder", b"", append=True), errno.EISDIR)
    await refused("writing a slash", sandbox.write("new/", b""), errno.EISDIR)
    await refused("listing a file", sandbox.list("plain"), errno.ENOTDIR)
    await refused("reading below a file", sandbox.read("plain/x"), errno.ENOTDIR)
    below = sandbox.write("plain/x", b"")
    await refused("writing below a file", below, errno.ENOTDIR, errno.EEXIST)
    await refused("mkdir of a file", sandbox.call("mkdir", path="plain"), errno.EEXIST)


@behaviour("refusals.permission")
async def permission(stage: Stage) -> None:
    """The user's own rights decide: closed files are EACCES, the system is read-only."""
    sandbox = await stage.shared()
    await sandbox.shell(
        "mkdir -p closed; echo 1 > closed/file; chmod 000 closed; echo 1 > mute; chmod 0 mute"
    )
    await refused("reading a closed file", sandbox.read("mute"), errno.EACCES)
    await refused("reading in a closed folder", sandbox.read("closed/file"), errno.EACCES)
    await refused("listing a closed folder", sandbox.list("closed"), errno.EACCES)
    await refused("writing there", sandbox.write("closed/file", b""), errno.EACCES)
    await sandbox.shell("chmod 755 closed; rm -rf closed mute")
    for path in ("/usr/new", "/etc/passwd", "/new", "/root/new", "/run/k8e/new", "/home/new"):
        await refused(path, sandbox.write(path, b"x"), errno.EACCES, errno.EROFS)
    remove = sandbox.call("remove", path="/etc/hostname")
    await refused("removing /etc/hostname", remove, errno.EACCES, errno.EROFS)


@behaviour("refusals.special")
async def special(stage: Stage) -> None:
    """FIFOs, sockets and devices are refused at once instead of blocking or never ending."""
    sandbox = await stage.shared()
    script = "import os, socket; os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('socket')"
    await sandbox.shell("rm -f fifo socket")
    equal((await sandbox.python(script)).code, 0, "making special files")
    for path in (
        "fifo",
        "socket",
        "/dev/zero",
        "/dev/null",
        "/dev/tty",
        "/dev/stdin",
        "/dev/random",
    ):
        codes = SEALED
        await refused(f"reading {path}", sandbox.read(path), *codes)
        await refused(f"writing {path}", sandbox.write(path, b"x"), *codes)
        appending = sandbox.write(path, b"x", append=True)
        await refused(f"appending to {path}", appending, *codes)


@behaviour("refusals.guest-itself")
async def guest_itself(stage: Stage) -> None:
    """The guest's own /proc entries are refused, by every name, for reading and writing."""
    sandbox = await stage.shared()
    await sandbox.shell("ln -sfn /proc/self/environ sneaky; ln -sfn /proc/self sneaky-dir")
    for path in (
        "/proc/self/environ",
        "/proc/1/environ",
        "/proc/thread-self/environ",
        "/proc/self/task/1/environ",
        "/proc/self/mem",
        "/proc/1/mem",
        "/proc/self/maps",
        "/proc/self/comm",
        "/proc/self/oom_score_adj",
        "/proc/self/root/proc/self/environ",
        "/proc/self/cwd/proc/self/maps",
        "sneaky",
        "sneaky-dir/environ",
    ):
        # Not every kernel has every file; what is there must be closed.
        codes = (errno.EACCES, errno.ENOENT, errno.EPERM)
        await refused(f"reading {path}", sandbox.read(path), *codes)
        # To a guest that is not in the programs' namespace, /proc/self is a link to nowhere.
        codes = (*codes, errno.EROFS, errno.EEXIST)
        await refused(f"writing {path}", sandbox.write(path, b"1"), *codes)
        await refused(f"appending to {path}", sandbox.write(path, b"1", append=True), *codes)
    folders = ["/proc/self", "/proc/self/fd", "sneaky-dir"]
    if (await sandbox.shell("test $PPID = 1")).code == 0:  # else it is not the guest's
        folders += ["/proc/1", "/proc/1/task"]
    for path in folders:
        await refused(f"listing {path}", sandbox.list(path), errno.EACCES, errno.ENOENT)


@behaviour("refusals.guest-descriptors")
async def guest_descriptors(stage: Stage) -> None:
    """The guest's open descriptors cannot be used through /proc/self/fd or /dev/fd."""
    sandbox = await stage.shared()
    program = await sandbox.start(["cat"], stdin=True)
    for folder in ("/proc/self/fd", "/dev/fd", "/proc/1/fd"):
        for number in range(24):
            codes = SEALED
            await refused(f"reading {folder}/{number}", sandbox.read(f"{folder}/{number}"), *codes)
            codes = (*codes, errno.EROFS, errno.EEXIST)
            writing = sandbox.write(f"{folder}/{number}", b"injected")
            await refused(f"writing {folder}/{number}", writing, *codes)
    program.end_input()
    equal((await program.finish()).stdout, b"", "what the program was fed")


@behaviour("refusals.path")
async def path(stage: Stage) -> None:
    """Paths that cannot be paths are clear errors: empty, NUL, too long, not text."""
    sandbox = await stage.shared()
    for bad, codes in (
        ("", (errno.EINVAL,)),
        ("a\0b", (errno.EINVAL,)),
        ("x" * 5000, (errno.ENAMETOOLONG,)),
        ("x/" * 2500 + "x", (errno.ENAMETOOLONG, errno.ENOENT)),
        ("y" * 256, (errno.ENAMETOOLONG,)),
    ):
        await refused(f"reading {bad[:9]!r}", sandbox.read(bad), *codes)
        await refused(f"stat of {bad[:9]!r}", sandbox.call("stat", path=bad), *codes)
        await refused(f"writing {bad[:9]!r}", sandbox.write(bad, b""), *codes)
    for wrong in (None, 5, ["x"], {"a": 1}, b"bytes"):
        await refused(f"stat of {wrong!r}", sandbox.call("stat", path=wrong), errno.EINVAL)
    equal((await sandbox.call("ping")), {}, "the guest's answer after all that")
    await sandbox.shell("rm -rf x")


@behaviour("refusals.numbers")
async def numbers(stage: Stage) -> None:
    """Numbers that make no sense are EINVAL, before anything is opened or made."""
    sandbox = await stage.launch()
    await sandbox.write("file", b"content")
    before = await _descriptor_table(sandbox)
    for _ in range(50):
        for bad in ("far", -1):
            for key in ("offset", "length"):
                await refused(f"{key} {bad}", sandbox.read("file", **{key: bad}), errno.EINVAL)
            await refused(f"mode {bad}", sandbox.write("file", b"", mode=bad), errno.EINVAL)
        await refused("window -1", sandbox.read("file", window=-1), errno.EINVAL)
        beyond = sandbox.read("/proc/version", offset=(1 << 63) - 1)
        with contextlib.suppress(OSError):  # kernels differ
            equal(await beyond, b"", "what lies beyond a file")
    for window in (-1, 1, 1000, (64 << 10) - 1):
        await refused(f"window {window}", sandbox.list(".", window=window), errno.EINVAL)
    equal((await sandbox.shell("ls -A; cat file")).stdout, b"file\ncontent", "the workspace")
    equal(await _descriptor_table(sandbox), before, "size of the guest's table of descriptors")


async def _descriptor_table(sandbox: Sandbox) -> str:
    return (await sandbox.run(["grep", "FDSize", "/proc/1/status"])).text


@behaviour("refusals.full-disk")
async def full_disk(stage: Stage) -> None:
    """On a full disk a write is ENOSPC, the old content stays, and nothing half-written is left."""
    sandbox = await stage.launch(disk=8 * MIB)
    await sandbox.write("precious", b"old content")
    await refused("a large file", sandbox.write("large", bytes(16 * MIB)), errno.ENOSPC)
    filled = await sandbox.shell("cat /dev/zero > filler; ls -A")
    equal(filled.text.split(), ["filler", "precious"], "files after a failed write")
    await refused("replacing", sandbox.write("precious", bytes(MIB)), errno.ENOSPC)
    equal(await sandbox.read("precious"), b"old content", "content after a failed write")
    await refused("appending", sandbox.write("filler", bytes(MIB), append=True), errno.ENOSPC)
    await sandbox.call("remove", path="filler")
    await sandbox.write("precious", bytes(MIB))
    equal(len(await sandbox.read("precious")), MIB, "size once there is room again")


@behaviour("refusals.swapped-links")
async def swapped_links(stage: Stage) -> None:
    """A link that is swapped during use never leads to files that are the guest's alone."""
    sandbox = await stage.shared()
    script = (
        "rm -rf swap; mkdir swap; cd swap; echo mine > good; ln -s /run/k8e/link/key secret; "
        "ln -s /proc/self/environ environ; echo ready; "
        "while :; do for t in good secret environ; do ln -sfn $t now; done; done"
    )
    program = await sandbox.start(["/bin/bash", "-c", script])
    await program.until(b"ready")
    seen: set[bytes] = set()
    for _ in range(300):
        await _read_or_refuse(sandbox, "swap/now", seen)
    await sandbox.call("signal", id=program.id, terminate=True)
    await program.finish()
    expect(seen <= {b"mine\n"}, f"read {seen}")


async def _read_or_refuse(sandbox: Sandbox, path: str, seen: set[bytes]) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        seen.add(await sandbox.read(path))


@behaviour("refusals.protocol")
async def protocol(stage: Stage) -> None:
    """Calls that make no sense are errors, and the guest goes on."""
    sandbox = await stage.shared()
    calls: list[dict[str, Any]] = [
        {"op": "no-such-operation"},
        {"op": "exec"},
        {"op": "exec", "argv": []},
        {"op": "exec", "argv": ["true"], "timeout": "soon"},
        {"op": "exec", "argv": [1, 2]},
        {"op": "exec", "argv": ["true"], "env": {"A": 1}},
        {"op": "exec", "code": b"1", "language": "cobol"},
        {"op": "exec", "argv": ["true"], "tty": "large"},
        {"op": "exec", "argv": ["true"], "tty": {"rows": 24}},
        {"op": "read", "path": "x", "offset": "far"},
        {"op": "read", "path": "/etc/passwd", "offset": -5},
    ]
    for call in calls:
        stream = OperationStream().open(await sandbox.guest.connect(), call)
        try:
            kind, _ = await stream.next()
        except (errors.K8eError, OSError) as error:
            expect(str(error), f"{call} failed without a reason")
            missing = isinstance(error, errors.ExecNotFound)  # as an unknown operation is
            expect(not missing or call["op"] != "exec", f"{call}: {error!r}")
            continue
        raise BrokenPromise(f"{call} was answered by frame {kind}, not an error")
    await sandbox.call("ping")
    unknown = OperationStream().open(
        await sandbox.guest.connect(), {"op": "read", "path": "/etc/passwd"}
    )
    unknown.send(wire.END)


ROUNDS = 200
# A folder that is the user's own one moment, and a link to another's the next.
_SWAPPER = """
import ctypes, os
os.chdir('/workspace')
os.makedirs('swap/real', exist_ok=True)
for number, target in enumerate(('/run/k8e/link', '/etc', '/proc/self', '/run/k8e/guest')):
    os.symlink(target, f'swap/away{number}')
open('swap/real/file', 'w').write('mine')
os.rename('swap/real', 'swap/now')
print('ready', flush=True)
rename = ctypes.CDLL(None).renameat2
turn = 0
while True:
    turn = (turn + 1) % 4
    for _ in range(2):  # there and back
        rename(-100, b'swap/now', -100, b'swap/away%d' % turn, 2)
"""
_STATE = """
import hashlib, os
found = {}
for top in ('/etc', '/run/k8e/link', '/run/k8e/guest'):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            found[path] = (info.st_mode, info.st_uid, info.st_size, info.st_mtime_ns)
print(hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest().encode())
"""


@behaviour("trespass.swapped-folders")
async def swapped_folders(stage: Stage) -> None:
    """A folder that is swapped for a link during use leads no operation to a closed folder."""
    sandbox = await stage.launch()
    before = await ask(sandbox, _STATE)
    program = await sandbox.start([PYTHON, "-I", "-c", _SWAPPER])
    await program.until(b"ready")
    seen: set[bytes] = set()
    for number in range(ROUNDS):
        for name in ("file", "key", "hostname", "environ"):
            with contextlib.suppress(OSError):
                seen.add(await sandbox.read(f"swap/now/{name}"))
        with contextlib.suppress(OSError):
            await sandbox.write(f"swap/now/new{number % 3}", b"mine")
        for op in ("remove", "stat", "mkdir"):
            with contextlib.suppress(OSError):
                await sandbox.call(op, path=f"swap/now/{'hostname' if number % 2 else 'key'}")
        with contextlib.suppress(OSError):
            await sandbox.call("chmod", path="swap/now/hostname", mode=0o777)
        with contextlib.suppress(OSError):
            await sandbox.call("rename", path="swap/now/file", to="swap/now/other")
    await sandbox.call("signal", id=program.id, terminate=True)
    await program.finish()
    allowed = {b"mine", await sandbox.read("/etc/hostname")}
    expect(seen <= allowed, f"read {sorted(seen - allowed)}")
    equal(await ask(sandbox, _STATE), before, "the system's files")
    equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "the next program")


@behaviour("trespass.hard-links")
async def hard_links(stage: Stage) -> None:
    """No hard link can be made to a file of the system, of the guest or of another's."""
    script = (
        "import os; made = []\n"
        "for source in ('/etc/passwd', '/usr/bin/env', '/run/k8e/link/key', '/proc/1/environ',\n"
        "               '/run/k8e/link/sock', '/proc/self/exe', '/dev/null'):\n"
        "    for place in ('/workspace', '/tmp', '/var/tmp', '/home/user', '/dev/shm'):\n"
        "        for follow in (True, False):\n"
        "            try: os.link(source, place + '/h', follow_symlinks=follow)\n"
        "            except OSError: continue\n"
        "            made.append((source, place)); os.unlink(place + '/h')\n"
        "print(made)"
    )
    equal(await ask(await stage.shared(), script), [], "hard links")


@behaviour("trespass.odd-names")
async def odd_names(stage: Stage) -> None:
    """Dots, slashes and look-alikes name what the kernel says, and nothing more."""
    sandbox = await stage.shared()
    await sandbox.shell("rm -rf odd; mkdir odd; echo in > odd/file")
    for path in ("odd/../odd/file", "odd//file", "./odd/./file", "/home/../workspace/odd/file"):
        equal(await sandbox.read(path), b"in\n", path)
    for path in ("odd/../../etc/shadow", "../../../../../../root/x", "odd/\u2025/file"):
        codes = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)
        await refused(f"reading {path!r}", sandbox.read(path), *codes)
    await refused("a file as a folder", sandbox.read("odd/file/"), errno.ENOTDIR, errno.EISDIR)
    await _kept_apart(sandbox)


async def _kept_apart(sandbox: Sandbox) -> None:
    """Names that look the same are files of their own."""
    names = "odd/\u00e9", "odd/e\u0301", "odd/\uff46ile", "odd/fi\u200ble", "odd/file\u00a0"
    for number, name in enumerate(names):
        await sandbox.write(name, str(number).encode())
    for number, name in enumerate(names):
        equal(await sandbox.read(name), str(number).encode(), f"the content of {name!r}")
    equal(await sandbox.read("odd/file"), b"in\n", "the file that they look like")
