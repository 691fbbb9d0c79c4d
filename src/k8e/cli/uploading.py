"""Copies local files into a sandbox. Links are copied as links, never followed."""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from k8e import errors
from k8e.cli.progress import Report
from k8e.client.blocking import SandboxClient
from k8e.client.results import FileEntry
from k8e.guest import wire


class Item(NamedTuple):
    """Something local to be copied."""

    local: str
    relative: str
    info: os.stat_result


def send(client: SandboxClient, session_id: str, source: str, path: str, report: Report) -> None:
    """Copy ``source``, a file or folder, to ``path``, or into it if that is a folder."""
    with _local():
        info = Path(source).stat()
    folder = stat.S_ISDIR(info.st_mode)
    contents = folder and (source == "." or source.endswith(("/.", "/..")) or source == "..")
    there = _stat(client, session_id, path)
    if there is None and path.endswith("/"):
        client.mkdir(session_id, path)
    into = path.endswith("/") or (there is not None and there.type == "dir")
    if into and not contents:
        path = posixpath.join(path, Path(source).name)
    sender = _Sender(client, session_id, report)
    if folder:
        sender.send_tree(source, path, keep_top=not (into and contents))
    else:
        report.expect(info.st_size)
        sender.send_file(Item(source, source, info), path)


def _stat(client: SandboxClient, session_id: str, path: str) -> FileEntry | None:
    try:
        return client.stat(session_id, path, follow=True)
    except (FileNotFoundError, NotADirectoryError):
        return None


class _Sender:
    def __init__(self, client: SandboxClient, session_id: str, report: Report) -> None:
        self._client = client
        self._session_id = session_id
        self._report = report

    def send_tree(self, top: str, path: str, *, keep_top: bool) -> None:
        """Copy a folder's content, then the permissions of folders: they may forbid writing."""
        with _local():
            items = list(_walk(top))
            info = Path(top).stat()
        self._report.expect(sum(item.info.st_size for item in items if _is_file(item)))
        self._client.mkdir(self._session_id, path)
        self._report.folders += 1
        folders = [(path, info)] if keep_top else []
        for item in items:
            target = posixpath.join(path, item.relative)
            if stat.S_ISDIR(item.info.st_mode):
                self._client.mkdir(self._session_id, target)
                self._report.folders += 1
                folders.append((target, item.info))
            else:
                self._send(item, target)
        for folder, found in reversed(folders):
            with contextlib.suppress(PermissionError):  # a folder that was there and is not ours
                self._client.chmod(self._session_id, folder, stat.S_IMODE(found.st_mode) & 0o777)

    def _send(self, item: Item, target: str) -> None:
        if stat.S_ISLNK(item.info.st_mode):
            with _local():
                points_to = os.readlink(item.local)  # noqa: PTH115 - a Path changes it
            self._client.symlink(self._session_id, target, points_to)
            self._report.links += 1
        elif _is_file(item):
            self.send_file(item, target)
        else:
            self._report.skip(item.local, "it is neither a file nor a folder nor a link")

    def send_file(self, item: Item, target: str) -> None:
        if not _is_file(item):
            self._report.skip(item.local, "it is neither a file nor a folder", failed=True)
            return
        mode = stat.S_IMODE(item.info.st_mode) & 0o777
        content = self._report.counted(_read(item.local))
        self._client.write_file(self._session_id, target, content, mode=mode)
        self._report.files += 1


def _is_file(item: Item) -> bool:
    return stat.S_ISREG(item.info.st_mode)


def _walk(top: str) -> Iterator[Item]:
    """Everything below a folder; a folder comes before what is in it."""
    folders = [("", top)]
    while folders:
        above, folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda item: item.name):
                info = entry.stat(follow_symlinks=False)
                relative = f"{above}{entry.name}"
                yield Item(entry.path, relative, info)
                if stat.S_ISDIR(info.st_mode):
                    folders.append((f"{relative}/", entry.path))


def _read(path: str) -> Iterator[bytes]:
    with _local(), open(path, "rb") as file:
        while data := file.read(wire.CHUNK):
            yield data


@contextlib.contextmanager
def _local() -> Generator[None]:
    """What fails in here is about a local file, and not the sandbox's."""
    try:
        yield
    except OSError as error:
        name = os.fsdecode(error.filename or "")
        raise errors.InvalidRequest(
            f"the local file {name} cannot be read: {error.strerror}", hint="check the path"
        ) from None
