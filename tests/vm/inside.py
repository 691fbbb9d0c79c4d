"""Runs in the virtual machine: tries the runtimes there and writes one JSON object per line.

``run.py`` starts it as root on the VM itself (``host``), and as in a container that has a cgroup
namespace of its own (``nested``); as a user who was given a cgroup (``user``), and as one who was
not (``poor``). More arguments choose runtimes and behaviours; none means all.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from k8e import conformance, rootless, settings
from k8e.conformance import Stage
from k8e.model import MIB
from k8e.runtimes import bundle, cgroups
from k8e.runtimes.base import Support
from k8e.runtimes.host import Host
from k8e.runtimes.oci import OciRuntime
from k8e.runtimes.registry import Runtimes

SCENARIO, *WORDS = sys.argv[1:]
# Those that depend on cgroups and mounts; the others do not care where they run.
BEHAVIOURS = {
    "host": (
        "limits.cpu limits.memory limits.memory-alone limits.memory-together limits.memory-files "
        "limits.pids limits.threads limits.disk bounds.places bounds.pids-told "
        "bounds.memory-told life.destroy life.death-noticed life.purge "
        "life.adopt share.files share.child-ends-alone pause.stands-still pause.no-cpu "
        "pause.destroy pause.purge pause.adopt"
    ).split(),
    "nested": ["life.destroy"],
    "user": (
        "limits.cpu limits.memory limits.memory-together limits.pids limits.disk "
        "bounds.memory-told settle.less pause.stands-still pause.destroy life.destroy"
    ).split(),
    "poor": ["limits.disk", "life.destroy"],
}[SCENARIO]
# The others need no cgroup there, and each sandbox takes a minute to start.
GVISOR = {
    "user": "limits.cpu limits.memory limits.memory-together limits.pids life.destroy".split(),
    "poor": [],
}
PATIENCE = float(os.environ["K8E_VM_PATIENCE"])
WAITS = re.compile(r"PATIENCE|[A-Z]+_SECONDS")


def say(kind: str, name: str, verdict: str, detail: str = "", **more: Any) -> None:
    line = {"kind": kind, "name": f"{SCENARIO}: {name}", "verdict": verdict, "detail": detail}
    sys.stdout.write(json.dumps({**line, **more}) + "\n")
    sys.stdout.flush()


def be_patient() -> None:
    """Lengthen every time-out: an emulated CPU is 10 to 30 times slower."""
    for module in [sys.modules[name] for name in list(sys.modules) if name.startswith("k8e.")]:
        for name, value in list(vars(module).items()):
            if WAITS.fullmatch(name) and isinstance(value, int | float):
                setattr(module, name, value * PATIENCE)


def tell_host() -> None:
    """What kind of machine this is; fails where anything of cgroup v1 is mounted."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    kinds = [f"{words[1]} ({words[2]})" for words in mounts if words[2].startswith("cgroup")]
    pure = kinds == [f"{cgroups.ROOT} (cgroup2)"] and cgroups.is_unified()
    controllers = (cgroups.ROOT / "cgroup.controllers").read_text().split()
    detail = f"Linux {os.uname().release}; {', '.join(kinds)}; controllers {' '.join(controllers)}"
    say("host", "cgroup v2 only", "pass" if pure else "fail", detail)


def tell_support(support: Support) -> None:
    say("probe", support.runtime, "pass" if support.usable else "fail", support.detail)
    for feature in support.features:
        verdict = "pass" if feature.usable else "not applicable"
        if feature.name.endswith(" limit") and feature.usable == (SCENARIO == "poor"):
            verdict = "fail"
        say("probe", f"{support.runtime}: {feature.name}", verdict, feature.detail)


def wanted(runtime: OciRuntime) -> dict[str, str]:
    """The files of a sandbox's cgroup for half a CPU, 96 MiB and 50 processes."""
    gvisor = runtime.name == "gvisor"
    memory = 96 * MIB + (bundle.GVISOR_OVERHEAD if gvisor else 0)
    return {
        "cpu.max": "50000 100000",
        "memory.max": str(memory),
        "memory.swap.max": "0",
        "pids.max": "4096" if gvisor else "51",
    }


async def compare_files(runtime: OciRuntime) -> None:
    """Whether the kernel was told each limit."""
    async with conformance.staged(runtime) as stage:
        sandbox = await stage.launch(cpus=0.5, memory=96 * MIB, pids=50)
        folder = cgroups.ROOT / cgroups.path_of(sandbox.guest.sandbox_id).lstrip("/")
        for name, expected in wanted(runtime).items():
            file = folder / name
            value = file.read_text().strip() if file.exists() else "no file"
            fits = value == expected
            detail = value if fits else f"{value} instead of {expected}"
            say("file", f"{runtime.name}: {name}", "pass" if fits else "fail", detail)


async def try_behaviours(runtime: OciRuntime, stage: Stage) -> None:
    known = GVISOR.get(SCENARIO, BEHAVIOURS) if runtime.name == "gvisor" else BEHAVIOURS
    chosen = [name for name in known if name in WORDS]
    if not {*WORDS} & {*BEHAVIOURS}:
        chosen = known
    for name in [name for name in chosen if runtime.name not in conformance.ALL[name].gaps]:
        result = await conformance.check(conformance.ALL[name], stage)
        seconds = round(result.seconds, 1)
        label = f"{runtime.name}: {name}"
        say("behaviour", label, result.verdict.value, result.reason, seconds=seconds)


async def main() -> None:
    tell_host()
    config = settings.load()
    folders = (config.run_dir, config.data_dir)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    host = Host(config)
    host.prepare()
    runtimes = Runtimes(host)
    for support in await runtimes.support(fresh=True):
        tell_support(support)
    chosen = [name for name in runtimes.all if name in WORDS]
    for name in chosen or runtimes.all:
        runtime = runtimes.all[name]
        if not isinstance(runtime, OciRuntime):
            raise TypeError(f"{name} is no runtime of OCI bundles")
        if any(support.usable for support in await runtimes.support() if support.runtime == name):
            if SCENARIO != "poor":
                await compare_files(runtime)
            async with conformance.staged(runtime, folders=folders) as stage:
                await try_behaviours(runtime, stage)
    cgroups.remove_parent()
    left = (cgroups.root() / cgroups.PARENT).exists()
    say("host", "no cgroup is left", "fail" if left else "pass", str(cgroups.root()))


if __name__ == "__main__":
    began = time.monotonic()
    be_patient()
    try:
        if os.geteuid() != 0:
            rootless.enter(settings.load().run_dir, detach=False)
        asyncio.run(main())
    except BaseException as error:
        say("end", "came to its end", "fail", f"{type(error).__name__}: {error}")
        raise
    say("end", "came to its end", "pass", f"{time.monotonic() - began:.0f} s")
