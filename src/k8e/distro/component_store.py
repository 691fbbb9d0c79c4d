"""The components folder: programs, data and images, with their recorded checksums.

A program is started only if it is the one that was recorded when it was built or fetched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.distro.components import COMPONENTS, Component

RECIPES = Path(__file__).parent / "build"
"""For each component built with Go: ``go.mod``, ``go.sum`` and further files for its build."""
_MANIFEST = "manifest.json"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_WRITABLE_BY_OTHERS = 0o022


class State(StrEnum):
    """The condition of a component."""

    PRESENT = "present"
    MISSING = "missing"
    OUTDATED = "outdated"
    """It exists, but was made by another version of its entry in the table."""
    WRONG = "wrong"
    """A file is not the one that was recorded."""


@dataclass(frozen=True)
class Finding:
    """The result of checking one component."""

    component: Component
    state: State
    detail: str = ""
    source: str = ""
    """Where it came from: ``built with go1.26.8``, ``upstream's release``, ``Debian``."""
    size: int = 0


def architecture() -> str:
    """This machine's architecture, as Go names it."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def recipe(component: Component) -> str:
    """A digest of everything that a component is made from, except the compiler."""
    made = (component.version, component.module, component.builds, component.debian)
    found = hashlib.sha256(repr((made, component.releases, component.images)).encode())
    folder = RECIPES / component.name
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_file():
            found.update(f"\0{path.relative_to(folder)}\0".encode() + path.read_bytes())
    found.update(architecture().encode())
    return found.hexdigest()


class ComponentStore:
    """The components folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # What a cluster asks for.

    def file(self, name: str) -> Path:
        """A program, folder or archive of the table; ToolFailed if it is not the recorded one."""
        component = _component_of(name)
        records = self._read_manifest()
        record = records.get(component.name)
        if record is None or name not in record["files"]:
            raise self._unusable(component, "is not installed")
        problem = self._problem(name, record["files"][name], thorough=False)
        if problem:
            raise self._unusable(component, problem)
        return self.folder / name

    def program(self, name: str) -> Path:
        """A program of ``bin``."""
        return self.file(f"bin/{name}")

    def _unusable(self, component: Component, what: str) -> errors.ToolFailed:
        return errors.ToolFailed(
            f"the component {component.name} in {self.folder} cannot be used: {what}",
            hint=f"as root: k8e components install {component.name}",
        )

    # Looking.

    def look(self, component: Component, *, thorough: bool = False) -> Finding:
        """Check whether a component can be used; ``thorough`` reads all bytes, not only changes."""
        if component.programs:
            return self._look_for_programs(component)
        record = self._read_manifest().get(component.name)
        if record is None:
            return Finding(component, State.MISSING)
        source, files = record["source"], record["files"]
        size = sum(item["size"] for item in files.values())
        if record["recipe"] != recipe(component):
            detail = f"it is {record['version']} of an earlier release of k8e"
            return Finding(component, State.OUTDATED, detail, source, size)
        if set(files) != {*component.files, *component.folders}:
            return Finding(component, State.OUTDATED, "some of its files are missing", source, size)
        for name, recorded in files.items():
            if problem := self._problem(name, recorded, thorough=thorough):
                return Finding(component, State.WRONG, problem, source, size)
        if any(_mark(self.folder / name) != files[name]["mark"] for name in component.files):
            self._mark_again(component)
        return Finding(component, State.PRESENT, "", source, size)

    def _mark_again(self, component: Component) -> None:
        """Record the times of correct files, so that a copied folder is read only once."""
        with contextlib.suppress(OSError, KeyError), (self.folder / ".lock").open("r+b") as lock:
            fcntl.flock(
                lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # whoever has it records more than this
            record = self._read_manifest()[component.name]
            for name, recorded in record["files"].items():
                mark = _mark(self.folder / name)
                if self._problem(name, recorded, thorough=True):
                    return
                recorded["mark"] = mark
            self._record(component.name, record)

    def _look_for_programs(self, component: Component) -> Finding:
        found: list[str] = []
        for program in component.programs:
            path = find_program(program.names)
            if path is None:
                return Finding(component, State.MISSING, f"there is no {program.names[0]}")
            link = self.folder / program.link
            if program.link and (not link.is_symlink() or link.readlink() != path):
                return Finding(component, State.MISSING, f"{link} does not lead to {path}")
            found.append(str(path))
        return Finding(component, State.PRESENT, ", ".join(found), "the distribution")

    def _problem(self, name: str, recorded: dict[str, Any], *, thorough: bool) -> str:
        """Why a file is not the recorded one; empty if it is.

        A file with the same inode, size and times is the same: the kernel sets the time of the
        last change whenever anybody writes to it, and no call sets it back. A folder's own times
        say nothing of the files in it, so folders are always read.
        """
        path = self.folder / name
        try:
            if _is_open_to_others(path):
                return f"{path} can be changed by users other than root"
            if not thorough and not path.is_dir() and _mark(path) == recorded["mark"]:
                return ""
            found = _digest(path)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if found != recorded["sha256"]:
            return f"{path} has the checksum {found}, not {recorded['sha256']}"
        return ""

    # Changing.

    @contextlib.contextmanager
    def locked(self, wait: Callable[[], None]) -> Generator[None]:
        """Hold the folder for ourselves; ``wait`` is called if another process has it."""
        self._make()
        with (self.folder / ".lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make(self) -> None:
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            open_to_others = _is_open_to_others(self.folder)
        except OSError as error:
            raise errors.InvalidRequest(
                f"the components folder {self.folder} cannot be made: {error.strerror}",
                hint="run this as root, or name another folder with --dir or K8E_COMPONENTS_DIR",
            ) from None
        if open_to_others or not os.access(self.folder, os.W_OK):
            raise errors.InvalidRequest(
                f"the components folder {self.folder} belongs to others, or they can change it",
                hint="it must belong to the user who runs this, and be writable for that user only",
            )

    def scratch(self, component: Component) -> Path:
        """An empty folder in which a component is made, on the same file system."""
        folder = self.folder / "build" / component.name
        remove_tree(folder)
        folder.mkdir(parents=True)
        return folder

    def admit(self, component: Component, made: Path, source: str, seconds: float) -> None:
        """Move a new component into place, and record its checksums."""
        files: dict[str, Any] = {}
        for name in (*component.files, *component.folders):
            path, target = made / name, self.folder / name
            _set_modes(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                remove_tree(target)
            path.rename(target)
            files[name] = {"sha256": _digest(target), "size": _size(target), "mark": _mark(target)}
        self._record(
            component.name,
            {
                "version": component.version,
                "recipe": recipe(component),
                "source": source,
                "seconds": round(seconds, 1),
                "made_at": round(time.time()),
                "files": files,
            },
        )

    def link(self, name: str, target: Path) -> None:
        """Link a file of the folder to a program that the distribution maintains."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.new")
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(target)
        scratch.rename(path)

    def _record(self, name: str, record: dict[str, Any]) -> None:
        records = self._read_manifest()
        records[name] = record
        scratch = self.folder / f".{_MANIFEST}.new"
        with scratch.open("w", encoding="utf-8") as file:
            json.dump({"format": 1, "components": records}, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(self.folder / _MANIFEST)

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / _MANIFEST
        try:
            if _is_open_to_others(path) or _is_open_to_others(self.folder):
                return {}  # its writers could vouch for any program
            read = json.loads(path.read_bytes())
            return {name: record for name, record in read["components"].items() if record["files"]}
        except errors.UNREADABLE:
            return {}


def find_program(names: Iterable[str]) -> Path | None:
    """A program of the machine, under the first of its names that exists."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    for name in names:
        if found := shutil.which(name, path=path):
            return Path(found)
    return None


def _component_of(name: str) -> Component:
    for component in COMPONENTS:
        if name in component.files or name in component.folders:
            return component
    raise LookupError(name)


def _is_open_to_others(path: Path) -> bool:
    """Whether users other than root and us may change a file."""
    found = path.lstat()
    foreign = found.st_uid not in (0, os.geteuid())
    return foreign or bool(found.st_mode & _WRITABLE_BY_OTHERS)


def _mark(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _size(path: Path) -> int:
    return sum(item.lstat().st_size for item in [path, *path.rglob("*")] if item.is_file())


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of all names and contents in a folder."""
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    found = hashlib.sha256()
    for item in sorted(path.rglob("*")):
        if item.is_file():
            found.update(f"{item.relative_to(path)}\0{_digest(item)}\n".encode())
    return found.hexdigest()


def _set_modes(path: Path) -> None:
    """Let every user read and only the owner write, whatever the umask or the module's modes."""
    for item in [path, *path.rglob("*")]:
        executable = item.is_dir() or item.lstat().st_mode & 0o100
        item.chmod(0o755 if executable else 0o644)


def remove_tree(path: Path) -> None:
    """Remove a folder, even where Go made its files read-only."""
    if path.is_dir():
        for item in [path, *(item for item in path.rglob("*") if item.is_dir())]:
            item.chmod(0o755)
        shutil.rmtree(path)
