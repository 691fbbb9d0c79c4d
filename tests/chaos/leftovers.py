"""What of sandboxes is left on this host: looked for once for all of them, by their ids."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from k8e.conformance import traces
from k8e.egress import namespaces
from k8e.egress.nftables import Nftables
from k8e.runtimes import uids

_ID = re.compile(r"sb-[a-z2-7]{20}")
_INTERFACE = re.compile(r'"(sb\d+)"')
EVENTS = "events"  # what happened is told for a day


def of_sandboxes(gone: set[str], folder: Path) -> list[str]:
    """Processes, cgroups, mounts, loop devices and files of sandboxes that should be gone."""
    return [
        *(f"process {pid} of {name}" for pid, name in _processes() if name in gone),
        *(f"cgroup {path}" for path in _cgroups() if path.name in gone),
        *(f"mount {line}" for line in _mounts() if gone.intersection(_ID.findall(line))),
        *(f"device {line}" for line in _devices() if gone.intersection(_ID.findall(line))),
        *(f"file {path}" for path in _files(folder) if gone.intersection(_ID.findall(path))),
        *(f"file {path}" for path in _files(uids.CLAIMS) if gone.intersection(_ID.findall(path))),
    ]


def of_folder(folder: Path) -> list[str]:
    """What is left of a gateway that has ended everything."""
    here = str(folder)
    return [
        *(f"process {pid}: {command}" for pid, command in _commands() if here in command),
        *(f"mount {line}" for line in _mounts() if here in line),
        *(f"device {line}" for line in _devices() if here in line),
        *(f"file {path}" for path in _files(folder) if _is_scrap(path)),
    ]


def scraps(folder: Path) -> list[str]:
    """Files that were half written."""
    return [path for path in _files(folder) if _is_scrap(path)]


def of_router(net: Path, owned: set[str]) -> list[str]:
    """What the router holds that belongs to none of the sandboxes that there are."""
    records = {path.stem: _slot(path) for path in (net / "sandboxes").glob("*.json")}
    slots = {f"sb{path.name}" for path in (net / "slots").iterdir()}
    ours = {f"sb{slot}" for slot in records.values()}
    links = {name for _, name in namespaces.run_in(net / "router", socket.if_nameindex)}
    return [
        *(f"network record of {name}" for name in records.keys() - owned),
        *(f"link {name}" for name in links - slots - {"lo", "up"}),
        *(f"nft elements of {name}" for name in held(net / "router") - ours),
    ]


def held(router: Path) -> set[str]:
    """The interfaces for which the kernel holds a policy, and not only counts."""
    counting = re.compile(r"\tset \w+ {[^}]*flags dynamic.*?\n\t}", re.DOTALL)
    return set(_INTERFACE.findall(counting.sub("", ruleset(router))))


def ruleset(namespace: Path) -> str:
    def inside() -> str:
        nft = Nftables()
        try:
            return nft.run("list ruleset")
        finally:
            nft.close()

    return namespaces.run_in(namespace, inside)


def _slot(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads(path.read_text("utf-8"))["slot"])
    return -1


def _is_scrap(path: str) -> bool:
    return path.endswith((".tmp", ".part", ".mnt")) and f"/{EVENTS}/" not in path


def _commands() -> Iterable[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            told = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            yield int(folder.name), told.decode("utf-8", "replace")


def _processes() -> Iterable[tuple[int, str]]:
    for pid, command in _commands():
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{pid}")
            told = command + (folder / "cgroup").read_text("utf-8", "replace")
            found = set(_ID.findall(told))
            if found and not traces.awaits_burial(folder):
                yield from ((pid, name) for name in found)


def _cgroups() -> Iterable[Path]:
    for pattern in ("*/sb-*", "*/*/sb-*"):
        yield from traces.CGROUPS.glob(pattern)


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()


def _devices() -> Iterable[str]:
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            yield f"{file.parts[3]} {file.read_text('utf-8', 'surrogateescape').strip()}"


def _files(top: Path) -> Iterable[str]:
    for folder, names, others in os.walk(top):
        for name in (*names, *others):
            yield f"{folder}/{name}"
