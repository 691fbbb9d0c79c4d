"""A place whose gateway belongs to a user who is not root, and whom the machine does not know."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from k8e.conformance.lab.ports import reserve
from k8e.rootless import holder
from tests.places import COMMAND, Place

# Whoever runs tests on this machine looks for what is left of a user of their own.
_OWN = next(number for number in range(1000) if reserve(f"user-{number}"))
UID = 54321 + 2 * _OWN  # the uid after it is that of a stranger
NAME = "k8e-test-user"
COUNT = 65536
FIRST = 1_000_000_000 + _OWN * COUNT
"""Ids that nobody else has: neither systemd nor useradd hands them out."""
PF_EXITING = 4
AS_USER = Path(__file__).with_name("as_user.py")


def missing() -> str:
    """Why nobody but root can have a gateway here; nothing if somebody can."""
    if os.geteuid() != 0:
        return "only root can be another user"
    for program in ("newuidmap", "newgidmap"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed (Debian's package uidmap)"
    for file in ("subuid", "subgid", "passwd"):
        if not Path("/etc", file).exists():
            return f"there is no /etc/{file}"
    return ""


class UserPlace(Place):
    """Where the gateway of a user can run."""

    def __init__(self, *, ids: bool = True, network: Path | None = None, **environ: str) -> None:
        super().__init__(**environ)
        etc = self.folder / "etc"
        etc.mkdir()
        user = f"{NAME}:x:{UID}:{UID}::{self.home}:/bin/sh\n"
        (etc / "passwd").write_text(Path("/etc/passwd").read_text("utf-8") + user, "utf-8")
        for name in ("subuid", "subgid"):
            (etc / name).write_text(f"{NAME}:{FIRST}:{COUNT}\n" if ids else "", "ascii")
        for folder in (self.folder, self.home):
            os.chown(folder, UID, UID)
        self.environ["K8E_HOME"] = os.environ.get("K8E_HOME", "/opt/k8e")
        # Each session warns of limits that nothing holds.
        self.environ["PYTHONWARNINGS"] = "error,default::RuntimeWarning"
        words = [sys.executable, str(AS_USER), str(etc), str(network or "-"), str(UID)]
        self.command = [*words, *COMMAND]

    def remember(self, probe: Path) -> None:
        """Use what was found out of this machine, or keep it for others: trying takes seconds."""
        own = self.data / "probe.json"
        source, target = (probe, own) if probe.exists() else (own, probe)
        if source.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
            for path in (self.data, own):
                os.chown(path, UID, UID)

    def holder(self) -> holder.Holder | None:
        return holder.find(self.run_dir)

    def _left(self) -> list[str]:
        found = super()._left()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                uid = folder.stat().st_uid
                ours = uid == UID or FIRST <= uid < FIRST + COUNT
                if ours and not is_ending(folder):
                    found.append(f"process {folder.name} of the user")
        return found


def is_ending(folder: Path) -> bool:
    """Whether a process has ended but for what the host's init, which may be slow, does for it."""
    fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return fields[1] == "1" and bool(int(fields[6]) & PF_EXITING)
