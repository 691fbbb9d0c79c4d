"""Confinement: a program in a sandbox is unprivileged, and sees nothing of the host."""

from __future__ import annotations

import ast
import secrets
from typing import Any

from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.sandbox import Sandbox
from k8e.conformance.stage import Stage

WRITABLE = ("/workspace", "/tmp", "/home/user", "/var/tmp", "/dev/shm")  # noqa: S108 - paths in the sandbox

_GUESTS = {0, 1, 5, 6, 7}  # chown, dac_override, kill, setgid, setuid
_SYS_ADMIN = 21  # of gVisor's own kernel: its guest mounts the workspace
# gVisor says yes to raw sockets and gives nothing, so what counts is what one has afterwards.
_RAISE = """
import ctypes, struct
libc = ctypes.CDLL(None)
def held():
    with open('/proc/self/status') as status:
        rights = dict(line.split() for line in status if line.startswith('Cap'))
    return [name for name in rights if name != 'CapBnd:' and int(rights[name], 16)]
found = []
for number in range(41):
    low, high = (1 << number) & 0xffffffff, (1 << number) >> 32
    for sets in ((low, low, 0, high, high, 0), (0, 0, low, 0, 0, high)):
        libc.capset(struct.pack('=Ii', 0x20080522, 0), struct.pack('=6I', *sets))
    libc.prctl(47, 2, number, 0, 0)
    found += [(number, name) for name in held()]
print(found)
"""
# The ids of a program stay readable until its parent has waited for it. It is killed as soon as the
# exec is done, which closes the pipe: some of them would ask for passwords.
_SETUID = """
import os, signal
found = []
def ids_of(path):
    end, kept = os.pipe()
    pid = os.fork()
    if not pid:
        null = os.open('/dev/null', os.O_RDWR)
        for number in range(3): os.dup2(null, number)
        try: os.execv(path, [path, '--version'])
        except OSError: os._exit(126)
    os.close(kept)
    os.read(end, 1)
    os.close(end)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with open(f'/proc/{pid}/status') as status:
        ids = [line.split() for line in status if line.startswith(('Uid:', 'Gid:'))]
    os.waitpid(pid, 0)
    return ids
for place in ('/usr/bin', '/usr/sbin', '/usr/local/bin', '/usr/lib/openssh'):
    for entry in os.scandir(place) if os.path.isdir(place) else ():
        if entry.is_file(follow_symlinks=False) and entry.stat().st_mode & 0o6000:
            ids = ids_of(entry.path)
            if ids != [['Uid:', *['1000'] * 4], ['Gid:', *['1000'] * 4]]:
                found.append((entry.path, ids))
print(found)
"""


async def ask(sandbox: Sandbox, script: str, *arguments: str) -> Any:
    """Run a Python script that prints one literal, and return it."""
    done = await sandbox.python(script, *arguments)
    if done.code:
        raise BrokenPromise(f"a probe failed: {done.story()}")
    return ast.literal_eval(done.text)


async def process_status(sandbox: Sandbox) -> dict[str, str]:
    script = (
        "print(dict(line.rstrip('\\n').split(':\\t', 1) for line in open('/proc/self/status')))"
    )
    return await ask(sandbox, script)


@behaviour("confinement.user")
async def user(stage: Stage) -> None:
    """Programs run as user 1000, in no other group, with a home of their own."""
    script = (
        "import os, pwd; print(os.getresuid(), os.getresgid(), os.getgroups(),"
        "pwd.getpwuid(os.getuid()).pw_dir, os.access(os.environ['HOME'], os.W_OK), sep=',')"
    )
    done = await (await stage.shared()).python(script)
    seen = done.text.strip().replace(" ", "")
    wanted = ("(1000,1000,1000),(1000,1000,1000),[],/home/user,True",)
    wanted = (*wanted, wanted[0].replace("[]", "[1000]"))
    expect(seen in wanted, f"ids, groups and home are {seen}")


@behaviour("confinement.no-capabilities")
async def no_capabilities(stage: Stage) -> None:
    """Programs hold no capability and can raise none; the bounding set is at most the guest's."""
    sandbox = await stage.shared()
    status = await process_status(sandbox)
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        equal(int(status[name], 16), 0, name)
    # What no exec could ever give. The guest cannot take it from programs without a right more.
    bound = {bit for bit in range(64) if int(status["CapBnd"], 16) >> bit & 1}
    held = _GUESTS | ({_SYS_ADMIN} if stage.runtime.name == "gvisor" else set[int]())
    expect(bound <= held, f"the bounding set has {sorted(bound - held)} besides the guest's")
    equal(await ask(sandbox, _RAISE), [], "capabilities that a program raised")


@behaviour("confinement.no-new-privileges")
async def no_new_privileges(stage: Stage) -> None:
    """No program can gain privileges by exec; the system's setuid programs have no effect."""
    sandbox = await stage.shared()
    gained = await ask(sandbox, _SETUID)
    equal(gained, [], "setuid programs that ran with other ids than 1000")
    script = "import ctypes; print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))"
    equal(await ask(sandbox, script), 1, "no_new_privs")


@behaviour("confinement.seccomp", gvisor="gVisor is the kernel; the host's is out of reach")
async def seccomp(stage: Stage) -> None:
    """Where programs talk to the host's own kernel, a filter limits what they can say."""
    status = await process_status(await stage.shared())
    equal(status["Seccomp"], "2", "seccomp mode")


@behaviour("confinement.writable-places")
async def writable_places(stage: Stage) -> None:
    """Writable are /workspace, /tmp, the home, /var/tmp and /dev/shm, and nothing else."""
    sandbox = await stage.shared()
    done = await sandbox.shell(
        "find / -xdev '(' -path /usr/share -o -path /usr/lib ')' -prune "
        "-o -writable -type d -print 2>/dev/null; "
        "for d in /run /run/* /run/k8e/* /dev /dev/[!f]* /sys /sys/* /sys/fs/* /var /var/* /home "
        "/mnt /opt /opt/k8e /opt/k8e/tools /usr /usr/lib /usr/share /usr/local /workspace /tmp; "
        "do test -d $d && test -w $d && echo $d; done; true"
    )
    found = sorted(set(done.text.split()))
    places = [path for path in found if path not in WRITABLE and not path.startswith(WRITABLE)]
    equal(places, [], "other writable directories")
    for place in WRITABLE:
        equal((await sandbox.shell(f"echo 1 > {place}/probe && rm {place}/probe")).code, 0, place)
    for path in ("/usr/probe", "/etc/probe", "/probe", "/opt/k8e/tools/probe", "/run/probe"):
        expect((await sandbox.shell(f"echo 1 > {path}")).code, f"{path} was written")


@behaviour("confinement.mount-flags")
async def mount_flags(stage: Stage) -> None:
    """Writable mounts allow neither setuid files nor devices, and the system is read-only."""
    sandbox = await stage.shared()
    script = (
        "import os; print({p: tuple(bool(f & n) for n in (os.ST_RDONLY, os.ST_NOSUID, os.ST_NODEV))"
        " for p in ('/', '/usr', '/workspace', '/tmp', '/home', '/var/tmp', '/dev/shm')"
        " for f in [os.statvfs(p).f_flag]})"
    )
    flags = await ask(sandbox, script)
    for place in ("/workspace", "/tmp", "/home", "/var/tmp", "/dev/shm"):  # noqa: S108 - see above
        equal(flags[place][:2], (False, True), f"read-only, nosuid of {place}")
        # gVisor has no such flag, and no devices but its own.
        expect(flags[place][2] or stage.runtime.name == "gvisor", f"{place} allows devices")
    for place in ("/", "/usr"):
        expect(flags[place][0], f"{place} is not read-only")


@behaviour("confinement.no-host-files")
async def no_host_files(stage: Stage) -> None:
    """Nothing of the host's /home, /root, /var, /run, /mnt or /opt can be seen."""
    script = (
        "import os; print({p: sorted(os.listdir(p)) if os.path.isdir(p) else None for p in"
        " '/root /home /var /var/lib /var/cache /opt /opt/k8e /run /run/k8e /mnt /srv /boot /media"
        " /workspace/lost+found'.split()})"
    )
    seen = await ask(await stage.launch(), script)
    allowed = {
        "/home": ["user"],
        "/var": ["cache", "lib", "tmp"],
        "/opt": ["k8e"],
        "/opt/k8e": ["tools"],
        "/run": ["k8e"],
        "/run/k8e": ["guest", "link", "python", "slot", "token"],
    }
    for path, names in seen.items():
        expect(set(names or ()) <= set(allowed.get(path, ())), f"{path} holds {names}")


@behaviour("confinement.no-host-secrets")
async def no_host_secrets(stage: Stage) -> None:
    """No control socket, token, key or password file of the host is there."""
    script = (
        "import os; print([p for p in '/etc/shadow /etc/gshadow /etc/ssh /etc/sudoers"
        " /run/docker.sock /var/run/docker.sock /run/containerd /run/k8e/gateway.sock"
        " /var/run/secrets /etc/kubernetes /etc/ssl/private /etc/machine-id'.split()"
        " if os.path.lexists(p)])"
    )
    equal(await ask(await stage.shared(), script), [], "files of the host")


@behaviour("confinement.processes")
async def processes(stage: Stage) -> None:
    """A sandbox sees its own processes only, with a trusted one as the first."""
    script = (
        "import glob, os; pids = sorted(int(p[6:]) for p in glob.glob('/proc/[0-9]*'))\n"
        "print(os.getppid(), pids, os.getpid(), sep=',')"
    )
    parent, pids, own = await ask(await stage.launch(), script)
    expect(parent < 2, "a program has a parent that is not the guest")
    equal(pids, [1, own], "processes in a new sandbox")


@behaviour("confinement.host-name")
async def host_name(stage: Stage) -> None:
    """The host name is the sandbox's own."""
    script = "import socket; print(repr(socket.gethostname()))"
    equal(await ask(await stage.shared(), script), "sandbox", "host name")


@behaviour("confinement.network")
async def network(stage: Stage) -> None:
    """The network is loopback alone, which works; everything else fails at once."""
    sandbox = await stage.shared()
    script = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname(), 5)\n"
        "server.accept()[0].sendall(b'over lo')\n"
        "names = [name for _, name in socket.if_nameindex()]\n"
        "def outside(family, kind, address):\n"
        "    with socket.socket(family, kind) as s:\n"
        "        s.settimeout(5)\n"
        "        try: s.connect(address); return s.send(b'x') and 'connected'\n"
        "        except TimeoutError: return 'timed out'\n"
        "        except OSError: return 'refused'\n"
        "v4, v6 = socket.AF_INET, socket.AF_INET6\n"
        "tcp, udp = socket.SOCK_STREAM, socket.SOCK_DGRAM\n"
        "targets = ['192.0.2.1', '169.254.169.254', '10.0.0.1', '8.8.8.8', '172.17.0.1']\n"
        "seen = {outside(v4, kind, (t, 53)) for t in targets for kind in (tcp, udp)}\n"
        "seen |= {outside(v6, tcp, ('2001:db8::1', 53)), outside(v6, udp, ('fd00:ec2::254', 53))}\n"
        "print((client.recv(99), names, sorted(seen)))"
    )
    heard, names, outside = await ask(sandbox, script)
    equal(
        (heard, names, outside), (b"over lo", ["lo"], ["refused"]), "loopback, interfaces, outside"
    )


@behaviour("confinement.neighbours")
async def neighbours(stage: Stage) -> None:
    """Two sandboxes share nothing: processes, abstract sockets, shared memory, files, loopback."""
    one, two = await stage.shared(), await stage.launch()
    word = "n" + secrets.token_hex(6)
    hold = (
        "import ctypes, socket, sys, time; word = sys.argv[1]\n"
        "abstract = socket.socket(socket.AF_UNIX); abstract.bind('\\0' + word); abstract.listen()\n"
        "tcp = socket.create_server(('127.0.0.1', 34567))\n"
        "for place in ('/tmp', '/dev/shm', '/workspace', '/var/tmp', '/home/user'):\n"
        "    open(place + '/' + word, 'w').close()\n"
        "print(ctypes.CDLL(None).shmget(0x4b3845, 4096, 0o1666) >= 0, flush=True); time.sleep(1000)"
    )
    program = await one.start(["/usr/bin/python3", "-c", hold, word])
    await program.until(b"\n")
    look = (
        "import ctypes, glob, os, socket, sys; word = sys.argv[1]; found = []\n"
        "local, distant = (socket.AF_UNIX, '\\0' + word), (socket.AF_INET, ('127.0.0.1', 34567))\n"
        "for kind, address in (local, distant):\n"
        "    try: socket.socket(kind).connect(address); found.append(address)\n"
        "    except OSError: pass\n"
        "for place in ('/tmp', '/dev/shm', '/workspace', '/var/tmp', '/home/user'):\n"
        "    found += glob.glob(place + '/' + word)\n"
        "if ctypes.CDLL(None).shmget(0x4b3845, 4096, 0) >= 0: found.append('shared memory')\n"
        "me = str(os.getpid())\n"
        "for name in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: told = open(name, 'rb').read()\n"
        "    except OSError: continue\n"  # it ended meanwhile
        "    if name.split('/')[2] != me and word.encode() in told: found.append(name)\n"
        "print(found)"
    )
    seen_by_one = await ask(one, look, word)
    expect(len(seen_by_one) >= 8, f"the probe is blind: {seen_by_one}")
    equal(await ask(two, look, word), [], "what the neighbour sees")
    await one.call("signal", id=program.id, terminate=True)
    await program.finish()
