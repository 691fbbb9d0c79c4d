"""The parts of the host's kernel in reach of a sandbox: files, protocols, uncounted memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from k8e import errors
from k8e.client.results import Stdout
from k8e.conformance.behaviour import NotApplicable, behaviour, equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room
from k8e.conformance.promises.confinement import ask
from k8e.conformance.sandbox import PATIENCE, PYTHON
from k8e.conformance.stage import Stage
from k8e.runtimes.locks import MOST, count_on_host

# Readable files beside the usual ones, and files that can be opened for writing.
_FILES = """
import os, stat
usual = set('cpuinfo filesystems loadavg meminfo mounts net self stat sys sysvipc thread-self '
            'uptime version'.split())
def null(path):
    info = os.stat(path)
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == os.makedev(1, 3)
told, writable = [], []
for name in sorted(os.listdir('/proc')):
    path = '/proc/' + name
    if name.isdigit() or name in usual: continue
    try: tells = os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1)
    except OSError: continue
    if tells: told.append(name)
for folder, folders, names in os.walk('/proc'):
    folders[:] = [name for name in folders if folder != '/proc' or not name.isdigit()]
    folders[:] = [name for name in folders if name not in ('self', 'thread-self')]
    for name in names:
        path = folder + '/' + name
        for flags in (os.O_WRONLY, os.O_RDWR):
            try: os.close(os.open(path, flags | os.O_NONBLOCK))
            except OSError: continue
            if not null(path): writable.append(path)
print((told, sorted(set(writable))))
"""
_IDENTITY = """
found = {}
for path in ('/proc/sys/kernel/random/boot_id', '/proc/cmdline', '/proc/partitions',
             '/proc/devices', '/proc/modules', '/proc/sys/fs/file-nr',
             '/sys/devices/system/cpu/vulnerabilities/spectre_v2'):
    try: found[path] = open(path).read().strip()
    except OSError: pass
print(found)
"""
# What ordinary programs look for; each must be there and make sense.
_USUAL = """
import os, resource
def read(path): return open(path).read()
assert 'MemTotal:' in read('/proc/meminfo') and 'MemAvailable:' in read('/proc/meminfo')
assert read('/proc/cpuinfo').count('processor') >= 1 and read('/proc/stat').startswith('cpu ')
assert 'btime' in read('/proc/stat') and len(read('/proc/loadavg').split()) == 5
assert float(read('/proc/uptime').split()[0]) > 0 and read('/proc/version').startswith('Linux')
assert 'tmpfs' in read('/proc/filesystems') and '/workspace' in read('/proc/self/mounts')
assert int(read('/proc/sys/kernel/pid_max')) > 0 and read('/proc/sys/kernel/osrelease').strip()
assert int(read('/proc/sys/vm/max_map_count')) > 0 and read('/proc/sys/vm/overcommit_memory')
assert int(read('/proc/self/status').split('Threads:')[1].split()[0]) == 1
assert os.cpu_count() >= 1 and os.path.exists('/proc/self/exe') and os.getloadavg()
import sqlite3
with sqlite3.connect("/workspace/locks.db") as table: table.execute("drop table if exists t")
assert os.listdir('/proc/self/fd') and read('/proc/self/limits') and read('/proc/net/dev')
print(True)
"""
# The kernel takes 32 bits of each number; higher bits must not lead around a filter.
_PROTOCOLS = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
SOCKET, PAIR = (41, 53) if platform.machine() == 'x86_64' else (198, 199)
def made(number, *words):
    pair = (ctypes.c_int * 2)()
    words = [ctypes.c_long(word) for word in words]
    fd = libc.syscall(number, *words, *([pair] if number == PAIR else []))
    if fd >= 0: [os.close(item) for item in (pair if number == PAIR else [fd])]
    return fd >= 0
found = set()
for high in (0, 1 << 32, -1 << 32):
    for family in (2, 10):
        for kind in (1, 2, 3, 4, 5, 6, 10):
            for protocol in (1, 2, 4, 6, 17, 33, 41, 47, 50, 58, 103, 108, 115, 132, 136, 137, 143,
                             255, 256, 262):
                usual = (kind, protocol) in ((1, 6), (2, 17))
                if not usual and made(SOCKET, high | family, kind, high | protocol):
                    found.add((family, kind, protocol))
    for family in (2, 10, 16, 17, 38, 40, 43):
        for kind in (1, 2, 3, 5):
            if made(PAIR, high | family, kind, 0): found.add(('pair', family, kind))
assert made(SOCKET, 2, 1 | 0o4000 | 0o2000000, 0) and made(SOCKET, 10, 2, 17)
assert made(PAIR, 1, 5, 0)
print(sorted(found, key=str))
"""
# As a program of 32 bits would call; each in a process of its own, which may be ended for it.
_OLD_CALLS = """
import ctypes, mmap, os, struct
def run(code):
    pid = os.fork()
    if not pid:
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        number = ctypes.CFUNCTYPE(ctypes.c_long)(address)() & 0xffffffff
        os._exit(0 if number < 1 << 31 else 1)
    return os.waitpid(pid, 0)[1]
def old(number, *words):
    load = zip((b'\\xb8', b'\\xbb', b'\\xb9', b'\\xba'), (number, *words))
    words = b''.join(op + struct.pack('I', word) for op, word in load)
    return b'\\x53' + words + b'\\xcd\\x80\\x5b\\xc3'
def x32(number, *words):
    load = zip((b'\\xb8', b'\\xbf', b'\\xbe', b'\\xba'), (0x40000000 | number, *words))
    return b''.join(op + struct.pack('I', word) for op, word in load) + b'\\x0f\\x05\\xc3'
calls = {'socket': old(359, 2, 1, 262), 'socketcall': old(102, 1, 0, 0), 'getpid': old(20, 0, 0, 0),
         'unshare': old(310, 1 << 28), 'x32 socket': x32(41, 2, 1, 262), 'x32 getpid': x32(39)}
print([name for name, code in calls.items() if run(code) == 0])
"""
# Takes filters of sockets and of calls, and keeps them; how many there were of each kind.
_FILTERS = """
import ctypes, os, platform, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
SECCOMP = 317 if platform.machine() == 'x86_64' else 277
pass_all = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
program = struct.pack('HxxxxxxP', 1, ctypes.addressof(pass_all))
kept, counts = [], []
def attach(level, option):
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(('127.0.0.1', 0))
    size = ctypes.c_int(len(program))
    if libc.setsockopt(made.fileno(), ctypes.c_long(level), ctypes.c_long(option), program, size):
        raise OSError
    kept.append(made)
def filter_calls(way):
    libc.prctl(38, 1, 0, 0, 0)
    if way(): raise OSError
most = int(sys.argv[1])
few = most // 10  # each one more makes every call slower
for many, take in ((most, lambda: attach(1, 26)), (most, lambda: attach(1, 51)),
                   (most, lambda: attach(1 << 32 | 1, 26)),
                   (most, lambda: attach(1, 1 << 32 | 51)),
                   (few, lambda: filter_calls(lambda: libc.syscall(SECCOMP, 1, 0, program))),
                   (few, lambda: filter_calls(lambda: libc.prctl(22, 2, program, 0, 0)))):
    count = 0
    try:
        while count < many: take(); count += 1
    except OSError: pass
    counts.append(count)
print(counts, flush=True)
time.sleep(600)
"""
# Joins groups and takes flow labels, and keeps them: the kernel counts neither against anybody.
_GROUPS = """
import socket, struct, sys
kept, counts = [], []
def join():
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    group = struct.pack('>I', 0xef000001 + len(kept))
    made.setsockopt(0, 35, group + socket.inet_aton('127.0.0.1')); kept.append(made)
def join6():
    made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    made.setsockopt(41, 20, struct.pack('>HQHI', 0xff02, 0, 0, len(kept)) + struct.pack('=I', 1))
    kept.append(made)
def label():
    made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    asked = bytes(15) + b'\\1' + bytes(4) + struct.pack('=BBHHHI', 0, 255, 1, 6, 6, 0)
    made.setsockopt(41, 32, asked); kept.append(made)
def sign():
    made = socket.socket()
    peer = struct.pack('=H', 2) + struct.pack('>HI', 0, 0x0a000001) + bytes(120)
    made.setsockopt(6, 14, peer + struct.pack('=BBHIi80s', 0, 0, 8, 0, 0, b'k' * 8))
    kept.append(made)
for take in (join, join6, label, sign):
    count = 0
    try:
        while count < 20: take(); count += 1
    except OSError: pass
    counts.append(count)
print(counts)
"""
# Locks single bytes of many files; those that belong to an open file, where it gets any, as well.
_LOCKS = """
import fcntl, os, struct, time
kept = []
def take(how, files):
    for number in range(files):
        kept.append(os.open(f'/tmp/lock-{how}-{number}', os.O_RDWR | os.O_CREAT))
        for at in range(1000):
            fcntl.fcntl(kept[-1], how, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 2 * at, 1, 0))
try: take(37, 20)
except OSError: pass
take(fcntl.F_SETLK, 30)
print('taken', flush=True)
time.sleep(600)
"""
_FILTERS_OF_EACH_KIND = 200


@behaviour("confinement.kernel-facts")
async def kernel_facts(stage: Stage) -> None:
    """Of the kernel's files a program sees what ordinary programs read, and nothing of the host."""
    sandbox = await stage.shared()
    told, writable = await ask(sandbox, _FILES)
    own = set[str]()
    if stage.runtime.name == "gvisor":  # files of its own kernel, which tell of that
        own = set("bus cgroups cmdline devices fs gvisor irq modules sentry-meminfo".split())
    equal(sorted(set(told) - own), [], "other files in /proc that tell something")
    equal(writable, [], "files of the kernel that can be opened to write")
    shown = await ask(sandbox, _IDENTITY)
    same = [path for path, text in shown.items() if text and text == _of_host(path)]
    equal(same, [], "files that say what the host's say")


def _of_host(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text("utf-8", "replace").strip()
    return ""


@behaviour("confinement.usual-files")
async def usual_files(stage: Stage) -> None:
    """What ordinary programs read in /proc is there: memory, CPUs, load, mounts, the process."""
    sandbox = await stage.shared()
    expect(await ask(sandbox, _USUAL), "the usual files")
    for command in (["ps", "-ef"], ["free"], ["uptime"], ["df", "/workspace"], ["nproc"]):
        done = await sandbox.run(command)
        equal((done.code, done.stderr), (0, b""), f"{command[0]}: {done.story()}")


@behaviour("attacks.protocols")
async def protocols(stage: Stage) -> None:
    """Of IP there are TCP and UDP: no MPTCP, UDP-Lite, SCTP, DCCP, L2TP, and nothing raw."""
    made = await ask(await stage.shared(), _PROTOCOLS)
    # gVisor's own stack can ping, which no policy lets out.
    contained = {(2, 2, 1), (10, 2, 58)} if stage.runtime.name == "gvisor" else set[object]()
    equal([item for item in made if item not in contained], [], "families, types and protocols")


@behaviour("attacks.old-calls")
async def old_calls(stage: Stage) -> None:
    """System calls in the manner of 32 bits, or of x32, lead around nothing: there are none."""
    sandbox = await stage.shared()
    machine = (await sandbox.run(["uname", "-m"])).text.strip()
    if machine != "x86_64":
        raise NotApplicable(f"{machine} has no such calls")
    equal(await ask(sandbox, _OLD_CALLS), [], "calls that were made")


@behaviour("hoard.filters")
async def filters(stage: Stage) -> None:
    """Filters of sockets and calls take none of the memory that the machine has for all of them."""
    sandbox = await stage.launch()
    before = await asyncio.to_thread(_filters_of_host)
    count = str(_FILTERS_OF_EACH_KIND)
    program = await sandbox.start([PYTHON, "-I", "-c", _FILTERS, count])
    await program.until(b"\n")
    grown = await asyncio.to_thread(_filters_of_host) - before
    # Sandboxes that start meanwhile have one each.
    expect(grown < _FILTERS_OF_EACH_KIND // 2, f"the host has {grown} more filters than before")
    if stage.runtime.name != "gvisor":  # whose own kernel runs them
        equal(program.outcome.text.strip(), str([0] * 6), "filters that were made")


def _filters_of_host() -> int:
    """The number of pieces of the kernel's memory that belong to filters; each has one or more."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/vmallocinfo").read_text("utf-8", "replace").splitlines()
        return sum("bpf_prog" in line for line in lines)
    return 0


@behaviour("hoard.groups", gvisor="its own network stack has groups, in memory that is counted")
async def groups(stage: Stage) -> None:
    """No groups, flow labels or signatures of TCP: the kernel counts them against no sandbox."""
    equal(await ask(await stage.shared(), _GROUPS), [0] * 4, "groups, labels and signatures")


@in_a_room("hoard.locks")
def locks(room: Room) -> None:
    """A session that locks thousands of parts of files is ended, or pays with its own memory."""
    client = room.scene.client
    session_id = client.create_session(room.runtime, ())
    try:
        run = client.start(session_id, [PYTHON, "-I", "-c", _LOCKS])
        with contextlib.suppress(errors.K8eError):  # it may be ended before it has said so
            for event in run.output():
                if isinstance(event, Stdout) and b"taken" in event.data:
                    break
        deadline = time.monotonic() + PATIENCE
        while (found := count_on_host(2 * MOST)) > MOST:
            expect(time.monotonic() < deadline, f"the host has {found} locks, and keeps them")
            time.sleep(0.1)
    finally:
        with contextlib.suppress(errors.SessionNotFound):
            client.destroy_session(session_id)
