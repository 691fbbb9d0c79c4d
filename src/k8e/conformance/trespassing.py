"""Paths that lead astray while they are used: links, hard links, odd names."""

from __future__ import annotations

import contextlib
import errno

from k8e.conformance.behaviours import behaviour, equal, expect
from k8e.conformance.confinement import ask
from k8e.conformance.refusals import refused
from k8e.conformance.sandbox import PYTHON, Sandbox
from k8e.conformance.stage import Stage

ROUNDS = 200
# A folder that is one moment the user's own and the next a link to what is not.
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
    """A folder that is swapped for a link while it is used leads no operation to what is closed."""
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
