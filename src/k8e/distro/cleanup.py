"""Uninstalling: processes, mounts, namespaces, links, rules, BPF programs, control groups, files.

Works on whatever is there: after a clean stop, after a crash, and twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from k8e import errors, system
from k8e.distro import gateway_component, kernel_settings, node_services, supervisor
from k8e.distro.basic_network import ROUTE_PROTOCOL
from k8e.distro.configuration import Configuration
from k8e.distro.layout import COMMANDS, CONFIGURATION, KUBELET, Layout
from k8e.runtimes import uids

_NETNS, _POD_NETNS = Path("/run/netns"), "cni-"
_CONTAINERD = Path("/run/containerd")
"""Of the machine's own containerd, if there is one; shims of ours have their sockets there too."""
_CNI = Path("/var/lib/cni")
_OCTAL = re.compile(r"\\([0-7]{3})")
_CGROUPS = Path("/sys/fs/cgroup")
_BPF = Path("/sys/fs/bpf")
_PODS = "kubepods"
_MNT_DETACH = 2
_SECONDS = 60
_TABLES = ("kube-proxy", "k8e-basic", "cni_hostport", "hostport")
_IPTABLES = ("filter", "nat", "mangle", "raw", "security")
_CILIUM_RULE = re.compile(r"CILIUM_|cilium")
_LINKS = re.compile(r"cilium_\w+|lxc\w+")


def stop_components(layout: Layout) -> None:
    """End components that a killed supervisor has left; those that need others first."""
    found = [record for record in supervisor.read_records(layout) if record.is_running()]
    for record in sorted(found, key=lambda record: record.since, reverse=True):
        _end(record.pid)
    for path in layout.components.glob("*"):
        path.unlink(missing_ok=True)


def _end(pid: int) -> None:
    import select

    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        if select.select([descriptor], [], [], 20)[0]:
            break
    os.close(descriptor)


def remove_all(config: Configuration, tell: Callable[[str], None]) -> list[str]:
    """Remove everything; what there was."""
    layout = config.layout
    removed: list[str] = []
    for what, step in (
        ("sandboxes", lambda: _destroy_sandboxes(config)),
        ("pods", lambda: _end_pods(layout)),
        ("Cilium's programs and rules", lambda: _remove_cilium(_cluster_network(config))),
        ("mounts", lambda: unmount(layout)),
        ("network", _remove_network),
        ("control groups", _remove_cgroups),
        ("kernel settings", lambda: _restore_settings(layout)),
        ("files", lambda: _remove_files(config)),
    ):
        if step():
            removed.append(what)
            tell(f"{what}: removed")
    return removed


def _destroy_sandboxes(config: Configuration) -> bool:
    if not config.layout.gateway.exists():
        return False
    environ = {**os.environ, **gateway_component.environment(config.layout)}
    command = [sys.executable, "-P", "-m", "k8e", "gateway", "stop", "--destroy"]
    _run(command, environ=environ)
    return True


# Processes.


def _end_pods(layout: Layout) -> bool:
    found = list(_pod_processes(layout))
    system.end_all(lambda: _pod_processes(layout))
    return bool(found)


def _pod_processes(layout: Layout) -> Iterator[int]:
    """Shims of our containerd, and whatever runs in control groups of pods."""
    address = os.fsencode(layout.containerd_socket)
    own = os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if address in (folder / "cmdline").read_bytes() and int(folder.name) != own:
                yield int(folder.name)
    for group in _pod_groups():
        for path in group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                yield from map(int, path.read_text("ascii").split())


def _pod_groups() -> list[Path]:
    places = [_CGROUPS, *(path for path in _CGROUPS.glob("*") if path.is_dir())]
    return [path for place in places if (path := place / _PODS).is_dir()]


# The network.


def _cluster_network(config: Configuration) -> str:
    """The addresses of pods: an agent was told them when it joined."""
    with contextlib.suppress(*errors.UNREADABLE):
        return str(json.loads(config.layout.cluster.read_bytes())["cluster_cidr"])
    return config.cluster_cidr


def _remove_cilium(cluster_network: str) -> bool:
    links = _links()
    pinned = [path for path in (_BPF / "cilium", _BPF / "tc/globals") if path.exists()]
    if not pinned and not any(_LINKS.fullmatch(name) for name in links):
        return False
    for path in pinned:  # programs end with the last that holds them: a pin, a link, a filter
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        (_BPF / "tc").rmdir()
    for name in links:
        if _LINKS.fullmatch(name):
            _run(["ip", "link", "delete", name])
        else:
            _remove_filters(name)
    _restore_local_rule()
    _run(["ip", "route", "flush", "root", cluster_network])
    for program in ("iptables", "ip6tables"):
        _remove_iptables(program)
    if shutil.which("ipset"):
        for name in re.findall(r"^cilium\S+", _said(["ipset", "list", "-n"]), re.MULTILINE):
            _run(["ipset", "destroy", name])
    _remove_empty_tables()
    return True


def _remove_empty_tables() -> None:
    """Tables that iptables made for Cilium's rules, if nobody else has a rule in them."""
    try:
        listed: list[dict[str, dict[str, str]]] = json.loads(
            _said(["nft", "-j", "list", "ruleset"])
        )["nftables"]
    except (ValueError, KeyError):
        return
    used = {(item["rule"]["family"], item["rule"]["table"]) for item in listed if "rule" in item}
    # A chain that drops by default is a rule too; and one that is no hook somebody has made.
    used |= {
        (item["chain"]["family"], item["chain"]["table"])
        for item in listed
        if "chain" in item and item["chain"].get("policy") != "accept"
    }
    for item in listed:
        family, name = (
            (item["table"]["family"], item["table"]["name"]) if "table" in item else ("", "")
        )
        if family in ("ip", "ip6") and name in _IPTABLES and (family, name) not in used:
            _run(["nft", "delete", "table", family, name])


def _links() -> list[str]:
    try:
        return [link["ifname"] for link in json.loads(_said(["ip", "-json", "link"]))]
    except (ValueError, KeyError, TypeError):
        return []


def _remove_filters(link: str) -> None:
    """Cilium's filters on a link of the machine; its own way of attaching ends with its pins."""
    for direction in ("ingress", "egress"):
        if "cil_" in _said(["tc", "filter", "show", "dev", link, direction]):
            _run(["tc", "filter", "del", "dev", link, direction])


def _restore_local_rule() -> None:
    """Cilium moves the rule for the machine's own addresses behind its own."""
    rules = _said(["ip", "-4", "rule"])
    if re.search(r"^100:.*lookup local", rules, re.MULTILINE):
        if not re.search(r"^0:.*lookup local", rules, re.MULTILINE):
            _run(["ip", "-4", "rule", "add", "from", "all", "lookup", "local", "pref", "0"])
        _run(["ip", "-4", "rule", "del", "from", "all", "lookup", "local", "pref", "100"])
    for preference, table in re.findall(r"^(\d+):.*lookup (200[0-9])", rules, re.MULTILINE):
        _run(["ip", "-4", "rule", "del", "pref", preference, "lookup", table])
        _run(["ip", "-4", "route", "flush", "table", table])


def _remove_iptables(program: str) -> None:
    """Rules and chains of Cilium, and nobody else's."""
    if shutil.which(program) is None:
        return
    table = ""
    chains: list[tuple[str, str]] = []
    for line in _said([f"{program}-save"]).splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":CILIUM_"):
            chains.append((table, line[1:].split()[0]))
        elif line.startswith("-A ") and _CILIUM_RULE.search(line):
            import shlex

            _run([program, "-t", table, "-D", *shlex.split(line)[1:]])
    for action in ("-F", "-X"):
        for place, chain in chains:
            _run([program, "-t", place, action, chain])


def _remove_network() -> bool:
    found = False
    for path in _NETNS.glob(f"{_POD_NETNS}*") if _NETNS.is_dir() else ():
        path.unlink(missing_ok=True)
        found = True
    with contextlib.suppress(OSError):
        _NETNS.rmdir()
    if shutil.which("nft"):
        for family, name in re.findall(
            r"^table (\w+) (\S+)", _said(["nft", "list", "tables"]), re.MULTILINE
        ):
            if name in _TABLES:
                _run(["nft", "delete", "table", family, name])
                found = True
    _run(["ip", "route", "flush", "proto", ROUTE_PROTOCOL])
    return found


# Mounts, control groups, kernel settings, files.


def unmount(layout: Layout) -> bool:
    found = list(_mounts(_places(layout)))
    libc = ctypes.CDLL(None, use_errno=True)
    for path in reversed(found):
        libc.umount2(os.fsencode(path), _MNT_DETACH)
    return bool(found)


def _places(layout: Layout) -> tuple[str, ...]:
    """How the paths of our mounts begin. Named network namespaces of others are none of them."""
    folders = (layout.run, layout.data, KUBELET, Path("/run/cilium"), _BPF / "cilium")
    return (*(f"{path}/" for path in folders), f"{_NETNS}/{_POD_NETNS}")


def _mounts(prefixes: tuple[str, ...]) -> Iterator[str]:
    """Mount points whose paths begin so, in the order in which they were mounted."""
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        path = _OCTAL.sub(lambda code: chr(int(code[1], 8)), line.split(" ")[4])
        if path.startswith(prefixes) and not path.startswith("/run/k8e/router"):
            yield path


def _remove_cgroups() -> bool:
    groups = _pod_groups()
    for group in groups:
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106
    return bool(groups)


def _restore_settings(layout: Layout) -> bool:
    found = layout.before.exists()
    kernel_settings.restore(layout)
    return found


def _remove_files(config: Configuration) -> bool:
    layout = config.layout
    # Files of a volume that is still mounted are on the disk of somebody else.
    stuck = list(_mounts(_places(layout)))
    if stuck:
        raise errors.Conflict(
            f"{stuck[0]} is still mounted and cannot be unmounted, so no files were removed",
            hint="unmount it, then uninstall again: it goes on from here",
        )
    node_services.withdraw_commands(COMMANDS)
    found = layout.data.exists()
    for path in (
        *(layout.data, layout.run, KUBELET, CONFIGURATION.parent, config.write_kubeconfig),
        *map(Path, ("/run/cilium", "/var/log/pods")),
        *map(Path, ("/var/log/containers", "/run/xtables.lock")),
    ):
        _remove(path)
    remove_shared(_CONTAINERD, _CNI)
    if not any(path.is_symlink() for path in uids.CLAIMS.glob("*")):  # nobody's sandbox has any
        _remove(uids.CLAIMS)
    for folder in (Path("/etc/cni/net.d"), Path("/etc/cni")):
        with contextlib.suppress(OSError):
            folder.rmdir()
    return found


def remove_shared(containerd: Path, cni: Path) -> None:
    """What is ours in folders of every containerd; Docker's or podman's containers may run on."""
    for path in (containerd / "s").glob("*"):
        if not _is_served(path):
            path.unlink(missing_ok=True)
    if not (containerd / "containerd.sock").exists():
        for name in ("fifo", "runc"):
            _remove(containerd / name)
    for path in (cni / "results").glob("*"):
        if path.name.startswith(_OUR_NETWORKS):
            path.unlink(missing_ok=True)
    for folder in (containerd / "s", containerd, cni / "results", cni):
        with contextlib.suppress(OSError):
            folder.rmdir()


_OUR_NETWORKS = ("k8e-", "cilium-", "cni-loopback-")


def _is_served(path: Path) -> bool:
    """Whether somebody listens on a socket; one that we may not ask is taken for one that is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _run(command: list[str], environ: dict[str, str] | None = None) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, env=environ, capture_output=True, check=False, timeout=_SECONDS)


def _said(command: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS)
        return done.stdout.decode("utf-8", "replace")
    return ""
