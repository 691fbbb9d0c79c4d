"""Copies of folders between this machine and a sandbox. All data from a sandbox is hostile.

A copied tree stays below its target: names are checked, folders are entered one by one and never
through a link, files take the place of links instead of being written through them, and links are
made last, only if they cannot lead out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import stat
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from k8e import errors
from k8e.client import operations, requests
from k8e.client.operations import Ask, Do, Fetch, Script, Tally
from k8e.client.results import FileEntry


class Item(NamedTuple):
    """A local file, folder or link to be copied."""

    local: str
    relative: str
    info: os.stat_result


def upload(session_id: str, source: str | Path | BinaryIO, path: str, tally: Tally) -> Script[None]:
    """Make ``path`` a copy of ``source``, a file, a folder or an open binary file.

    A folder that is there is added to.
    """
    if not isinstance(source, (str, Path)):
        tally.total = requests.size_of(source)
        call = requests.file_call("write", session_id, path)
        yield Ask(operations.write(call, tally.part()), source)
        tally.copied.files += 1
        return
    source = os.fspath(source)
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
        with contextlib.suppress(PermissionError):  # a folder that existed and is not ours
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
    """Everything below a folder; a folder comes before its content."""
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


_POSIX = os.open in os.supports_dir_fd
if _POSIX:
    _FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    _NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_BYTES = 255

Parts = tuple[str, ...]


def check_name(name: str) -> str:
    """Return ``name`` if it can only be an entry of its folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise errors.GuestFailed(f"the sandbox names a file {name[:80]!r}")
    if len(os.fsencode(name)) > _NAME_BYTES:
        raise errors.GuestFailed("the sandbox names a file with too long a name")
    return name


class CopyTarget:
    """The target of a copy. Its parent folder must exist, and may be reached through links."""

    def __init__(self, path: str) -> None:
        if os.path.basename(path) in ("", ".", ".."):  # noqa: PTH119 - a Path drops the last slash
            path = os.path.realpath(path)
        above, name = os.path.split(path)
        self._top = os.open(above or ".", _FOLDER)
        self._under: Parts = (name,) if name else ()
        self._mask = _umask()

    def close(self) -> None:
        os.close(self._top)

    @contextlib.contextmanager
    def _folder(self, parts: Parts) -> Generator[int]:
        """A folder of the tree, entered step by step, never through a link."""
        fd = os.dup(self._top)
        try:
            for part in parts:
                try:
                    inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
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

    def make_folder(self, parts: Parts) -> bool:
        """Make a folder, unless it exists; return whether it was made."""
        whole, is_new = self._under + parts, False
        if whole:
            with self._folder(whole[:-1]) as fd, contextlib.suppress(FileExistsError):
                os.mkdir(whole[-1], 0o700, dir_fd=fd)
                is_new = True
        with self._folder(whole):
            return is_new

    def set_mode(self, parts: Parts, mode: int) -> None:
        with self._folder(self._under + parts) as fd:
            os.fchmod(fd, (mode & 0o777 | 0o700) & ~self._mask)

    def begin_file(self, parts: Parts) -> Scratch:
        """Begin a file that will replace an existing entry."""
        whole = self._under + parts
        if not whole:
            raise IsADirectoryError(21, "Is a directory")
        with self._folder(whole[:-1]) as fd:
            return Scratch(os.dup(fd), whole[-1], self._mask)

    def make_link(self, parts: Parts, points_to: str) -> None:
        """Make a link in place of a file or link of that name."""
        whole, scratch = self._under + parts, _scratch_name()
        with self._folder(whole[:-1]) as fd:
            os.symlink(points_to, scratch, dir_fd=fd)
            try:
                os.rename(scratch, whole[-1], src_dir_fd=fd, dst_dir_fd=fd)
            except OSError:
                os.unlink(scratch, dir_fd=fd)
                raise


class Scratch:
    """A file that is being written, beside its final place."""

    def __init__(self, folder: int, name: str, mask: int) -> None:
        self._folder = folder
        self._name = name
        self._mask = mask
        self._scratch = _scratch_name()
        try:
            fd = os.open(self._scratch, _NEW, 0o600, dir_fd=folder)
            self._file = open(fd, "wb")  # noqa: SIM115 - until finish or discard
        except BaseException:
            os.close(folder)
            raise

    def write(self, data: bytes) -> None:
        with _named(self._name):
            self._file.write(data)

    def finish(self, mode: int) -> None:
        with _named(self._name):
            os.fchmod(self._file.fileno(), mode & 0o777 & ~self._mask)
            self._file.close()
            os.rename(self._scratch, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.close(self._folder)
        self._folder = -1

    def discard(self) -> None:
        """Remove the unfinished file."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._folder >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._scratch, dir_fd=self._folder)
            os.close(self._folder)
            self._folder = -1


class PlainTarget(CopyTarget):
    """A target on systems that cannot hold folders open (Windows): one file, no folders."""

    def __init__(self, path: str) -> None:
        self._path = path

    def close(self) -> None:
        """Do nothing: this target holds no folder open."""

    def make_folder(self, parts: Parts) -> bool:
        raise errors.InvalidRequest(
            "copying folders out of a session safely needs a POSIX system",
            hint="copy its files one by one",
        )

    def begin_file(self, parts: Parts) -> Scratch:
        return PlainScratch(self._path)


class PlainScratch(Scratch):
    """A file that is being written, for a :class:`PlainTarget`."""

    def __init__(self, path: str) -> None:
        self._target = Path(path)
        self._name = self._target.name
        self._beside = self._target.with_name(_scratch_name())
        self._file = open(self._beside, "xb")  # noqa: SIM115 - until finish or discard

    def finish(self, mode: int) -> None:
        with _named(self._name):
            self._file.close()
            self._beside.replace(self._target)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
            self._beside.unlink(missing_ok=True)


def open_target(path: str) -> CopyTarget:
    """The target of a copy, by the best means of this system."""
    return CopyTarget(path) if _POSIX else PlainTarget(path)


@contextlib.contextmanager
def _named(name: str) -> Generator[None]:
    """Make errors name the final file, not the one that is being written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


def _scratch_name() -> str:
    return f".k8e-{os.urandom(8).hex()}"


def _umask() -> int:
    """The umask; only Linux shows it without a change that all threads would see."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


WORKSPACE = "/workspace"


def download(
    session_id: str, path: str, target: str | Path | BinaryIO, tally: Tally
) -> Script[None]:
    """Make ``target`` a copy of ``path``, a file or folder, or write a file to an open one.

    A folder that is there is added to.
    """
    if not isinstance(target, (str, Path)):
        call = requests.file_call("read", session_id, path)
        yield Fetch(operations.read(call, tally.part()), target.write)
        tally.copied.files += 1
        return
    top = whole_path(path)
    call = requests.file_call("stat", session_id, top, follow=True)
    found: FileEntry = yield Ask(operations.stat(call))
    if found.type not in ("dir", "file"):
        raise errors.InvalidRequest(f"{path} is a {found.type[:20]}, which cannot be copied")
    place: CopyTarget = yield Do(functools.partial(open_target, os.fspath(target)))
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
    """A path as a sandbox lists entries below it; ``PATH/.`` is the same as ``PATH``."""
    whole = path if path.startswith("/") else f"{WORKSPACE}/{path}"
    if whole == f"{WORKSPACE}/.":
        return WORKSPACE
    return whole.removesuffix("/.").rstrip("/") or "/"


def relative_parts(top: str, path: str) -> Parts:
    """The path of an entry below the target, in parts."""
    start = top.rstrip("/") + "/"
    if not path.startswith(start):
        raise errors.GuestFailed(f"the sandbox lists {path[:80]!r}, which was not asked for")
    return tuple(check_name(part) for part in path[len(start) :].split("/"))


def stays_inside(parts: Parts, target: str) -> bool:
    """Whether a link at ``parts`` can only lead to a place in the tree.

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
    """One running copy."""

    def __init__(self, session_id: str, target: CopyTarget, tally: Tally) -> None:
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
    """The name of a copy of ``path`` in a folder; empty if it has none."""
    name = posixpath.basename(whole_path(path))
    return "" if name in ("", "..") else check_name(name)
