"""The first attempts of a hostile program, all of which must fail."""

from __future__ import annotations

import ast
import asyncio
import secrets
import socket
from pathlib import Path

from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.promises.confinement import ask
from k8e.conformance.sandbox import PYTHON
from k8e.conformance.stage import Stage

# Each prints the names of the attempts that succeeded.
_CALLS = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == 'x86_64'
numbers = {
    'mount': 165 if x86 else 40, 'pivot_root': 155 if x86 else 41, 'chroot': 161 if x86 else 51,
    'bpf': 321 if x86 else 280, 'keyctl': 250 if x86 else 219, 'add_key': 248 if x86 else 217,
    'perf_event_open': 298 if x86 else 241, 'userfaultfd': 323 if x86 else 282,
    'io_uring_setup': 425, 'init_module': 175 if x86 else 105, 'kexec_load': 246 if x86 else 104,
    'open_by_handle_at': 304 if x86 else 265, 'quotactl': 179 if x86 else 60,
    'swapon': 167 if x86 else 224, 'reboot': 169 if x86 else 142, 'acct': 163 if x86 else 89,
    'settimeofday': 164 if x86 else 170, 'sethostname': 170 if x86 else 161, 'fsopen': 430,
    'open_tree': 428, 'move_mount': 429, 'setns': 308 if x86 else 268,
    'syslog': 103 if x86 else 116,
}
buffer = ctypes.create_string_buffer(256)
here = os.open('/workspace', os.O_RDONLY)
arguments = {
    'mount': (b'none', b'/tmp', b'tmpfs', 0, None), 'chroot': (b'/tmp',), 'keyctl': (0, -3, 1),
    'add_key': (b'user', b'k', b'v', 1, -3), 'bpf': (0, buffer, 72), 'userfaultfd': (0,),
    'perf_event_open': (buffer, 0, -1, -1, 0), 'io_uring_setup': (8, buffer), 'setns': (here, 0),
    'sethostname': (b'pwned', 5), 'fsopen': (b'tmpfs', 0), 'open_tree': (-100, b'/tmp', 1),
    'swapon': (b'/tmp/x', 0), 'pivot_root': (b'/tmp', b'/tmp'), 'init_module': (buffer, 0, b''),
    'open_by_handle_at': (here, buffer, 0), 'reboot': (0xfee1dead, 0x28121969, 0, None),
    'settimeofday': (buffer, None), 'syslog': (3, buffer, 256), 'acct': (b'/tmp/acct',),
}
print([name for name, number in numbers.items()
       if libc.syscall(number, *arguments.get(name, (0, 0, 0, 0, 0, 0))) >= 0])
"""
_SOCKETS = """
import socket
families = {'vsock': 40, 'packet': 17, 'alg': 38, 'bluetooth': 31, 'can': 29, 'key': 15, 'xdp': 44,
            'tipc': 30, 'rds': 21}
found = []
for name, family in families.items():
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try: socket.socket(family, kind, 0).close(); found.append(name)
        except OSError: pass
for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
    for protocol in (2, 4, 5, 6, 7, 9, 12, 15, 16, 20):  # all but ROUTE
        try: socket.socket(socket.AF_NETLINK, kind, protocol).close()
        except OSError: continue
        found.append(f'netlink {protocol}')
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(); found.append('raw')
except OSError: pass
print(found)
"""
_GUEST = """
import ctypes, glob, os, signal
found = []
for number in (0, signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTERM):
    try: os.kill(1, number); found.append(f'signal {number}')
    except PermissionError: pass
libc = ctypes.CDLL(None, use_errno=True)
for request in (16, 0x4206):
    if libc.ptrace(request, 1, 0, 0) >= 0: found.append('ptrace')
for name in 'environ mem maps smaps pagemap auxv stack syscall io clear_refs'.split():
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try: found.append(name) if os.read(os.open('/proc/1/' + name, flags), 8) else None
        except OSError: pass
for name in ('root', 'cwd', 'exe', 'fd/0'):
    try: found.append(os.readlink('/proc/1/' + name))
    except OSError: pass
try: found.append(os.listdir('/proc/1/fd'))
except OSError: pass
class Part(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
mine, theirs = Part(ctypes.addressof(buffer), 8), Part(0x400000, 8)
if libc.process_vm_readv(1, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) >= 0:
    found.append('memory')
print(found)
"""
_LINK = """
import glob, os, socket
found = []
for path in ('/run/k8e/link/key', '/run/k8e/link/sock'):
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        try: os.close(os.open(path, flags)); found.append(path)
        except OSError: pass
for path in glob.glob('/run/k8e/link/*'):
    try: socket.socket(socket.AF_UNIX).connect(path); found.append('connected to ' + path)
    except OSError: pass
    for change in (os.unlink, lambda p: os.rename(p, p + 'x'), lambda p: os.chmod(p, 0o777)):
        try: change(path); found.append('changed ' + path)
        except OSError: pass
for place in ('/run/k8e/link', '/run/k8e/guest', '/run/k8e/slot', '/run/k8e'):
    try: socket.socket(socket.AF_UNIX).bind(place + '/mine'); found.append('bound in ' + place)
    except OSError: pass
print(found)
"""
# Makes its parent, the guest, its tracer, and then stops: at once, at an exec, and as an orphan.
_TRACED = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
if sys.argv[1] == 'orphan':
    first = os.getpid()
    if os.fork(): os._exit(7)
    while os.getppid() == first: pass
if libc.ptrace(0, 0, 0, 0): sys.exit(137)  # refused, which is as good
if sys.argv[1] == 'exec': os.execv('/bin/true', ['true'])
os.kill(os.getpid(), signal.SIGSTOP)
print('went on')
"""
# What the guest's own ids would allow, for the moment in which it lends them to a program.
_MEANWHILE = """
import ctypes, os, resource, time
libc = ctypes.CDLL(None, use_errno=True)
class Part(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(1024)
mine, theirs = Part(ctypes.addressof(buffer), 8), Part(0x400000, 8)
mask = (ctypes.c_ulong * 16)(1)
limit = (ctypes.c_ulong * 2)(16, 16)
attempts = {
    'ptrace': lambda: libc.ptrace(16, 1, 0, 0),
    'memory': lambda: libc.process_vm_readv(1, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0),
    'limit': lambda: libc.prlimit(1, resource.RLIMIT_NOFILE, limit, None),
    'environ': lambda: os.open('/proc/1/environ', os.O_RDONLY),
    'mem': lambda: os.open('/proc/1/mem', os.O_RDWR),
    'fd': lambda: len(os.listdir('/proc/1/fd')),
    'cwd': lambda: len(os.readlink('/proc/1/cwd')),
    'oom': lambda: os.open('/proc/1/oom_score_adj', os.O_WRONLY),
}
print('go', flush=True)
found, until = set(), time.monotonic() + 60
while time.monotonic() < until and not os.path.exists('/tmp/enough'):
    for name, attempt in attempts.items():
        try:
            if attempt() >= 0: found.add(name)
        except OSError: pass
print(sorted(found))
"""
# As root of a user namespace of one's own, where the kernel (or gVisor's) grants one.
_NAMESPACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000 | 0x00020000):
    print('[]'); sys.exit()
for name, text in (('setgroups', 'deny'), ('uid_map', '0 1000 1'), ('gid_map', '0 1000 1')):
    with open('/proc/self/' + name, 'w') as file: file.write(text)
"""
# Makes every kind of namespace, uses them, tries what its rights there must not allow, and waits.
_SPACES = """
import ctypes, os, sys
libc, word = ctypes.CDLL(None, use_errno=True), sys.argv[1].encode()
flags = {'user': 0x10000000, 'mount': 0x20000, 'pid': 0x20000000, 'net': 0x40000000,
         'uts': 0x4000000, 'ipc': 0x8000000, 'cgroup': 0x2000000}
made = [name for name, flag in flags.items() if libc.unshare(flag) == 0]
if 'user' in made:
    for name, text in (('setgroups', 'deny'), ('uid_map', '0 1000 1'), ('gid_map', '0 1000 1')):
        with open('/proc/self/' + name, 'w') as file: file.write(text)
libc.sethostname(word, len(word))
libc.mount(b'none', b'/', None, 0x4000 | 0x40000, None)
for place in (b'/workspace', b'/tmp', b'/etc'): libc.mount(word, place, b'tmpfs', 0, None)
attempts = {
    'signal': lambda: os.kill(1, 0), 'guest': lambda: os.listdir('/proc/1/fd'),
    'root': lambda: os.listdir('/proc/1/root'), 'clock': lambda: libc.settimeofday(bytes(16), None)
        and os.strerror(ctypes.get_errno()) and (_ for _ in ()).throw(OSError()),
    'passwd': lambda: os.close(os.open('/usr/bin/env', os.O_WRONLY)),
    'owner': lambda: os.chown('/var/tmp', 0, 0), 'mode': lambda: os.chmod('/usr', 0o777),
    'pattern': lambda: os.close(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)),
    'device': lambda: os.close(os.open('/proc/kcore', os.O_RDONLY)),
    'back': lambda: [libc.setns(os.open(f'/proc/1/ns/{kind}', os.O_RDONLY), 0) and
                     (_ for _ in ()).throw(OSError()) for kind in ('mnt', 'net', 'uts')],
}
gained = []
for name, attempt in attempts.items():
    try: attempt(); gained.append(name)
    except OSError: pass
print((made, gained), flush=True)
sys.stdin.read()
"""
_SURROUNDINGS = """
import os, socket
print((socket.gethostname(), sorted(open('/proc/self/mounts')), sorted(os.listdir('/workspace')),
       sorted(os.listdir('/etc')), socket.if_nameindex(), os.getuid(), os.stat('/var/tmp').st_uid))
"""


@behaviour("attacks.system-calls")
async def system_calls(stage: Stage) -> None:
    """Calls that change the machine or reach deep into a kernel are refused."""
    made = await ask(await stage.shared(), _CALLS)
    # gVisor has a keyring and a log of its own, which hold nothing of the host's.
    contained = {"keyctl", "syslog"} if stage.runtime.name == "gvisor" else set[str]()
    equal(sorted(set(made) - contained), [], "calls that succeeded")


@behaviour("attacks.namespaces")
async def namespaces(stage: Stage) -> None:
    """No namespaces on the host's kernel; in gVisor's they have no effect beyond the program."""
    sandbox, word = await stage.shared(), f"n{secrets.token_hex(8)}"
    await sandbox.write("seen-by-all", b"1")
    before = await ask(sandbox, _SURROUNDINGS)
    holding = await sandbox.start([PYTHON, "-I", "-c", _SPACES, word], stdin=True)
    await holding.until(b"\n")
    made, gained = ast.literal_eval(holding.outcome.text)
    if stage.runtime.name != "gvisor":
        equal(made, [], "namespaces that were made")
    # While they are there: what others see, and what the host does.
    equal(await ask(sandbox, _SURROUNDINGS), before, "what another program sees")
    equal(await sandbox.read("seen-by-all"), b"1", "a file that was covered elsewhere")
    equal(gained, [], "rights over what is outside of the namespaces")
    expect(not await asyncio.to_thread(_is_on_the_host, word), "the host has what was made")
    holding.end_input()
    await holding.finish()


def _is_on_the_host(word: str) -> bool:
    mounts = Path("/proc/self/mounts").read_text("utf-8", "surrogateescape")
    return word in mounts or word == socket.gethostname()


@behaviour("attacks.own-namespace")
async def own_namespace(stage: Stage) -> None:
    """Root in a user namespace of its own reaches neither guest, link nor the system's files."""
    sandbox = await stage.shared()
    for name, script in (("guest", _GUEST), ("link", _LINK)):
        equal(await ask(sandbox, _NAMESPACE + script), [], f"what became of the {name}")
    script = (
        "found = []\n"
        "for path in ('/etc/passwd', '/usr/bin/env', '/etc/hostname'):\n"
        "    try: open(path, 'ab').close(); found.append(path)\n"
        "    except OSError: pass\n"
        "if libc.mount(b'none', b'/', None, 0x20 | 0x1000, None) == 0:\n"
        "    try: open('/new', 'w').close(); found.append('a writable root')\n"
        "    except OSError: pass\n"
        "print(found)"
    )
    equal(await ask(sandbox, _NAMESPACE + script), [], "system files that could be written")
    if stage.runtime.name == "gvisor":  # elsewhere this is the guest
        rights = await sandbox.run(["grep", "-cE", "^Cap(Prm|Eff).*[1-9a-f]", "/proc/1/status"])
        equal(rights.text, "0\n", "sets of rights that the first process has")
    done = await sandbox.run(["cat", "/proc/1/comm", "/etc/hostname"])
    expect(done.text.endswith("sandbox\n"), f"the system afterwards: {done.story()}")


@behaviour("attacks.sockets")
async def sockets(stage: Stage) -> None:
    """Only UNIX, IP and route netlink sockets exist: no vsock, no raw, no packet, no others."""
    made = await ask(await stage.shared(), _SOCKETS)
    contained = {"netlink 15"} if stage.runtime.name == "gvisor" else set[str]()  # silent there
    equal(sorted(set(made) - contained), [], "sockets that were made")


@behaviour("attacks.guest")
async def guest(stage: Stage) -> None:
    """A program can neither signal, trace, read nor write the guest."""
    equal(await ask(await stage.shared(), _GUEST), [], "what became of the guest")


@behaviour("attacks.guest-while-spawning")
async def guest_while_spawning(stage: Stage) -> None:
    """Signals thrown at the guest while it starts programs neither end nor stop it."""
    sandbox = await stage.shared()
    script = (
        "import os, signal; print('go', flush=True)\n"
        "while True:\n"
        "    for number in (9, 19, 15, 2, 1, 6, 11, 17, 20, 23):\n"
        "        try: os.kill(1, number)\n"
        "        except PermissionError: pass"
    )
    attackers = [await sandbox.start(["/usr/bin/python3", "-c", script]) for _ in range(2)]
    for attacker in attackers:
        await attacker.until(b"go")
    link = sandbox.guest.link
    for number in range(150):
        done = await sandbox.run(["/bin/echo", str(number)])
        equal(done.stdout, b"%d\n" % number, "a program under attack")
    for attacker in attackers:
        await sandbox.call("signal", id=attacker.id, signal=9)
        await attacker.finish()
    expect(sandbox.guest.link is link, "the guest lost its link")


@behaviour("attacks.guest-while-lending")
async def guest_while_lending(stage: Stage) -> None:
    """The guest can be neither traced, read nor limited while it starts programs as the user."""
    sandbox = await stage.launch()
    attackers = [await sandbox.start(["/usr/bin/python3", "-c", _MEANWHILE]) for _ in range(2)]
    for attacker in attackers:
        await attacker.until(b"go\n")
    for number in range(100):
        done = await sandbox.run(["/bin/echo", str(number)])
        equal(done.stdout, b"%d\n" % number, "a program under attack")
    await sandbox.shell("touch /tmp/enough")
    for attacker in attackers:
        done = await attacker.finish()
        equal(done.stdout, b"go\n[]\n", f"what an attacker reached: {done.story()}")


@behaviour("attacks.guest-as-tracer")
async def guest_as_tracer(stage: Stage) -> None:
    """A program that makes the guest its tracer and stops is ended, and the guest goes on."""
    sandbox = await stage.shared()
    link = await sandbox.guest.connect()
    for way, code in (("stop", 137), ("exec", 137), ("orphan", 7)):
        done = await sandbox.python(_TRACED, way)
        equal((done.stdout, done.code), (b"", code), f"a traced program ({way})")
    expect(await sandbox.guest.connect() is link, "the guest lost its link")


@behaviour("attacks.link")
async def link(stage: Stage) -> None:
    """A program can neither read the link's key, connect to its socket, nor replace either."""
    equal(await ask(await stage.shared(), _LINK), [], "what became of the link")


@behaviour("attacks.line-disciplines")
async def line_disciplines(stage: Stage) -> None:
    """A terminal is a terminal: no program makes it speak PPP, HDLC or GSM, nor load modules."""
    sandbox = await stage.shared()
    script = (
        "import ctypes, os; found = []\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "call = {'x86_64': 16, 'aarch64': 29}[os.uname().machine]\n"
        "for end in os.openpty():\n"
        "    for request in (0x5423, 0x5423 | 1 << 32):\n"
        "        for kind in (0, 3, 13, 21, 27):\n"  # the usual one, PPP, HDLC, GSM, none
        "            wanted = ctypes.byref(ctypes.c_int(kind))\n"
        "            failed = libc.syscall(call, end, ctypes.c_ulong(request), wanted)\n"
        "            if not failed or ctypes.get_errno() not in (1, 25): found.append(kind)\n"
        "print(found)"
    )
    equal(await ask(sandbox, script), [], "what terminals were made to speak")


@behaviour("attacks.devices")
async def devices(stage: Stage) -> None:
    """Device nodes cannot be made, and those that exist lead nowhere."""
    sandbox = await stage.shared()
    script = (
        "import os, stat; found = []\n"
        "for place in ('/tmp', '/workspace', '/dev/shm', '/home/user'):\n"
        "    for kind, major in ((stat.S_IFCHR, 1), (stat.S_IFBLK, 8), (stat.S_IFBLK, 7)):\n"
        "        try: os.mknod(place + '/node', kind | 0o666, os.makedev(major, 1))\n"
        "        except OSError: continue\n"
        "        found.append(place)\n"
        "known = set('null zero full random urandom tty ptmx pts shm fd stdin stdout stderr core"
        " console mqueue net fuse .k8e'.split())\n"
        "found += [name for name in os.listdir('/dev') if name not in known]\n"
        "for name in ('mem', 'kmem', 'kvm', 'kmsg', 'net/tun', 'fuse', 'loop-control', 'vsock'):\n"
        "    try: os.close(os.open('/dev/' + name, os.O_RDWR)); found.append('opened ' + name)\n"
        "    except OSError: pass\n"
        "print(found)"
    )
    found = await ask(sandbox, script)
    # gVisor's own; using them takes rights that no program has.
    own = (
        {"char", "opened net/tun", "opened fuse"} if stage.runtime.name == "gvisor" else set[str]()
    )
    equal(sorted(set(found) - own), [], "devices")


@behaviour("attacks.kernel-files")
async def kernel_files(stage: Stage) -> None:
    """Nothing under /proc/sys, /sys or the cgroups can be written, and no kernel secret read."""
    sandbox = await stage.shared()
    script = (
        "import os; found = []\n"
        "def usable(path):  # what is hidden is /dev/null\n"
        "    return os.access(path, os.W_OK) and os.stat(path).st_rdev != os.makedev(1, 3)\n"
        "for top in ('/proc/sys', '/sys', '/sys/fs/cgroup'):\n"
        "    for folder, folders, files in os.walk(top):\n"
        "        found += [folder] if os.access(folder, os.W_OK) else []\n"
        "        found += [p for f in files for p in [folder + '/' + f] if usable(p)]\n"
        "for path in ('/proc/sysrq-trigger', '/proc/kcore', '/proc/sys/kernel/core_pattern',\n"
        "             '/proc/sys/kernel/modprobe', '/sys/kernel/uevent_helper',\n"
        "             '/proc/sys/fs/binfmt_misc/register'):\n"
        "    for flags in (os.O_WRONLY, os.O_RDWR):\n"
        "        try: os.close(os.open(path, flags))\n"
        "        except OSError: continue\n"
        "        found += ['opened ' + path] if usable(path) else []\n"
        "for path in ('/proc/kcore', '/proc/keys', '/proc/timer_list', '/sys/firmware/acpi'):\n"
        "    try: found += [path] if open(path, 'rb').read(1) else []\n"
        "    except OSError: pass\n"
        "print(found[:20])"
    )
    equal(await ask(sandbox, script), [], "kernel files")


@behaviour("attacks.guest-files")
async def guest_files(stage: Stage) -> None:
    """A program cannot make the guest follow it: /workspace swapped for a link changes nothing."""
    sandbox = await stage.shared()
    script = (
        "import os; done = []\n"
        "for change in (lambda: os.rename('/workspace', '/w'), lambda: os.rmdir('/workspace'),\n"
        "               lambda: os.rename('/workspace', '/tmp/w'), lambda: os.rmdir('/tmp'),\n"
        "               lambda: os.rename('/home/user', '/home/other')):\n"
        "    try: done.append(change())\n"
        "    except OSError: pass\n"
        "print(done)"
    )
    equal(await ask(sandbox, script), [], "changes that succeeded")
    await sandbox.write("after", b"1")
    equal((await sandbox.run(["cat", "/workspace/after"])).stdout, b"1", "a file in the workspace")


@behaviour("attacks.descriptor-directory")
async def descriptor_directory(stage: Stage) -> None:
    """A program cannot be started in a directory that only the guest has open."""
    sandbox = await stage.shared()
    for number in range(32):
        for cwd in (f"/proc/self/fd/{number}", f"/proc/1/fd/{number}", f"/dev/fd/{number}"):
            try:
                done = await sandbox.run(["pwd"], cwd=cwd)
            except OSError:
                continue
            raise BrokenPromise(f"a program ran in {cwd}: {done.story()}")


@behaviour("attacks.flood-of-calls")
async def flood_of_calls(stage: Stage) -> None:
    """Hundreds of operations at once, good and bad, are each answered."""
    sandbox = await stage.shared()

    async def one(number: int) -> str:
        try:
            await sandbox.call("stat", path=f"/etc/{'hostname' if number % 2 else 'nothing'}")
        except FileNotFoundError:
            return "missing"
        return "found"

    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(one(number)) for number in range(600)]
    if [task.result() for task in answers] != ["missing", "found"] * 300:
        raise BrokenPromise("an answer went astray")
