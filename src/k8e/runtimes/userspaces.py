"""User namespaces that belong to their sandbox's own uid.

The kernel counts what a user namespace takes (inotify instances and watches, among others) against
the uid that made it, up to a limit per uid. Namespaces that ``runc`` makes are all root's: one
sandbox could use up the whole host's share. So each is made by a uid of its sandbox's own range.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from pathlib import Path

from k8e.runtimes import mounts

SECONDS = 10.0
_HOLDER = ["unshare", "--user", "--", "cat"]
"""Makes the namespace and answers when it is there; it ends with its input."""


def make(path: Path, base: int, size: int) -> None:
    """A user namespace of ``size`` ids from ``base``, kept by a mount on ``path``."""
    path.touch()
    holder = subprocess.Popen(
        _HOLDER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        user=base,
        group=base,
        extra_groups=[],
    )
    try:
        _keep(holder, path, f"0 {base} {size}\n")
    finally:
        holder.kill()
        holder.wait()
        for stream in (holder.stdin, holder.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _keep(holder: subprocess.Popen[bytes], path: Path, ids: str) -> None:
    if holder.stdin is None or holder.stdout is None:
        raise OSError("the maker of a user namespace has no pipes")
    os.write(holder.stdin.fileno(), b"x")
    waiting = select.poll()
    waiting.register(holder.stdout, select.POLLIN)
    if not waiting.poll(SECONDS * 1000) or os.read(holder.stdout.fileno(), 1) != b"x":
        raise PermissionError("this host lets no other user make a user namespace")
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{holder.pid}/{name}").write_text(ids, "ascii")
    mounts.mount(f"/proc/{holder.pid}/ns/user", path, "", mounts.MS_BIND)
