"""A mount namespace in which k8e's usual folders belong to a test.

``apart.py make FOLDER`` makes it, says "ready" and keeps it until its input ends: FOLDER/d is
/var/lib/k8e there, FOLDER/r is /run/k8e. ``apart.py enter PID COMMAND …`` runs a command in it.
The machine's own folders are neither seen nor changed. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWNS, MNT_DETACH = 0x20000, 2
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
FOLDERS = {"d": Path("/var/lib/k8e"), "r": Path("/run/k8e")}

_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = (source.encode(), bytes(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(_libc.mount(*words), f"mounting {target}")


def let_go() -> None:
    """Give up our copies of the machine's own mounts.

    A copy of a disk keeps the disk of somebody else's session; one of a network, below a folder
    that is ours from now on, would be taken for ours.
    """
    for line in reversed(Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()):
        path = Path(line.split()[4])
        if " /dev/loop" in line or any(usual in path.parents for usual in FOLDERS.values()):
            _libc.umount2(bytes(path), MNT_DETACH)


def make(folder: Path) -> None:
    check(_libc.unshare(CLONE_NEWNS), "unshare")
    mount("", Path("/"), flags=MS_REC | MS_PRIVATE)
    let_go()
    for name, usual in FOLDERS.items():
        (folder / name).mkdir(mode=0o711, exist_ok=True)
        if not usual.is_dir():
            # In a layer of our own over the folder around it: the machine's stays as it is.
            upper, work = folder / f"{name}-upper", folder / f"{name}-work"
            upper.mkdir()
            work.mkdir()
            layers = f"lowerdir={usual.parent},upperdir={upper},workdir={work}"
            mount("overlay", usual.parent, "overlay", data=layers)
            usual.mkdir()
        mount(str(folder / name), usual, flags=MS_BIND)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


def enter(pid: str, command: list[str]) -> None:
    here = Path.cwd()
    with open(f"/proc/{pid}/ns/mnt", "rb") as file:
        check(_libc.setns(file.fileno(), CLONE_NEWNS), "setns")
    os.chdir(here)
    os.execvp(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        enter(sys.argv[2], sys.argv[3:])
