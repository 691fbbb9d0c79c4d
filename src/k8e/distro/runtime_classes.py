"""The runtimes that work on this machine: their stanzas for containerd and their RuntimeClasses.

Looked for at each start. A class without its handler would be a pod that never starts.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KVM = Path("/dev/kvm")
FIRECRACKER_FILES = Path("/var/lib/firecracker-containerd/runtime")
FIRECRACKER_POOL = Path("/dev/mapper/fc-dev-thinpool")

_GET_API_VERSION, _CREATE_VM, _GET_MMAP_SIZE = 0xAE00, 0xAE01, 0xAE04
_CREATE_VCPU, _RUN, _SET_MEMORY = 0xAE41, 0xAE80, 0x4020AE46
_GET_SREGS, _SET_SREGS, _SET_REGS = 0x8138AE83, 0x4138AE84, 0x4090AE82
_API_VERSION, _EXIT_HLT = 12, 5
_HLT = b"\xf4"

Find = Callable[[str], str | None]


@dataclass(frozen=True)
class Runtime:
    """A runtime that pods can ask for."""

    name: str
    """Of the RuntimeClass."""
    handler: str
    """Its name in containerd's configuration."""
    stanza: dict[str, Any]
    snapshotters: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    toleration: str = ""


@dataclass(frozen=True)
class Missing:
    """A runtime that this machine does not have, and why."""

    name: str
    why: str


def detect(find: Find = shutil.which) -> tuple[list[Runtime], list[Missing]]:
    """The runtimes that work here, and the reasons of the others."""
    found: list[Runtime] = []
    missing: list[Missing] = []
    for name, look in (("gvisor", _gvisor), ("kata", _kata), ("firecracker", _firecracker)):
        result = look(find)
        if isinstance(result, Runtime):
            found.append(result)
        else:
            missing.append(Missing(name, result))
    return found, missing


def _gvisor(find: Find) -> Runtime | str:
    runsc, shim = find("runsc"), find("containerd-shim-runsc-v1")
    if runsc is None or shim is None:
        return "no runsc" if runsc is None else "no containerd-shim-runsc-v1"
    return Runtime("gvisor", "runsc", {"runtime_type": "io.containerd.runsc.v1"})


def _kata(find: Find) -> Runtime | str:
    for shim, kind in (
        ("containerd-shim-kata-qemu-v2", "io.containerd.kata-qemu.v2"),
        ("containerd-shim-kata-v2", "io.containerd.kata.v2"),
    ):
        if find(shim) is not None:
            why = kvm_fault()
            return why or Runtime(
                "kata",
                "kata-qemu",
                {
                    "runtime_type": kind,
                    "privileged_without_host_devices": True,
                    "pod_annotations": ["io.katacontainers.*"],
                },
            )
    return "no containerd-shim-kata-qemu-v2 and no containerd-shim-kata-v2"


def _firecracker(find: Find) -> Runtime | str:
    if find("containerd-shim-aws-firecracker") is None:
        return "no containerd-shim-aws-firecracker"
    if not FIRECRACKER_FILES.is_dir() or not any(FIRECRACKER_FILES.iterdir()):
        return f"no kernel and root file system in {FIRECRACKER_FILES}"
    if not FIRECRACKER_POOL.exists():
        return f"no thin pool {FIRECRACKER_POOL} for the devmapper snapshotter"
    why = kvm_fault()
    pool = {"pool_name": FIRECRACKER_POOL.name, "base_image_size": "10GB"}
    return why or Runtime(
        "firecracker",
        "firecracker",
        {
            "runtime_type": "aws.firecracker",
            "snapshotter": "devmapper",
            "pod_annotations": ["aws.firecracker.*"],
        },
        snapshotters={"devmapper": pool},
        toleration="sandbox.k8e.io/kvm",
    )


def runtime_class(runtime: Runtime) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": runtime.name},
        "handler": runtime.handler,
    }
    if runtime.toleration:
        tolerated = {"key": runtime.toleration, "operator": "Exists", "effect": "NoSchedule"}
        wanted["scheduling"] = {"tolerations": [tolerated]}
    return wanted


# The processor's virtualization.


def kvm_fault(path: Path = KVM) -> str:
    """Why virtual machines do not work here; empty if one has run."""
    try:
        kvm = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        if fcntl.ioctl(kvm, _GET_API_VERSION, 0) != _API_VERSION:
            return f"{path} speaks another version of KVM"
        _run_one(kvm)
    except OSError as error:
        return f"{path} is there, but starts no virtual machine: {error.strerror or error}"
    finally:
        os.close(kvm)
    return ""


def _run_one(kvm: int) -> None:
    """Run a virtual machine with one processor; on x86-64 it executes one instruction."""
    machine = fcntl.ioctl(kvm, _CREATE_VM, 0)
    try:
        processor = fcntl.ioctl(machine, _CREATE_VCPU, 0)
        try:
            if platform.machine() == "x86_64":
                _halt(kvm, machine, processor)
        finally:
            os.close(processor)
    finally:
        os.close(machine)


def _halt(kvm: int, machine: int, processor: int) -> None:
    with (
        mmap.mmap(-1, mmap.PAGESIZE) as memory,
        mmap.mmap(processor, fcntl.ioctl(kvm, _GET_MMAP_SIZE, 0)) as run,
    ):
        memory[: len(_HLT)] = _HLT
        held = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(held)
        del held
        fcntl.ioctl(machine, _SET_MEMORY, struct.pack("=IIQQQ", 0, 0, 0, len(memory), address))
        sregs = bytearray(fcntl.ioctl(processor, _GET_SREGS, bytes(0x138)))
        struct.pack_into("=QIH", sregs, 0, 0, 0xFFFF, 0)  # code begins at address 0
        fcntl.ioctl(processor, _SET_SREGS, bytes(sregs))
        registers = struct.pack("=18Q", *([0] * 16), 0, 2)  # the last two: where, and flags
        fcntl.ioctl(processor, _SET_REGS, registers)
        fcntl.ioctl(processor, _RUN, 0)
        reason = struct.unpack_from("=I", run, 8)[0]
    if reason != _EXIT_HLT:
        raise OSError(f"its processor stopped for reason {reason}")
