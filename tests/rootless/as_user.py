"""as_user.py ETC NETWORK UID COMMAND …: runs a command as a user that only it knows of.

Files in the folder ETC stand in for those of the same names in /etc, and a device for tunnels is
open to everybody, in a mount namespace of the command's own: the machine keeps its users. NETWORK
is the path of a network namespace; ``-`` means the one that there is. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWNET, MNT_DETACH = 0x20000, 0x40000000, 2
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
TUN = Path("/dev/net/tun")

_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = (source.encode(), bytes(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(_libc.mount(*words), f"mounting {target}")


def open_way(to: Path) -> None:
    """Let everybody pass to a folder: those on the way that are closed are covered by open ones."""
    closed = [path for path in to.parents if not path.stat().st_mode & stat.S_IXOTH]
    if closed:
        fd = os.open(to, os.O_PATH | os.O_DIRECTORY)
        mount("way", closed[-1], "tmpfs", data="mode=755")
        to.mkdir(parents=True)
        mount(f"/proc/self/fd/{fd}", to, flags=MS_BIND)
        os.close(fd)


def let_disks_go() -> None:
    """Give up our copies of mounted disks: a copy keeps the disk of somebody else's session."""
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
        if " /dev/loop" in line:
            _libc.umount2(line.split()[4].encode(), MNT_DETACH)


def main() -> None:
    etc, network, uid, *command = sys.argv[1:]
    check(_libc.unshare(CLONE_NEWNS), "unshare")
    mount("", Path("/"), flags=MS_REC | MS_PRIVATE)
    let_disks_go()
    for file in Path(etc).iterdir():
        if file.name != "tun":
            mount(str(file), Path("/etc", file.name), flags=MS_BIND)
    if TUN.exists():
        tun = Path(etc, "tun")
        if not tun.exists():
            os.mknod(tun, 0o666 | stat.S_IFCHR, TUN.stat().st_rdev)
            tun.chmod(0o666)
        mount(str(tun), TUN, flags=MS_BIND)
    open_way(Path(__file__).resolve().parents[2])
    if network != "-":
        with open(network, "rb") as file:
            check(_libc.setns(file.fileno(), CLONE_NEWNET), "setns")
    number = int(uid)
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
