"""A place whose data folder is on a small disk of its own, which sandboxes can fill."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from k8e.runtimes import mounts
from tests.places import OPEN_FOLDER, PROBES, REAP_SECONDS, Place

MIB = 1 << 20


class DiskPlace(Place):
    """A gateway on a disk of ``size`` bytes, of which root has no share of its own."""

    def __init__(self, size: int, **environ: str) -> None:
        super().__init__(**environ)
        self.disk = self.folder / "disk.img"
        with self.disk.open("wb") as file:
            file.truncate(size)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self.disk))
        known = self.data / "probe.json"
        probe = known.read_bytes() if known.exists() else b""
        self.data.mkdir(mode=OPEN_FOLDER, exist_ok=True)
        _run("mount", "-o", "loop", str(self.disk), str(self.data))
        self.data.chmod(OPEN_FOLDER)
        if probe:
            (self.data / "probe.json").write_bytes(probe)

    @property
    def free(self) -> int:
        told = os.statvfs(self.data)
        return told.f_bfree * told.f_frsize

    def fill(self, leave: int = 0) -> Path:
        """Take the disk from outside of any sandbox, but for ``leave`` bytes; the file."""
        path = self.data / "hog"
        with path.open("ab", buffering=0) as file:
            size = self.free - leave
            while size > 0:
                try:
                    os.posix_fallocate(
                        file.fileno(), os.fstat(file.fileno()).st_size, min(size, MIB)
                    )
                except OSError:
                    break
                size -= MIB
            while not leave:  # the last blocks
                try:
                    file.write(bytes(4096))
                except OSError:
                    break
        return path

    def _left(self) -> list[str]:
        ours = f" {self.data} "
        return [item for item in super()._left() if not (item.startswith("mount") and ours in item)]

    def close(self) -> None:
        if self.answers() or self._left():
            self.cli("gateway", "stop", "--destroy")
        PROBES.take(self.data)
        deadline = time.monotonic() + REAP_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        mounts.unmount(self.data)  # also while somebody still looks at it
        if not left:
            shutil.rmtree(self.folder)
        assert not left, "\n".join(left)


def _run(*argv: str) -> None:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    subprocess.run(argv, check=True, capture_output=True, timeout=60, env={"PATH": path})
