"""Copies local files into a sandbox. Links below the top are copied as links, never followed."""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import stat
from collections.abc import Iterator
from typing import IO, NamedTuple

from k8e import errors
from k8e.client import operations, requests
from k8e.client.scripts import Ask, Do, Script, Tally


class Item(NamedTuple):
    """Something local to be copied."""

    local: str
    relative: str
    info: os.stat_result


def upload(session_id: str, source: str, path: str, tally: Tally) -> Script[None]:
    """Make ``path`` a copy of ``source``, a file or folder; a folder that is there is added to."""
    info: os.stat_result = yield Do(functools.partial(os.stat, source))
    if stat.S_ISDIR(info.st_mode):
        yield from _send_tree(session_id, Item(source, "", info), path, tally)
    elif stat.S_ISREG(info.st_mode):
        tally.total = info.st_size
        yield from _send_file(session_id, Item(source, "", info), path, tally)
    else:
        raise errors.InvalidRequest(
            f"{source} is neither a file nor a folder", hint="pass an open file instead of its name"
        )


def _send_tree(session_id: str, top: Item, path: str, tally: Tally) -> Script[None]:
    """Copy a folder's content, then the permissions of folders: they may forbid writing."""
    items: list[Item] = yield Do(lambda: list(_walk(top.local)))
    tally.total = sum(item.info.st_size for item in items if stat.S_ISREG(item.info.st_mode))
    folders = [] if (yield from _is_folder(session_id, path)) else [(path, top.info)]
    yield from _make_folder(session_id, path, tally)
    for item in items:
        target = posixpath.join(path, item.relative)
        if stat.S_ISDIR(item.info.st_mode):
            yield from _make_folder(session_id, target, tally)
            folders.append((target, item.info))
        elif stat.S_ISLNK(item.info.st_mode):
            points_to = yield Do(functools.partial(os.readlink, item.local))
            call = requests.file_call("symlink", session_id, target, target=points_to)
            yield Ask(operations.call(call))
            tally.copied.links += 1
        elif stat.S_ISREG(item.info.st_mode):
            yield from _send_file(session_id, item, target, tally)
        else:
            tally.skip(item.local, "it is neither a file nor a folder nor a link")
    for folder, info in reversed(folders):
        with contextlib.suppress(PermissionError):  # a folder that was there and is not ours
            call = requests.file_call("chmod", session_id, folder, mode=_mode(info))
            yield Ask(operations.call(call))


def _is_folder(session_id: str, path: str) -> Script[bool]:
    call = requests.file_call("stat", session_id, path, follow=True)
    try:
        return (yield Ask(operations.stat(call))).type == "dir"
    except (FileNotFoundError, NotADirectoryError):
        return False


def _make_folder(session_id: str, path: str, tally: Tally) -> Script[None]:
    yield Ask(operations.call(requests.file_call("mkdir", session_id, path, exist_ok=True)))
    tally.copied.folders += 1


def _send_file(session_id: str, item: Item, target: str, tally: Tally) -> Script[None]:
    file: IO[bytes] = yield Do(functools.partial(_open, item))
    try:
        call = requests.file_call("write", session_id, target, mode=_mode(item.info))
        yield Ask(operations.write(call, tally.part()), file)
    finally:
        file.close()
    tally.copied.files += 1


def _open(item: Item) -> IO[bytes]:
    # Only what the user named may be a link.
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_NOFOLLOW if item.relative else 0)
    return open(os.open(item.local, flags), "rb")


def _mode(info: os.stat_result) -> int:
    return stat.S_IMODE(info.st_mode) & 0o777


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
