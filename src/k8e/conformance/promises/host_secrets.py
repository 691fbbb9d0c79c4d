"""Traces of the host that a program looks for: sockets, memory, processes, files, namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

from k8e.conformance.behaviour import NotApplicable, behaviour, equal, expect
from k8e.conformance.promises.confinement import ask
from k8e.conformance.stage import Stage

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
# Prints what it reaches of the host: sockets, loopback, shared memory, processes.
_LOOK = """
import ctypes, glob, os, socket, sys
word, folder, port, key = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
found = []
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for address in ('\\0' + word, folder + '/socket'):
        try: socket.socket(socket.AF_UNIX, kind).connect(address); found.append(repr(address))
        except OSError: pass
for address in ('127.0.0.1', '::1', 'localhost'):
    try: socket.create_connection((address, port), 2); found.append(address)
    except OSError: pass
if ctypes.CDLL(None).shmget(key, 4096, 0) >= 0: found.append('System V memory')
for path in ('/dev/shm/' + word, '/dev/mqueue/' + word, folder, '/proc/1/root' + folder):
    if os.path.lexists(path): found.append(path)
for pid in glob.glob('/proc/[0-9]*'):
    for name in ('cmdline', 'environ', 'cgroup', 'mountinfo', 'maps'):
        try: text = open(pid + '/' + name, 'rb').read()
        except OSError: continue
        if word.encode() in text and int(pid[6:]) != os.getpid(): found.append(pid + '/' + name)
        if name == 'mountinfo' and folder.encode() in text: found.append('mount of ' + folder)
print(found)
"""
_DESCRIPTORS = """
import os, stat
found = []
def look(fd, what):
    try: info = os.fstat(fd)
    except OSError: return
    if fd > 2: found.append(what)
for fd in range(1024): look(fd, f'descriptor {fd}')
print(found)
"""
_ROOTS = """
import glob, os
own = os.stat('/')
found = []
for link in glob.glob('/proc/[0-9]*/root') + glob.glob('/proc/[0-9]*/task/*/root'):
    try: there = os.stat(link + '/.')
    except OSError: continue
    if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino): found.append(link)
for path in ('/' + '../' * 64, '/proc/self/root' + '/..' * 64, '/proc/self/cwd' + '/..' * 64):
    there = os.stat(path)
    if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino): found.append(path)
print(found)
"""


@contextlib.contextmanager
def _something_on_the_host(word: str) -> Generator[tuple[str, str, str]]:
    """A folder, sockets, shared memory and a process on the host, all named with ``word``."""
    key = secrets.randbelow(1 << 30) + 1
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"k8e-{word}-")))
        for address in (f"\0{word}", str(folder / "socket")):
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.bind(address)
            made.listen()
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        memory = Path("/dev/shm", word)  # noqa: S108 - a new name
        memory.touch()
        stack.callback(memory.unlink)
        libc = ctypes.CDLL(None)
        segment = libc.shmget(key, 4096, 0o1666)
        stack.callback(libc.shmctl, segment, 0, None)
        process = subprocess.Popen(["sleep", "600"], env={**os.environ, "WORD": word})
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield str(folder), str(server.getsockname()[1]), str(key)


@behaviour("host.out-of-sight")
async def out_of_sight(stage: Stage) -> None:
    """The host's UNIX sockets, loopback, shared memory, processes and files are not there."""
    word = f"w{secrets.token_hex(8)}"
    sandbox = await stage.shared()
    with _something_on_the_host(word) as arguments:
        equal(await ask(sandbox, _LOOK, word, *arguments), [], "what of the host is reached")


@behaviour("host.descriptors")
async def descriptors(stage: Stage) -> None:
    """Of a thousand descriptors a program has its three alone, whatever the gateway has open."""
    with contextlib.ExitStack() as stack:
        for _ in range(
            50
        ):  # inheritable on purpose: the program that starts sandboxes must not pass them on
            fd = os.open("/etc/hostname", os.O_RDONLY)
            stack.callback(os.close, fd)
            os.set_inheritable(fd, True)
        sandbox = await stage.launch()
        equal(await ask(sandbox, _DESCRIPTORS), [], "descriptors that were inherited")
        done = await sandbox.shell("ls -l /proc/1/fd 2>/dev/null | grep -c hostname; true")
        equal(done.text.strip(), "0", "descriptors of the host that the first process has")


@behaviour("host.roots")
async def roots(stage: Stage) -> None:
    """No way up and no /proc entry leads to another root than the sandbox's own."""
    equal(await ask(await stage.shared(), _ROOTS), [], "ways to another root")


@behaviour("host.namespaces")
async def namespaces(stage: Stage) -> None:
    """A sandbox shares no namespace with the host or with another sandbox."""
    script = (
        "import os; print({name: os.readlink('/proc/self/ns/' + name) for name in "
        f"{_NAMESPACES!r} if os.path.lexists('/proc/self/ns/' + name)}})"
    )
    one, two = await ask(await stage.shared(), script), await ask(await stage.launch(), script)
    host = _of_host()
    shared = [name for name, link in one.items() if link == host[name]]
    equal(shared, [], "namespaces that are the host's")
    if stage.runtime.name == "gvisor":  # each has a kernel, and so numbers, of its own
        return
    equal(sorted(one), sorted(_NAMESPACES), "namespaces that can be told")
    equal([name for name in one if one[name] == two[name]], [], "namespaces of two sandboxes")


def _of_host() -> dict[str, str]:
    return {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES}


@behaviour("host.identity")
async def identity(stage: Stage) -> None:
    """Every sandbox has random numbers and a link key of its own, and nothing of the host's."""
    seen: list[tuple[bytes, ...]] = []
    for _ in range(3):
        sandbox = await stage.settle()
        script = "import os, random; print((os.urandom(16), random.random().hex().encode()))"
        done = await sandbox.run(["/usr/bin/python3", "-I", "-c", script])
        key = (await _link_key(stage, sandbox.guest.sandbox_id)).strip()
        seen.append((done.stdout, key))
        expect(len(key) >= 16, "a link key is short")
    for column in zip(*seen, strict=True):
        equal(len(set(column)), len(column), "different values in different sandboxes")


async def _link_key(stage: Stage, sandbox_id: str) -> bytes:
    found = [
        path for folder in stage.folders for path in folder.glob(f"sandboxes/{sandbox_id}/link/key")
    ]
    if not found:
        raise NotApplicable("the link keys of this runtime are not on this host")
    return found[0].read_bytes()
