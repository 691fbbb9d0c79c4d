"""Copies files of a sandbox to a local place. Everything that a sandbox says is hostile.

A copied tree stays below its target: names are checked, folders are entered one by one and never
through a link, files take the place of links instead of being written through them, and links are
made last, only if they cannot lead out.
"""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Iterable

from k8e import errors
from k8e.client import operations, requests
from k8e.client.results import FileEntry
from k8e.client.scripts import Ask, Do, Fetch, Script, Tally
from k8e.client.targets import Parts, Scratch, Target, check_name, open_target

WORKSPACE = "/workspace"


def download(session_id: str, path: str, target: str, tally: Tally) -> Script[None]:
    """Make ``target`` a copy of ``path``, a file or folder; a folder that is there is added to."""
    top = whole_path(path)
    call = requests.file_call("stat", session_id, top, follow=True)
    found: FileEntry = yield Ask(operations.stat(call))
    if found.type not in ("dir", "file"):
        raise errors.InvalidRequest(f"{path} is a {found.type[:20]}, which cannot be copied")
    place: Target = yield Do(functools.partial(open_target, target))
    try:
        copy = _Copy(session_id, place, tally)
        if found.type == "file":
            tally.total = found.size
            yield from copy.copy_file((), FileEntry(top, "file", found.size, found.mode, 0))
        else:
            call = requests.list_call(session_id, top, 0, None)
            entries: list[FileEntry] = yield Ask(operations.listing(call))
            tally.total = sum(entry.size for entry in entries if entry.type == "file")
            yield from copy.copy_tree(top, entries, found.mode)
    finally:
        place.close()


def whole_path(path: str) -> str:
    """A path as a sandbox lists what is below it; ``PATH/.`` is the same as ``PATH``."""
    whole = path if path.startswith("/") else f"{WORKSPACE}/{path}"
    if whole == f"{WORKSPACE}/.":
        return WORKSPACE
    return whole.removesuffix("/.").rstrip("/") or "/"


def relative_parts(top: str, path: str) -> Parts:
    """Where an entry belongs below the target."""
    start = top.rstrip("/") + "/"
    if not path.startswith(start):
        raise errors.GuestFailed(f"the sandbox lists {path[:80]!r}, which was not asked for")
    return tuple(check_name(part) for part in path[len(start) :].split("/"))


def stays_inside(parts: Parts, target: str) -> bool:
    """Whether a link at ``parts`` can lead only to what is in the tree.

    ``..`` may come first, as often as there are folders above; later it could climb out of
    wherever another link has led.
    """
    steps = target.split("/")
    ups = 0
    while ups < len(steps) and steps[ups] in ("..", "."):
        ups += 1
    climbed = steps[:ups].count("..")
    return (
        bool(target)
        and not target.startswith("/")
        and "\0" not in target
        and climbed < len(parts)
        and ".." not in steps[ups:]
    )


class _Copy:
    """One copy under way."""

    def __init__(self, session_id: str, target: Target, tally: Tally) -> None:
        self._session_id = session_id
        self._target = target
        self._tally = tally

    def copy_tree(self, top: str, entries: Iterable[FileEntry], mode: int) -> Script[None]:
        """Make everything that is listed below ``top``."""
        links: list[tuple[Parts, FileEntry]] = []
        is_new = yield from self._make_folder(())
        folders: list[tuple[Parts, int]] = [((), mode)] if is_new else []
        for entry in entries:
            parts = relative_parts(top, entry.path)
            if entry.type == "dir":
                yield from self._make_folder(parts)
                folders.append((parts, entry.mode))
            elif entry.type == "file":
                yield from self._try_file(parts, entry)
            elif entry.type == "link":
                links.append((parts, entry))
            else:
                self._tally.skip(entry.path, f"it is a {entry.type[:20]}")
        for parts, entry in links:
            yield from self._copy_link(parts, entry)
        for parts, folder_mode in reversed(folders):
            yield Do(functools.partial(self._target.set_mode, parts, folder_mode))

    def _make_folder(self, parts: Parts) -> Script[bool]:
        is_new: bool = yield Do(functools.partial(self._target.make_folder, parts))
        self._tally.copied.folders += 1
        return is_new

    def _try_file(self, parts: Parts, entry: FileEntry) -> Script[None]:
        try:
            yield from self.copy_file(parts, entry)
        except (FileNotFoundError, PermissionError) as error:
            self._tally.fail(entry.path, error)

    def copy_file(self, parts: Parts, entry: FileEntry) -> Script[None]:
        """Copy a file, which appears whole or not at all."""
        scratch: Scratch = yield Do(functools.partial(self._target.begin_file, parts))
        try:
            call = requests.file_call("read", self._session_id, entry.path)
            yield Fetch(operations.read(call, self._tally.part()), scratch.write)
            yield Do(functools.partial(scratch.finish, entry.mode))
        except BaseException:
            scratch.discard()
            raise
        self._tally.copied.files += 1

    def _copy_link(self, parts: Parts, entry: FileEntry) -> Script[None]:
        try:
            call = requests.file_call("stat", self._session_id, entry.path)
            points_to = (yield Ask(operations.stat(call))).target
            if not stays_inside(parts, points_to):
                self._tally.skip(entry.path, "the link leads out of what is copied")
                return
            yield Do(functools.partial(self._target.make_link, parts, points_to))
        except OSError as error:
            self._tally.fail(entry.path, error)
            return
        self._tally.copied.links += 1


def base_name(path: str) -> str:
    """What a copy of ``path`` is called in a folder; empty if that is not clear."""
    name = posixpath.basename(whole_path(path))
    return "" if name in ("", "..") else check_name(name)
