"""This machine as the local runtimes use it: folders, uid ranges, root file system, guest file.

Below the home of a user there is none where homes are closed, and that user may not make one. But
the namespace of mounts is the gateway's own then: a folder that nobody needs shows the data folder.

Open files count against the memory of whoever opens them, so that is the limit that holds. The
host's own table is smaller than what one sandbox may open: a single one could fill it, and then no
other sandbox could open a file. systemd makes it as good as endless for the same reason.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import resource
import shutil
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from k8e import errors, rootless
from k8e.disk import Reserve
from k8e.images.service import Images
from k8e.model import Limits
from k8e.runtimes import bundle, cgroups, guest_package, mounts, rootfs
from k8e.runtimes.base import LendNetwork
from k8e.runtimes.growth import Growth
from k8e.runtimes.leftovers import Leftovers
from k8e.runtimes.overlays import Roots
from k8e.runtimes.uids import Uids
from k8e.runtimes.workspaces import Workspaces
from k8e.settings import Settings, tool_homes
from k8e.system import end_all, start_time

PLACES = tuple(map(Path, ("/mnt", "/media", "/srv")))


def passage_of(settings: Settings) -> Path:
    """The path by which sandboxes reach the data folder, once it was made."""
    return settings.data_dir if rootless.inside() is None else _place(settings) / "k8e"


def make_passage(settings: Settings) -> None:
    """Mount it if it is needed and missing."""
    if rootless.inside() is None:
        return
    place = _place(settings)
    found = place / "k8e" in mounts.mounts_below(place)
    if found and not (place / "k8e").samefile(settings.data_dir):
        undo_passage(settings)  # of a gateway that had another data folder
        found = False
    if not found:
        flags = mounts.MS_NOSUID | mounts.MS_NODEV
        mounts.mount("k8e-reach", place, "tmpfs", flags, "size=16k,nr_inodes=8,mode=755")
        (place / "k8e").mkdir(exist_ok=True)
        mounts.bind(settings.data_dir, place / "k8e")


def undo_passage(settings: Settings) -> None:
    """Unmount it, once no gateway needs it."""
    if rootless.inside() is not None:
        place = _place(settings)
        for point in mounts.mounts_below(place):
            mounts.unmount(point)


def _place(settings: Settings) -> Path:
    """An unused folder."""
    ours = (settings.home, settings.data_dir, settings.run_dir, Path.home())
    for place in PLACES:
        if place.is_dir() and not any(place in (path, *path.parents) for path in ours):
            return place
    raise errors.RuntimeUnusable(
        f"none of {', '.join(map(str, PLACES))} can be used to show sandboxes their files",
        hint="make one of these folders, or run k8e as root",
    )


log = logging.getLogger(__name__)

OPEN_FILES = Path("/proc/sys/fs/file-max")
ENDLESS = 1 << 40


def enlarge_kernel_tables() -> None:
    """Enlarge tables that are smaller than sandboxes need; does nothing where we lack the right."""
    with contextlib.suppress(OSError, ValueError):
        before = int(OPEN_FILES.read_text("ascii"))
        if before < ENDLESS:
            OPEN_FILES.write_text(str(ENDLESS), "ascii")
            log.info("%s was %d, and a sandbox could have used that up", OPEN_FILES, before)


FEW_IDS = 2048
"""Uids of a sandbox where a user has not many: its own user is number 1000, few others exist."""
GUEST_PYTHON = "/usr/bin/python3"


FORMAT = 1
"""Of the records of sandboxes: one more when an older release must not touch a sandbox."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _no_env() -> dict[str, str]:
    return {}


@functools.cache
def _boot() -> str:
    inside = rootless.inside()
    name = f" {inside.name}" if inside else ""  # of a holder: its processes have pids of their own
    return BOOT_ID.read_text("ascii").strip() + name


@dataclass(frozen=True)
class SandboxRecord:
    """The record of a sandbox, written before anything of it exists."""

    sandbox_id: str
    runtime: str
    limits: Limits
    id_base: int | None
    pid: int = 0
    pid_started: int = 0
    """Kernel ticks at which ``pid`` started, so that a reused pid is recognised."""
    workspace_of: str = ""
    """The sandbox whose workspace, and so whose uids, it shares."""
    settled: bool = False
    """Whether its workspace is mounted, and its guest did all that needs no session."""
    healing: bool = False
    """Whether its workspace is being repaired; meanwhile it is frozen, and may be unmounted."""
    root: str = ""
    """The key of its root file system; empty for the host's own."""
    env: dict[str, str] = field(default_factory=_no_env)
    """Variables that its image gives to programs."""
    boot: str = field(default_factory=_boot)
    """The run of the machine that it belongs to; pids and times mean nothing in another."""
    format: int = FORMAT

    def is_running(self) -> bool:
        """Whether the main process of the sandbox is there."""
        is_ours = self.pid and self.boot in ("", _boot())
        return bool(is_ours) and start_time(self.pid) == self.pid_started

    def save(self, folder: Path) -> None:
        scratch = folder / "sandbox.json.tmp"
        scratch.write_text(json.dumps(asdict(self)), "utf-8")
        scratch.rename(folder / "sandbox.json")

    @classmethod
    def load(cls, folder: Path) -> SandboxRecord | None:
        """The record of a sandbox; None if it was only half made.

        Raises:
            StateUnusable: a newer release made it, and might want it back.
        """
        try:
            data: dict[str, Any] = json.loads((folder / "sandbox.json").read_text("utf-8"))
            # What is missing, an older release did not write; what is unknown was added since.
            made_by = int(data.setdefault("format", 0))
            data.setdefault("boot", "")
            data["limits"] = Limits(**_known(Limits, data["limits"]))
            record = cls(**_known(cls, data))
            if made_by <= FORMAT:
                return record._checked(folder.name)
        except errors.UNREADABLE:
            return None
        raise errors.StateUnusable(
            f"sandbox {folder.name} was made by a newer k8e",
            hint="update k8e, or set K8E_RUN_DIR to another folder",
        )

    def _checked(self, sandbox_id: str) -> SandboxRecord:
        """Return the record if it is one of ours: it says what to watch and to mount."""
        numbers = (self.pid, self.pid_started, 0 if self.id_base is None else self.id_base)
        texts: tuple[Any, ...] = (
            self.runtime,
            self.workspace_of,
            self.boot,
            self.root,
            *self.env,
            *self.env.values(),
        )
        fits = all(type(item) is int and item >= 0 for item in numbers)
        if not fits or not all(isinstance(item, str) for item in texts):
            raise TypeError("a record of other types")
        if self.sandbox_id != sandbox_id or type(self.settled) is not bool:
            raise ValueError("a record of another sandbox")
        return self


def _known(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


@contextlib.asynccontextmanager
async def _no_network() -> AsyncGenerator[str]:
    yield ""


def _few_uids(sandboxes: Path, count: int) -> Uids:
    """Ranges for the sandboxes of a user who has ``count`` uids; the first is the user's own."""
    claims = Path.home() / ".local/share/k8e/uids"
    try:
        claims.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the folder {claims.parent} cannot be made: {error.strerror}",
            hint="set HOME to a folder of yours: there, the gateways of a user share out its uids",
        ) from None
    return Uids(sandboxes, claims=claims, first=1, size=FEW_IDS, slots=(count - 1) // FEW_IDS)


class Host:
    """Folders and ranges shared by all local runtimes of one gateway."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sandboxes = settings.run_dir / "sandboxes"
        inside = rootless.inside()
        self.has_cgroups = cgroups.usable()
        """Whether the kernel can hold sandboxes to their limits."""
        self.reserve: Reserve | None = None
        """What the gateway keeps of the disk for itself."""
        self.growth = Growth(settings.data_dir, self._kept)
        """What workspaces may take of the disk."""
        self.workspaces = Workspaces(
            settings.data_dir / "workspaces", in_memory=bool(inside), growth=self.growth
        )
        self.uids = _few_uids(self.sandboxes, inside.ids) if inside else Uids(self.sandboxes)
        self.leftovers = Leftovers(self.sandboxes)
        self._reachable = passage_of(settings)
        """The data folder by a path on which every uid may pass."""
        self._way = (self._reachable, *self._reachable.parents)
        self._homes = tool_homes(settings.home)
        self.images = Images(settings)
        self.roots = Roots(self.images, self._reachable / "images" / "roots")
        self._skeleton: Path | None = None
        self._guest: Path | None = None
        self._locales: Path | None = None
        self._python: guest_package.Interpreter | None = None
        self.lend_network: LendNetwork = _no_network
        """A network namespace to try runtimes with; its path is empty where there is none."""
        self._lock = threading.Lock()  # of shared files: launches prepare in threads
        self._making_python = threading.Lock()  # takes a second: launches without it go on

    def _kept(self) -> int:
        """Free bytes that are not for workspaces."""
        missing = self.reserve.missing if self.reserve is not None else 0
        return self.settings.min_free_disk + missing

    def running(self) -> list[str]:
        """The sandboxes whose main processes live, whichever gateway made them."""
        found = (SandboxRecord.load(folder) for folder in sorted(self.sandboxes.glob("sb-*")))
        return [item.sandbox_id for item in found if item is not None and item.is_running()]

    def prepare(self) -> None:
        """Make the folders; raises an error that says what is wrong with them."""
        if os.geteuid() != 0:
            raise errors.RuntimeUnusable(
                "the local runtimes need root to make sandboxes, or a user namespace",
                hint="run k8e as root (sudo k8e …), or set K8E_SANDBOX_ENDPOINT to a gateway",
            )
        make_passage(self.settings)
        self.sandboxes.mkdir(parents=True, exist_ok=True)
        mounts.make_private_mount(self.sandboxes)
        cgroups.prepare()
        cgroups.sweep()
        self.leftovers.load()
        enlarge_kernel_tables()
        self.workspaces.sweep()
        self.workspaces.adopt(self.sandboxes)
        roots: dict[str, str] = {}
        bases: dict[str, int] = {}
        for folder in self.sandboxes.glob("sb-*"):
            record = SandboxRecord.load(folder)
            if record is not None and record.id_base is not None:
                bases[record.sandbox_id] = record.id_base
            if record is not None and record.root:
                roots[record.sandbox_id] = record.root
        self.uids.load(bases)
        self.roots.prepare(roots)

    def close(self) -> None:
        """Release resources that only matter while there are sandboxes."""
        self.roots.close()
        if not any(self.sandboxes.glob("sb-*")):
            # Also what runsc leaves: a network namespace without anything, to start programs in.
            for point in mounts.mounts_below(self.settings.run_dir):
                mounts.unmount(point)
            shutil.rmtree(self.settings.run_dir / "gvisor", ignore_errors=True)
            undo_passage(self.settings)

    def leave(self) -> None:
        """``close``, and remove the control group of all sandboxes: no gateway runs here now."""
        self.close()
        cgroups.remove_parent()

    def prune_images(self) -> list[str]:
        """Remove the layers that no sandbox and no pulled image uses; their digests."""
        return self.roots.prune()

    def remains(self) -> set[str]:
        """The sandboxes of which a folder or a disk is here."""
        return {path.name for path in self.sandboxes.glob("sb-*")} | set(self.workspaces.names())

    def closed_folder(self) -> Path | None:
        """A folder on the path to the data folder that is closed to other uids."""
        for path in self._way:
            if not os.stat(path).st_mode & 0o001:  # noqa: PTH116 - asked for each new session
                return path
        return None

    def folder(self, sandbox_id: str) -> Path:
        return self.sandboxes / sandbox_id

    def tool(self, name: str) -> str | None:
        """The program ``name`` from install.sh, or else the one on PATH."""
        for home in self._homes:
            installed = f"{home}/bin/{name}"
            if os.access(installed, os.X_OK):
                return installed
        return shutil.which(name)

    def facts(self, names: tuple[str, ...]) -> str:
        """The identity of the first of these tools that exists, for a probe to recognise it."""
        for name in names:
            path = self.tool(name)
            if path is not None:
                return file_facts(path)
        return "none of " + ", ".join(names)

    def _language_tools(self) -> Path | None:
        """The folder with the runner of TypeScript, where it is complete."""
        folders = [home / "tools" for home in self._homes]
        whole = (folder for folder in folders if (folder / "node_modules/tsx").is_dir())
        return next(whole, None) or next((item for item in folders if item.is_dir()), None)

    def layout(self, record: SandboxRecord) -> bundle.BundleLayout:
        """The layout of a sandbox; makes the shared folders at first use."""
        with self._lock:
            if self._guest is None or not self._guest.exists():
                self._guest = guest_package.pack_guest(
                    self.settings.data_dir / "guest", GUEST_PYTHON
                )
                self._locales = rootfs.archive(self.settings.data_dir / "locales")
        root, python = self._root(record)
        folder = self.folder(record.sandbox_id)
        return bundle.BundleLayout(
            rootfs=root,
            bound=[] if record.root else rootfs.bound_folders(),
            guest=self._guest,
            link=folder / "link",
            slot=folder / "slot",
            tools=self._language_tools(),
            # Without CAP_SYS_RESOURCE nobody can raise a hard limit above their own.
            open_files=min(record.limits.open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
            python=python,
            locales=None if record.root else self._locales,
        )

    def _root(self, record: SandboxRecord) -> tuple[Path, guest_package.Interpreter | None]:
        """The root file system of a sandbox, and the guest's Python where that has none for it."""
        if record.root:
            with self._making_python:
                if self._python is None or not self._python.folder.exists():
                    self._python = guest_package.make_interpreter(
                        self.settings.data_dir / "python",
                        GUEST_PYTHON,
                        guest_package.packed_source(),
                    )
                return self.roots.path(record.root), self._python
        with self._lock:
            if self._skeleton is None or not self._skeleton.exists():
                self._skeleton = rootfs.make_skeleton(self._reachable / "rootfs")
            return self._skeleton, None


def file_facts(path: str) -> str:
    """A file's identity: its path, and everything that changes when it does."""
    try:
        found = os.stat(path)  # noqa: PTH116 - this is asked for each session that is made
    except OSError:
        return f"{path} is gone"
    parts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return " ".join((path, *map(str, parts)))


def kill_mentioning(word: str) -> list[int]:
    """Kill the programs that a dead gateway was running for a sandbox, such as ``runc run``.

    An id, or a folder's name, is random: a command line that has it can only be about it. What
    comes back are those that did not end.
    """
    needle = word.encode()

    def find() -> Iterator[int]:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if needle in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                    yield int(folder.name)

    return end_all(find)
