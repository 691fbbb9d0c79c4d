"""A local place that a tree is made at, held open so that nobody leads us elsewhere meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from k8e import errors

_POSIX = os.open in os.supports_dir_fd
if _POSIX:
    _FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    _NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_BYTES = 255

Parts = tuple[str, ...]


def check_name(name: str) -> str:
    """``name`` if it can only be something in its folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise errors.GuestFailed(f"the sandbox names a file {name[:80]!r}")
    if len(os.fsencode(name)) > _NAME_BYTES:
        raise errors.GuestFailed("the sandbox names a file with too long a name")
    return name


class Target:
    """Where a copy is made. The folder above must be there, and is followed wherever it leads."""

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
        """Make a folder, unless it is there; whether it was made."""
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
        """A file that will take the place of whatever is there."""
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
    """A file under way, next to where it will be."""

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
        """Leave nothing, whatever went wrong."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._folder >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._scratch, dir_fd=self._folder)
            os.close(self._folder)
            self._folder = -1


class PlainTarget(Target):
    """Where folders cannot be held open (Windows): one file, and no tree."""

    def __init__(self, path: str) -> None:
        self._path = path

    def close(self) -> None:
        """Nothing is held open."""

    def make_folder(self, parts: Parts) -> bool:
        raise errors.InvalidRequest(
            "copying folders out of a session safely needs a POSIX system",
            hint="copy its files one by one",
        )

    def begin_file(self, parts: Parts) -> Scratch:
        return PlainScratch(self._path)


class PlainScratch(Scratch):
    """A file under way, for a :class:`PlainTarget`."""

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


def open_target(path: str) -> Target:
    """Where a copy is made, as far as this system can."""
    return Target(path) if _POSIX else PlainTarget(path)


@contextlib.contextmanager
def _named(name: str) -> Generator[None]:
    """Errors say which file they are about: the one that will be, not the one under way."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


def _scratch_name() -> str:
    return f".k8e-{os.urandom(8).hex()}"


def _umask() -> int:
    """What new files may not be; only Linux tells without changing it for every thread."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
