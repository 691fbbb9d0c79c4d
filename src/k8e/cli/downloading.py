"""Copies files of a sandbox to a local folder. Everything that a sandbox says is hostile.

A copied tree stays below its target: names are checked, folders are entered one by one and never
through a link, files take the place of links instead of being written through them, and links are
made last, only if they cannot lead out.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Generator, Iterable
from pathlib import Path

from k8e import errors
from k8e.cli import fast
from k8e.cli.progress import Report
from k8e.client.blocking import SandboxClient
from k8e.client.results import FileEntry

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_BYTES = 255
_WORKSPACE = "/workspace"

Parts = tuple[str, ...]


def receive(client: SandboxClient, session_id: str, path: str, target: str, report: Report) -> None:
    """Copy a file or folder to ``target``, or into it if that is a folder.

    Of ``PATH/.`` only the content is copied, without the folder itself.
    """
    whole = f"{_WORKSPACE}/{path}" if not path.startswith("/") else path
    top = whole.removesuffix("/.").rstrip("/") or "/"
    found = client.stat(session_id, top, follow=True)
    if found.type not in ("dir", "file"):
        raise errors.InvalidRequest(f"{path} is a {found.type[:20]}, which cannot be copied")
    base, under = _place(top, target, contents=whole.endswith("/."))
    if found.type == "file" and target.endswith("/") and len(under) == 1 and base != Path(target):
        raise errors.InvalidRequest(f"the local folder {target} does not exist", hint="make it")
    with _opened(base) as fd:
        tree = _Tree(client, session_id, fd, report)
        if found.type == "file":
            report.expect(found.size)
            tree.copy_file(under or (check_name(posixpath.basename(top)),), found)
            return
        entries = client.list_files(session_id, path=top, directories=True)
        report.expect(sum(entry.size for entry in entries if entry.type == "file"))
        tree.copy(top, entries, under=under, mode=found.mode)


def _place(top: str, target: str, *, contents: bool) -> tuple[Path, Parts]:
    """The local folder that must be there, and what is made in it."""
    local = Path(target)
    if not local.is_dir():
        return local.parent, (check_name(local.name),)
    name = posixpath.basename(top)
    return local, () if contents or name in ("", "..") else (check_name(name),)


@contextlib.contextmanager
def _opened(folder: Path) -> Generator[int]:
    """The local folder that the user named, which is followed wherever it leads."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the local folder {folder} cannot be used: {error.strerror}", hint="check the path"
        ) from None
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _local(name: str) -> Generator[None]:
    """What fails in here is about a local file, and not the sandbox's."""
    try:
        yield
    except OSError as error:
        raise errors.InvalidRequest(
            f"the local file {name!r} cannot be written: {error.strerror}",
            hint="check the target: its permissions, what it is, and the room on its disk",
        ) from None


def check_name(name: str) -> str:
    """``name`` if it can only be something in its folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise errors.GuestFailed(f"the sandbox names a file {name[:80]!r}")
    if len(os.fsencode(name)) > _NAME_BYTES:
        raise errors.GuestFailed("the sandbox names a file with too long a name")
    return name


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


class _Tree:
    """Makes a tree below a folder that is held open."""

    def __init__(self, client: SandboxClient, session_id: str, top: int, report: Report) -> None:
        self._client = client
        self._session_id = session_id
        self._top = top
        self._report = report
        self._mask = os.umask(0o077)
        os.umask(self._mask)

    def copy(self, top: str, entries: Iterable[FileEntry], *, under: Parts, mode: int) -> None:
        """Make the folder ``under`` with everything that is listed below ``top``."""
        folders: list[tuple[Parts, int]] = []
        links: list[tuple[Parts, FileEntry]] = []
        if under:
            self._make_folder(under)
            folders.append((under, mode))
        for entry in entries:
            parts = relative_parts(top, entry.path)
            if entry.type == "dir":
                self._make_folder(under + parts)
                folders.append((under + parts, entry.mode))
            elif entry.type == "file":
                self.copy_file(under + parts, entry)
            elif entry.type == "link":
                links.append((parts, entry))
            else:
                self._report.skip(entry.path, f"it is a {entry.type[:20]}")
        for parts, entry in links:
            self._make_link(under, parts, entry)
        for parts, folder_mode in reversed(folders):
            with self._folder(parts) as fd:
                os.fchmod(fd, (folder_mode & 0o777 | 0o700) & ~self._mask)

    @contextlib.contextmanager
    def _folder(self, parts: Parts) -> Generator[int]:
        """A folder of the tree, entered step by step, never through a link."""
        fd = os.dup(self._top)
        try:
            for part in parts:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=fd)
                except OSError as error:
                    name = "/".join(parts)
                    raise errors.InvalidRequest(
                        f"{name[:400]!r} cannot be entered below the target: {error.strerror}",
                        hint="copy to a folder without links or files of these names",
                    ) from None
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _make_folder(self, parts: Parts) -> None:
        with self._folder(parts[:-1]) as fd, contextlib.suppress(FileExistsError):
            os.mkdir(parts[-1], 0o700, dir_fd=fd)
        with self._folder(parts):
            self._report.folders += 1

    def copy_file(self, parts: Parts, entry: FileEntry) -> None:
        """Copy a file, which appears whole or not at all; one that cannot be read is told."""
        with self._folder(parts[:-1]) as fd:
            try:
                self._copy_file(fd, parts[-1], entry)
                self._report.files += 1
            except (FileNotFoundError, PermissionError) as error:
                self._report.skip(entry.path, str(error.strerror), failed=True)

    def _copy_file(self, folder: int, name: str, entry: FileEntry) -> None:
        scratch = f".k8e-{os.urandom(8).hex()}"
        with _local(name):
            fd = os.open(scratch, _NEW, 0o600, dir_fd=folder)
        try:
            try:
                chunks = self._client.read_chunks(self._session_id, entry.path)
                for chunk in self._report.counted(chunks):
                    with _local(name):
                        fast.write(fd, chunk)
                with _local(name):
                    os.fchmod(fd, entry.mode & 0o777 & ~self._mask)
            finally:
                os.close(fd)
            with _local(name):
                os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch, dir_fd=folder)
            raise

    def _make_link(self, under: Parts, parts: Parts, entry: FileEntry) -> None:
        try:
            target = self._client.stat(self._session_id, entry.path).target
        except OSError as error:
            self._report.skip(entry.path, str(error.strerror), failed=True)
            return
        if not stays_inside(parts, target):
            self._report.skip(entry.path, "the link leads out of what is copied")
            return
        scratch = f".k8e-{os.urandom(8).hex()}"
        with self._folder(under + parts[:-1]) as fd:
            os.symlink(target, scratch, dir_fd=fd)
            try:
                os.rename(scratch, parts[-1], src_dir_fd=fd, dst_dir_fd=fd)
                self._report.links += 1
            except OSError as error:
                os.unlink(scratch, dir_fd=fd)
                self._report.skip(entry.path, str(error.strerror), failed=True)
