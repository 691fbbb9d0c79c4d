"""What a cluster can leave on a machine, or on the computer: one set of lines for each kind."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from k8e.distro import kernel_settings
from tests.cluster.machine_init import SHARED_SETTINGS, WRITTEN

Run = Callable[..., str]
"""Runs a command where the traces are looked for; what it prints."""
_COUNTERS = re.compile(r"\s(packets|bytes) \d+")
_FILES = "/.written /run /var/lib/k8e /var/lib/kubelet /var/log /sys/fs/bpf"
_NOISE = re.compile(r"/run/mount|__pycache__|/root/\.(kube|cache)|/\.written/(tmp|root|work)")


def of_machine(run: Run) -> dict[str, set[str]]:
    """Everything of a machine that a cluster changes."""
    found = {
        "processes": _lines(run("ps", "-eo", "args", "--no-headers"), _is_tool),
        "mounts": _lines(run("cat", "/proc/self/mounts")),
        "links": _lines(run("ip", "-o", "link"), keep=lambda line: line.split(": ")[1]),
        "addresses": _lines(
            run("ip", "-o", "address", "show"), _is_link_local, keep=_without_lifetimes
        ),
        # IPv6 gives links addresses of their own, some time after they are up.
        "routes": _lines(run("ip", "route", "show", "table", "all"), _is_link_local),
        "rules": _lines(run("ip", "rule")),
        "namespaces": _lines(run("sh", "-c", "ls /run/netns 2>/dev/null || true")),
        "nftables": _lines(_COUNTERS.sub("", run("nft", "list", "ruleset"))),
        "bpf": _lines(run("sh", "-c", "find /sys/fs/bpf -mindepth 1")),
        "cgroups": _lines(run("sh", "-c", "find /sys/fs/cgroup -mindepth 2 -type d")),
        "settings": _lines(run("sh", "-c", f"grep -H . {_settings()} 2>/dev/null || true")),
        "files": {
            line
            for line in _lines(run("sh", "-c", f"find {_FILES} 2>/dev/null || true"))
            if not _NOISE.search(line) and not _is_of_computer(line)
        },
    }
    # Links to devices that are there for everybody.
    found["mounts"] = {line for line in found["mounts"] if " /dev" not in line}
    return found


def _settings() -> str:
    return " ".join(map(str, kernel_settings.WATCHED))


def _lines(
    text: str, skip: Callable[[str], bool] | None = None, *, keep: Callable[[str], str] = str.strip
) -> set[str]:
    lines = (line for line in text.splitlines() if line.strip())
    return {keep(line) for line in lines if skip is None or not skip(line)}


def _is_of_computer(line: str) -> bool:
    """Whether it is a folder of the computer's, which a machine shows when it writes in it."""
    return Path("/", line.removeprefix(f"/{WRITTEN}/")).is_dir() and line.startswith(f"/{WRITTEN}")


def _is_tool(line: str) -> bool:
    return line.startswith(("ps ", "nsenter ")) or "machine_init" in line


def _is_link_local(line: str) -> bool:
    return "fe80::" in line and "eth0" in line


def _without_lifetimes(line: str) -> str:
    return re.sub(r"\s+valid_lft.*|\s+tentative|\\", "", line.split(": ", 1)[1]).strip()


def left(before: dict[str, set[str]], after: dict[str, set[str]]) -> list[str]:
    """What is there afterwards and was not, or the other way round."""
    found: list[str] = []
    for kind, lines in before.items():
        found += [f"{kind}: + {line}" for line in sorted(after[kind] - lines)]
        found += [f"{kind}: - {line}" for line in sorted(lines - after[kind])]
    return found


def of_computer() -> dict[str, set[str]]:
    """What of the computer itself a cluster could change; other tests change other things."""
    links = _said("ip", "-o", "link")
    return {
        "links": set(re.findall(r"^\d+: (cilium\w*|lxc\w*|cni\w*|eth\d+|lo)", links, re.MULTILINE)),
        "mounts": _matching(Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()),
        "cgroups": _matching(map(str, Path("/sys/fs/cgroup").glob("*/*"))),
        "tables": _matching(_said("nft", "list", "tables").splitlines()),
        "routes": set(_said("ip", "route", "show", "default").splitlines()),
        "rules": set(_said("ip", "rule").splitlines()),
        "bpf": set(map(str, Path("/sys/fs/bpf").glob("*"))),
        "settings": {
            f"{name} {(Path('/proc/sys') / name).read_text('ascii').strip()}"
            for name in SHARED_SETTINGS
            if (Path("/proc/sys") / name).exists()
        },
        "state": {path for path in ("/etc/k8e", "/var/lib/kubelet") if Path(path).exists()},
    }


_OURS = re.compile(r"kubepods|kubelet|cilium|kube-proxy|k8e-basic|\bcni\d*\b")


def _matching(lines: Iterable[str]) -> set[str]:
    """Lines that speak of clusters; machines of other tests come and go meanwhile."""
    return {line for line in lines if _OURS.search(line) and "k8e-machine" not in line}


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, check=False, timeout=30)
    return done.stdout.decode("utf-8", "replace")
