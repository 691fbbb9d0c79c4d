"""The host's locales for sandboxes that have its ``/usr``, put together in one file.

A program that heeds LANG has the C library open thirteen small files, one for each part of a
locale. In gVisor that takes a third of the whole start of ``echo`` or ``bash``. The C library looks
for an archive first, which is one file; hosts that have one keep C.UTF-8, which sandboxes use,
beside it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path

from k8e.runtimes import rootfs

PLACE = Path("/usr/lib/locale")
OURS = "C.utf8"
"""The locale of LANG=C.UTF-8, as its folder is called."""
MOST_BYTES = 32 << 20
"""Of all locales of a host; with more, a copy is not worth its room."""
SECONDS = 30

log = logging.getLogger(__name__)


def archive(folder: Path, host: Path = PLACE) -> Path | None:
    """What a sandbox may see in the place of the host's locales, made below ``folder`` once.

    None where it cannot be made: then a sandbox has the host's own, and starts are slower.
    """
    try:
        digest = _digest(host)
        if not digest:
            return None
        target = folder / digest
        if not target.exists():
            _make(folder, target, host)
        return target
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("locales cannot be put together, so programs start slower: %s", error)
        return None


def _digest(host: Path) -> str:
    """Tells one state of the host's locales from another; nothing if they are of no use here."""
    if not (host / OURS).is_dir():
        return ""
    found: list[tuple[str, int, int]] = []
    for path in host.rglob("*"):
        info = path.stat()
        found.append((str(path), info.st_size, info.st_mtime_ns))
    if sum(size for _, size, _ in found) > MOST_BYTES:
        return ""
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16]


def _make(folder: Path, target: Path, host: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f"{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        made = scratch / PLACE.relative_to("/")
        shutil.copytree(host, made)
        subprocess.run(
            ["localedef", f"--prefix={scratch}", "--add-to-archive", str(host / OURS)],
            check=True,
            capture_output=True,
            timeout=SECONDS,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        # It says that all is well, also of what it has left out.
        if OURS.encode() + b"\0" not in (made / "locale-archive").read_bytes():
            raise OSError(f"localedef did not take {host / OURS}")
        rootfs.open_up(made)
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
