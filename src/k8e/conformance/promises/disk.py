"""The disk that all workspaces share: one sandbox that fills it takes nothing from the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

from k8e import rootless
from k8e.client.blocking import SandboxClient
from k8e.conformance.behaviour import NotApplicable, behaviour, equal, expect
from k8e.conformance.lab.gateways import GatewayHome
from k8e.conformance.stage import Stage
from k8e.model import MIB
from k8e.runtimes import mounts

SIZE = 512 * MIB  # less than the usual limit of one session
KEPT = 64 * MIB
RESERVE = 16 * MIB
_FILL = """
import os, time
block, refused = os.urandom(1 << 20), 0
with open("/workspace/all", "wb", buffering=0) as file:
    while refused < 5:
        try:
            file.write(block)
            refused = 0
        except OSError as error:
            assert error.errno == 28, error
            refused += 1
            time.sleep(0.2)
    os.fsync(file.fileno())
"""
_WRITE = """
import os
for number in range(40):
    with open("/workspace/mine", "ab") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
"""


@behaviour("hoard.shared-disk")
async def shared_disk(stage: Stage) -> None:
    """A sandbox that fills the gateway's disk leaves others room, and the gateway in charge."""
    if os.geteuid() != 0 or rootless.inside():
        raise NotApplicable("without root, workspaces are in memory")
    probe = stage.folders[0] / "probe.json" if stage.folders else None
    await asyncio.to_thread(_fill, stage.runtime.name, probe)


def _fill(runtime: str, probe: Path | None) -> None:
    with _small_disk(probe) as place, SandboxClient(place.endpoint) as client:
        place.json("sandbox", "api-key", "create", "former")
        hog, other = (client.create_session(runtime, ("none",)) for _ in range(2))
        filled = client.run(_FILL, language="python", session_id=hog, timeout=120)
        equal(filled.exit_code, 0, f"filling the disk: {filled.stderr[-300:]}")
        told = client.exec(hog, ["sh", "-c", "head -c 400M /dev/zero > /workspace/more"])
        expect("nearly full" in str(told.limits), f"what the hog is told: {told.limits}")
        free = os.statvfs(place.data)
        expect(free.f_bavail * free.f_frsize > KEPT // 2, "what is kept free was taken")
        written = client.run(_WRITE, language="python", session_id=other, timeout=120)
        equal(written.exit_code, 0, f"the neighbour's writes: {written.stderr[-300:]}")
        place.json("sandbox", "api-key", "delete", "former")
        client.update_allowed_hosts(other, ["none"])
        client.destroy_session(hog)
        again = client.exec(other, ["sh", "-c", "head -c 80M /dev/zero > /workspace/more"])
        equal(again.exit_code, 0, "the neighbour's writes when there is room again")
        expect(client.verify_audit()["ok"], "the audit trail has a gap")


@contextlib.contextmanager
def _small_disk(probe: Path | None) -> Generator[GatewayHome]:
    """A gateway whose data folder is on a disk of its own."""
    place = GatewayHome(
        probe=probe, K8E_MIN_FREE_DISK=str(KEPT), K8E_DISK_RESERVE=str(RESERVE), K8E_LISTEN="none"
    )
    image = place.folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(SIZE)
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    argv = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60, env={"PATH": path})
    known = [(item.name, item.read_bytes()) for item in place.data.iterdir()]
    mounts.mount_image(image, place.data, 0)
    try:
        for name, content in known:
            (place.data / name).write_bytes(content)
        place.data.chmod(0o711)
        place.start()
        yield place
    finally:
        place.stop()
        mounts.unmount(place.data)
        left = place.close() if place.folder.exists() else []
        if left:
            shutil.rmtree(place.folder, ignore_errors=True)
        equal(left, [], "left of the gateway")
