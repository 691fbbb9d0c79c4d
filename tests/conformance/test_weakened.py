"""Checks that cannot fail prove nothing: sandboxes that are made weaker on purpose are caught."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from k8e import conformance
from k8e.conformance import host as conformance_host
from k8e.conformance.lab.rooms import Room
from k8e.egress import namespaces, rules
from k8e.egress.nftables import Nftables
from k8e.runtimes import bundle, oci
from k8e.runtimes.gvisor import GVisor
from k8e.runtimes.host import Host
from k8e.runtimes.registry import Runtimes

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(120),
]
Config = dict[str, Any]
Weaken = Callable[[Config], object]


def _drop_namespace(kind: str) -> Weaken:
    def weaken(config: Config) -> None:
        linux = config["linux"]
        linux["namespaces"] = [item for item in linux["namespaces"] if item["type"] != kind]

    return weaken


def _mount(kind: str, target: str, source: str, *options: str) -> Weaken:
    mount = {"destination": target, "type": kind, "source": source, "options": list(options)}
    return lambda config: config["mounts"].append(mount)


def _privileges(config: Config) -> None:
    config["process"]["noNewPrivileges"] = False


def _more_rights(config: Config) -> None:
    config["process"]["capabilities"]["bounding"] = ["CAP_SETUID", "CAP_SYS_PTRACE"]


def _show_everything(config: Config) -> None:
    config["linux"]["maskedPaths"] = []


def _allow_call(name: str) -> Weaken:
    """Whatever its arguments are."""

    def weaken(config: Config) -> None:
        rules = config["linux"]["seccomp"]["syscalls"]
        rules[:] = [rule for rule in rules if name not in rule["names"]]
        rules.append({"names": [name], "action": "SCMP_ACT_ALLOW"})

    return weaken


WEAKER: dict[str, tuple[Weaken, dict[str, str]]] = {
    "no seccomp": (
        lambda config: config["linux"].pop("seccomp", None),
        {"container": "confinement.seccomp attacks.sockets attacks.system-calls"},
    ),
    "all files of the kernel": (_show_everything, {"container": "confinement.kernel-facts"}),
    "all options of sockets": (
        _allow_call("setsockopt"),
        {"container": "hoard.filters hoard.groups"},
    ),
    "all sockets": (_allow_call("socket"), {"container": "attacks.sockets attacks.protocols"}),
    "all words for descriptors": (_allow_call("fcntl"), {"container": "maze.leases"}),
    "all words for devices": (_allow_call("ioctl"), {"container": "attacks.line-disciplines"}),
    "filters of calls": (_allow_call("seccomp"), {"container": "hoard.filters"}),
    "new privileges": (_privileges, {"container": "confinement.no-new-privileges"}),
    "more rights to gain": (_more_rights, {"container": "confinement.no-capabilities"}),
    "host network": (
        _drop_namespace("network"),
        {"container": "confinement.network host.namespaces host.out-of-sight"},
    ),
    "host ipc": (_drop_namespace("ipc"), {"container": "host.namespaces host.out-of-sight"}),
    "host processes": (
        _drop_namespace("pid"),
        {"container": "confinement.processes host.namespaces"},
    ),
    "writable sys": (
        _mount("tmpfs", "/sys", "tmpfs", "mode=1777"),
        {"container": "attacks.kernel-files", "gvisor": "attacks.kernel-files"},
    ),
    "setuid mounts": (
        _mount("tmpfs", "/var/tmp", "tmpfs", "mode=1777", "suid", "dev"),
        {"container": "confinement.mount-flags"},
    ),
    "host files": (
        _mount("bind", "/var/lib", "/var/lib", "rbind", "ro"),
        {"container": "confinement.no-host-files", "gvisor": "confinement.no-host-files"},
    ),
    "host tmp": (
        _mount("bind", "/tmp", "/tmp", "rbind", "rw"),
        {"container": "host.out-of-sight"},
    ),
    "extra place": (
        _mount("tmpfs", "/mnt", "tmpfs", "mode=1777", "nosuid", "nodev"),
        {"container": "confinement.writable-places", "gvisor": "confinement.writable-places"},
    ),
}
CASES = [
    pytest.param(runtime, weaken, ids.split(), id=f"{runtime} {name}")
    for name, (weaken, where) in WEAKER.items()
    for runtime, ids in where.items()
]


@pytest.fixture(scope="module")
async def host() -> AsyncGenerator[Host]:
    async with conformance_host.own_host() as host:
        yield host


async def _runtime(host: Host, name: str) -> oci.OciRuntime:
    known = Runtimes(host)
    found = {item.runtime: item for item in await known.support()}[name]
    if not found.usable:
        pytest.skip(f"{name} does not work here: {found.detail}")
    runtime = known.all[name]
    assert isinstance(runtime, oci.OciRuntime)
    return runtime


async def _failed(host: Host, runtime: oci.OciRuntime, ids: list[str]) -> list[str]:
    """Which of these behaviours a runtime fails."""
    folders = (host.settings.data_dir, host.settings.run_dir)
    found = await conformance.run(runtime, ids, folders=folders)
    return [item.behaviour.id for item in found if item.verdict is conformance.Verdict.FAIL]


@pytest.mark.parametrize(("name", "weaken", "ids"), CASES)
async def test_a_weaker_sandbox_fails_the_checks_of_what_it_lacks(
    host: Host, monkeypatch: pytest.MonkeyPatch, name: str, weaken: Weaken, ids: list[str]
) -> None:
    runtime = await _runtime(host, name)
    make = bundle.make_config

    def make_weaker(*arguments: Any) -> Config:
        config = make(*arguments)
        weaken(config)
        return config

    monkeypatch.setattr(oci.bundle, "make_config", make_weaker)
    assert sorted(await _failed(host, runtime, ids)) == sorted(ids)


async def test_a_setuid_program_that_has_an_effect_is_caught(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await _runtime(host, "container")
    folder = Path(tempfile.mkdtemp(prefix="k8e-", dir="/tmp"))
    make = bundle.make_config

    def make_weaker(*arguments: Any) -> Config:
        config = make(*arguments)
        program = Path(shutil.copy("/usr/bin/id", folder / "setuid-id"))
        # The sandbox's root: the host's own is nobody in there, whose programs lend nothing.
        root = config["linux"]["uidMappings"][0]["hostID"]
        os.chown(program, root, root)
        program.chmod(0o4755)
        folder.chmod(0o755)
        _mount("bind", "/usr/local/bin", str(folder), "rbind", "ro")(config)
        _privileges(config)
        return config

    monkeypatch.setattr(oci.bundle, "make_config", make_weaker)
    try:
        (found,) = await conformance.run(runtime, ["confinement.no-new-privileges"])
    finally:
        shutil.rmtree(folder)
    assert found.verdict is conformance.Verdict.FAIL
    assert "/usr/local/bin/setuid-id" in found.reason


async def test_gvisor_on_the_hosts_network_stack_is_caught(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await _runtime(host, "gvisor")
    usual = GVisor.command

    def command(self: GVisor, *arguments: str, network: str = "") -> list[str]:
        argv = usual(self, *arguments, network=network)
        return ["--network=host" if word == "--network=none" else word for word in argv]

    def make_weaker(*arguments: Any) -> Config:
        config = make(*arguments)
        _drop_namespace("network")(config)
        return config

    make = bundle.make_config
    monkeypatch.setattr(oci.bundle, "make_config", make_weaker)
    monkeypatch.setattr(GVisor, "command", command)
    ids = ["confinement.network", "host.out-of-sight"]
    assert sorted(await _failed(host, runtime, ids)) == ids


@pytest.mark.timeout(240)  # what is not refused takes its time
async def test_a_router_that_forwards_everything_is_caught(host: Host) -> None:
    runtime = await _runtime(host, "container")
    ids = ["network.off", "network.private-addresses", "network.siblings", "names.known-address"]
    ids += ["policy.claimed"]
    folders = (host.settings.data_dir, host.settings.run_dir)
    async with conformance.staged(runtime, folders=folders) as stage:
        room = await stage.room()
        await asyncio.to_thread(_forward_everything, room)
        found = [await conformance.check(conformance.ALL[name], stage) for name in ids]
    kept = [item.behaviour.id for item in found if item.verdict is not conformance.Verdict.FAIL]
    assert kept == []


def _forward_everything(room: Room) -> None:
    def inside() -> None:
        nft = Nftables()
        try:
            for chain in ("arrive", "forward"):
                nft.run(f"insert rule {rules.TABLE} {chain} accept")
        finally:
            nft.close()

    namespaces.run_in(room.scene.router, inside)
