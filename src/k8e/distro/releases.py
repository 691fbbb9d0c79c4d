"""Upstream's releases: fetched once, and used only with the checksum of our table."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from k8e import errors
from k8e.distro.component_store import architecture
from k8e.distro.components import Release

_SILENCE_SECONDS = 10.0  # after which a server is taken for dead
_CHUNK = 1 << 20
_MOST_BYTES = 2 << 30


def fetch_release(release: Release, made: Path, tell: Callable[[str], None]) -> None:
    """Fetch an archive or a program, and put its files into their places.

    Raises:
        OSError: it cannot be fetched; a build may do instead.
        ToolFailed: it has another checksum, or lacks a file: somebody has changed it.
    """
    url = release.url.format(arch=architecture())
    if not url.startswith(("https://", "http://")):
        raise errors.InvalidRequest(f"{url} is not the address of a release")
    archive = made / ".release"
    try:
        found = _download(url, archive, tell)
        wanted = release.sha256[architecture()]
        if found != wanted:
            raise errors.ToolFailed(
                f"{url} has the checksum {found}, not {wanted}; nothing of it is used",
                hint="it was changed on the way or at its source: k8e components build makes the "
                "component from its source",
            )
        _unpack(release, archive, made)
    finally:
        archive.unlink(missing_ok=True)


def _download(url: str, target: Path, tell: Callable[[str], None]) -> str:
    digest = hashlib.sha256()
    done = 0
    with (
        urllib.request.urlopen(url, timeout=_SILENCE_SECONDS) as answer,  # noqa: S310 - checked above
        target.open("wb") as file,
    ):
        while chunk := answer.read(_CHUNK):
            done += len(chunk)
            if done > _MOST_BYTES:
                raise errors.ToolFailed(f"{url} has more than {_MOST_BYTES} bytes")
            digest.update(chunk)
            file.write(chunk)
            tell(f"fetching the release: {done >> 20} MiB")
    return digest.hexdigest()


def _unpack(release: Release, archive: Path, made: Path) -> None:
    for file in release.members.values():
        (made / file).parent.mkdir(parents=True, exist_ok=True)
    if list(release.members) == [""]:
        shutil.copyfile(archive, made / release.members[""])
        (made / release.members[""]).chmod(0o755)
        return
    with tarfile.open(archive) as opened:
        for name, file in release.members.items():
            try:
                member = opened.extractfile(name)
            except KeyError:
                member = None
            if member is None:
                raise errors.ToolFailed(f"{release.url} has no file {name}")
            with member, (made / file).open("wb") as target:
                shutil.copyfileobj(member, target)
            (made / file).chmod(0o755)
