"""Whether this machine can be a server or an agent: looked at before anything is started.

Each check raises an error that says what is in the way, and what to do about it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from k8e import _version, errors
from k8e.distro import certificates, components, supervisor
from k8e.distro.component_store import ComponentStore, State
from k8e.distro.configuration import ADDONS, Configuration
from k8e.distro.layout import Layout, write_private

SERVER_PORTS = {
    "kube-apiserver": 6443,
    "etcd": 2379,
    "etcd's peers": 2380,
    "kube-controller-manager": 10257,
    "kube-scheduler": 10259,
}
NODE_PORTS = {"kubelet": 10250, "kubelet's health": 10248}
PROXY_PORTS = {"kube-proxy": 10249, "kube-proxy's health": 10256}
CILIUM_PORTS = {"cilium": 9879, "cilium-operator": 9234}
_MEBIBYTE = 1 << 20
MEMORY = {("server", "cilium"): 1500, ("server", "basic"): 1000, ("server", "none"): 1000}
AGENT_MEMORY = 600
DISK = 2048
_LISTENING = "0A"
_WRITABLE_BY_OTHERS = 0o022
_BPF, _MOUNT_BPF = {"x86_64": 321, "aarch64": 280}, "bpf"
_BPF_PROG_LOAD = 5
_SCHED_CLS, _CGROUP_SOCK_ADDR = 3, 18
_CONNECT4 = 10


def check(config: Configuration, role: str) -> None:
    """Everything that can be known before a component runs."""
    _check_root()
    check_release(config.layout)
    check_role(config.layout, role)
    check_folders(config.layout)
    check_clock(config.layout)
    check_kernel(config.cni if role == "server" else "none")
    if not config.allow_swap:
        check_swap()
    check_memory(role, config.cni)
    check_disk(config.data_dir)
    check_ports(config, role)


def _check_root() -> None:
    if os.geteuid() != 0:
        raise errors.Denied(
            f"k8e server and k8e agent need root; this is uid {os.geteuid()}",
            hint="start it with sudo, or as a service",
        )
    if platform.system() != "Linux" or platform.machine() not in _BPF:
        raise errors.InvalidRequest(
            f"no cluster runs on {platform.system()} {platform.machine()}",
            hint="use Linux on x86-64 or ARM64",
        )


def check_components(config: Configuration, role: str, store: ComponentStore, cni: str) -> None:
    """Whether every program that is going to run here is what was recorded."""
    for component in components.needed(cni):
        addon = component.name.removesuffix("-provisioner")
        if addon in config.disable:
            continue
        finding = store.look(component)
        if addon in ADDONS and role == "agent" and finding.state is State.MISSING:
            continue  # its pods may run on other nodes alone
        if finding.state is not State.PRESENT:
            detail = finding.detail or f"it is {finding.state}"
            raise errors.ToolFailed(
                f"the component {component.name} in {store.folder} cannot be used: {detail}",
                hint=f"k8e components install {component.name}",
            )


# Folders.


def check_release(layout: Layout) -> None:
    """Refuse what a newer release wrote: it may mean something that we would break."""
    try:
        wrote = str(json.loads(layout.release.read_bytes())["version"])
    except FileNotFoundError:
        return
    except errors.UNREADABLE as error:
        raise errors.StateUnusable(
            f"{layout.release} cannot be read: {error}",
            hint="restore the folder from a backup; if it is of no use, k8e server uninstall",
        ) from None
    if _parts(wrote) > _parts(_version.__version__):
        raise errors.StateUnusable(
            f"{layout.data} was written by k8e {wrote}, which is newer than this one "
            f"({_version.__version__})",
            hint=f"install k8e {wrote} or newer; the folder was left as it is",
        )


def note_release(layout: Layout) -> None:
    write_private(layout.release, json.dumps({"version": _version.__version__}) + "\n")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_role(layout: Layout, role: str) -> None:
    is_server = (layout.tls / "server-ca.crt").exists()
    if role == "agent" and is_server:
        raise errors.Conflict(
            f"this machine is the server of a cluster: {layout.server} has its certificates",
            hint="its own node is part of k8e server; or k8e server uninstall first",
        )
    if role == "server" and layout.cluster.exists():
        raise errors.Conflict(
            f"this machine has joined a cluster as an agent: {layout.cluster} says so",
            hint="k8e agent uninstall first",
        )


def check_folders(layout: Layout) -> None:
    """Refuse folders in which somebody else could put keys and programs in the place of ours."""
    for path in (layout.data, layout.server, layout.agent, layout.run):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_BY_OTHERS:
                raise errors.Denied(
                    f"the folder {path} belongs to uid {found.st_uid} with the rights "
                    f"{found.st_mode & 0o7777:o}: others than root can change what is in it",
                    hint=f"chown root {path} && chmod go-w {path}, if what is in it is yours; or "
                    "another --data-dir",
                )


def check_clock(layout: Layout) -> None:
    """Refuse to start before our own authority was made: no certificate would be valid."""
    for path in (layout.tls / "server-ca.crt", layout.pki / "server-ca.crt"):
        if path.exists():
            found, now = certificates.read(path), datetime.datetime.now(datetime.UTC)
            if not found.not_valid_before_utc <= now < found.not_valid_after_utc:
                raise errors.InvalidRequest(
                    f"the clock of this machine says {now:%Y-%m-%d %H:%M}, and the certificates of "
                    f"this cluster are valid from {found.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                    f"{found.not_valid_after_utc:%Y-%m-%d}",
                    hint="set the clock, such as by NTP, and start it again",
                )


# The kernel.


def check_kernel(cni: str) -> None:
    for present, option, use in _kernel_needs(cni):
        if not present:
            raise errors.RuntimeUnusable(
                f"this kernel ({platform.release()}) lacks {option}, which {use} needs",
                hint="use a kernel with that option"
                + (", or --cni=basic, which needs no BPF" if "BPF" in option else ""),
            )


def _kernel_needs(cni: str) -> Iterable[tuple[bool, str, str]]:
    systems = _words(Path("/proc/filesystems"))
    yield "overlay" in systems, "CONFIG_OVERLAY_FS", "containerd"
    for name, option in (("net", "NET_NS"), ("pid", "PID_NS"), ("user", "USER_NS")):
        yield Path(f"/proc/self/ns/{name}").exists(), f"CONFIG_{option}", "every container"
    controllers = _controllers()
    for name, option in (
        ("cpu", "CGROUP_SCHED"),
        ("memory", "MEMCG"),
        ("pids", "CGROUP_PIDS"),
        ("cpuset", "CPUSETS"),
    ):
        yield name in controllers, f"CONFIG_{option} (control groups: {name})", "kubelet"
    if cni != "cilium":
        return
    yield "bpf" in systems, "CONFIG_BPF_SYSCALL", "Cilium"
    yield bpf_loads(_SCHED_CLS), "CONFIG_NET_CLS_BPF", "Cilium"
    yield bpf_loads(_CGROUP_SOCK_ADDR, _CONNECT4), "CONFIG_CGROUP_BPF", "Cilium"


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text("ascii", "replace").split())
    except OSError:
        return set()


def _controllers() -> set[str]:
    """Controllers of both versions that the kernel has and that are not switched off."""
    found = _words(Path("/sys/fs/cgroup/cgroup.controllers"))
    with contextlib.suppress(OSError):
        for line in Path("/proc/cgroups").read_text("ascii").splitlines()[1:]:
            name, _, _, enabled = line.split()
            if enabled == "1":
                found.add(name)
    return found


def bpf_loads(kind: int, attach: int = 0) -> bool:
    """Whether the kernel takes a BPF program of a kind: one that returns 1 and does nothing."""
    program = (ctypes.c_ubyte * 16)(0xB7, 0, 0, 0, 1, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0)
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = (ctypes.c_ubyte * 128)()
    ctypes.c_uint32.from_buffer(attributes, 0).value = kind
    ctypes.c_uint32.from_buffer(attributes, 4).value = 2  # instructions
    ctypes.c_uint64.from_buffer(attributes, 8).value = ctypes.addressof(program)
    ctypes.c_uint64.from_buffer(attributes, 16).value = ctypes.addressof(licence)
    ctypes.c_uint32.from_buffer(attributes, 68).value = attach
    number = _BPF[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(number, _BPF_PROG_LOAD, ctypes.byref(attributes), 128)
    if descriptor < 0:
        return False
    os.close(descriptor)
    return True


# Memory, disk, swap.


def check_swap(path: Path = Path("/proc/swaps")) -> None:
    with contextlib.suppress(OSError):
        devices = [line.split()[0] for line in path.read_text("utf-8").splitlines()[1:] if line]
        if devices:
            raise errors.InvalidRequest(
                f"swap is on ({', '.join(devices)}): limits of memory would not hold",
                hint="swapoff -a and remove it from /etc/fstab; or --allow-swap",
            )


def check_memory(role: str, cni: str, path: Path = Path("/proc/meminfo")) -> None:
    needed = MEMORY[role, cni] if role == "server" else AGENT_MEMORY
    with contextlib.suppress(OSError, IndexError, ValueError):
        found = re.search(r"MemTotal:\s+(\d+) kB", path.read_text("ascii"))
        present = int(found[1]) >> 10 if found else needed
        if present < needed:
            raise errors.LimitExceeded(
                f"this machine has {present} MiB of memory; k8e {role} with --cni={cni} "
                f"needs {needed}",
                hint="--cni=basic needs less" if cni == "cilium" else "use a larger machine",
            )


def check_disk(data: Path) -> None:
    folder = next(path for path in (data, *data.parents) if path.exists())
    free = shutil.disk_usage(folder).free // _MEBIBYTE
    if free < DISK:
        raise errors.LimitExceeded(
            f"the disk of {folder} has {free} MiB left; k8e needs {DISK}",
            hint="free some room, or choose another disk with --data-dir",
        )


# Ports.


def check_ports(config: Configuration, role: str) -> None:
    ports: dict[str, int] = dict(NODE_PORTS)
    if role == "server":
        ports |= SERVER_PORTS | {"kube-apiserver": config.https_listen_port}
        ports |= {"basic": PROXY_PORTS, "cilium": CILIUM_PORTS}.get(config.cni, {})
    own = {record.pid for record in supervisor.read_records(config.layout) if record.is_running()}
    check_free(ports, own)


def check_free(ports: Mapping[str, int], own: set[int]) -> None:
    """Whether nobody listens on ports but components that we take over."""
    taken = listeners()
    ours = {inode for pid in own for inode in _sockets(Path(f"/proc/{pid}/fd"))}
    for use, port in ports.items():
        if taken.get(port, set()) <= ours:
            continue
        holders = _holders(taken[port])
        whom = ", ".join(sorted(f"{_name(pid)} (pid {pid})" for pid in holders)) or "nobody we see"
        raise errors.Conflict(
            f"port {port}, which {use} needs, is taken by {whom}",
            hint="stop that program, or uninstall the other cluster of this machine",
        )


def listeners() -> dict[int, set[str]]:
    """Ports on which somebody listens, with the inodes of their sockets."""
    found: dict[int, set[str]] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    port = int(fields[1].rpartition(":")[2], 16)
                    found.setdefault(port, set()).add(fields[9])
    return found


def _holders(inodes: set[str]) -> set[int]:
    """Who has sockets open: found by looking at everybody, so only for an error's message."""
    return {
        int(folder.parent.name)
        for folder in Path("/proc").glob("[0-9]*/fd")
        if inodes & _sockets(folder)
    }


def _sockets(folder: Path) -> set[str]:
    """The inodes of the sockets that a process has open."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(entry.path).partition(":")  # noqa: PTH115
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return "a program"
