"""The default root file system: the host's ``/usr``, its locales and a small ``/etc``.

Nothing of ``/home``, ``/root``, ``/var`` or ``/opt`` is there, and of the host's ``/etc`` only what
programs in ``/usr`` cannot do without, none of which is secret.

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

from k8e.model import DNS_ADDRESS

MERGED = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
FOLDERS = (
    "dev proc sys/devices/system/cpu sys/fs/cgroup tmp home root workspace usr opt/k8e/tools "
    "var/tmp var/lib var/cache run/k8e/link run/k8e/slot run/k8e/guest mnt srv"
).split()
# Copied from the host: loader cache, alternatives (where Debian's /usr/bin links lead), locale,
# time zone, media types, trusted certificates, and run-time configuration of interpreters.
COPIED = (
    "ld.so.cache ld.so.conf ld.so.conf.d alternatives locale.alias mime.types services protocols "
    "localtime timezone ssl/certs ssl/openssl.cnf ca-certificates.conf debian_version magic "
    "python3 python3.11 nodejs java-17-openjdk terminfo bash.bashrc profile inputrc"
).split()
LINKS = {"run/k8e/token": "/dev/k8e-token"}
"""Links out of the root file system, which is read-only, to what the guest writes."""
FILES = {
    "passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    "user:x:1000:1000:user:/home/user:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    # One try, since it is answered for certain: by egress, or by the kernel that nobody is there.
    "resolv.conf": f"nameserver {DNS_ADDRESS}\noptions timeout:10 attempts:1\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "shells": "/bin/sh\n/bin/bash\n",
    # Debian's matplotlib does not start without this file, and the host's asks for a display.
    "matplotlibrc": "backend: Agg\n",
}


def fingerprint() -> str:
    """Changes when the skeleton would come out differently."""
    digest = hashlib.sha256(repr((FOLDERS, COPIED, FILES, LINKS)).encode())
    for name in COPIED:
        path = Path("/etc", name)
        digest.update(f"{name} {path.stat().st_mtime_ns if path.exists() else 0}".encode())
    return digest.hexdigest()[:16]


def make_skeleton(folder: Path) -> Path:
    """The directory that holds everything of the root file system but ``/usr``; made once."""
    target = folder / f"host-{fingerprint()}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    scratch = folder / f"host.{os.getpid()}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    for name in FOLDERS:
        (scratch / name).mkdir(parents=True)
    for name, target_path in LINKS.items():
        (scratch / name).symlink_to(target_path)
    for name in MERGED:
        link = Path("/", name)
        if link.is_symlink():
            (scratch / name).symlink_to(link.readlink())
        elif link.is_dir():
            (scratch / name).mkdir()
    _fill_etc(scratch / "etc")
    open_up(scratch)
    scratch.rename(target)
    return target


def bound_folders() -> list[str]:
    """The host's folders, read-only: ``/usr`` and the top folders that are not links into it."""
    return [
        "/usr",
        *(
            f"/{name}"
            for name in MERGED
            if Path("/", name).is_dir() and not Path("/", name).is_symlink()
        ),
    ]


def _fill_etc(etc: Path) -> None:
    etc.mkdir()
    for name in COPIED:
        source, target = Path("/etc", name), etc / name
        if not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=_unreadable)
        else:
            shutil.copy(source, target)
    for name, text in FILES.items():
        (etc / name).write_text(text, "ascii")
    (etc / "os-release").symlink_to("../usr/lib/os-release")
    (etc / "mtab").symlink_to("../proc/self/mounts")


def _unreadable(folder: str, names: list[str]) -> set[str]:
    """Skip what other users may not read: it was not meant for everybody."""
    paths = {name: Path(folder, name) for name in names}
    return {
        name
        for name, path in paths.items()
        if not path.is_symlink() and not path.stat().st_mode & 0o004
    }


def open_up(folder: Path) -> None:
    """World-readable, and writable for nobody but root (whatever the umask was)."""
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
    folder.chmod(0o755)


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
        open_up(made)
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
