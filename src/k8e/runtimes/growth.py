"""How much each workspace may still grow, so that all of them together fit on the disk.

Workspaces are sparse images: together they may be promised more than the disk holds. A loop device
that finds no room breaks the file system on it, and whose that is depends on luck. So the space
that a workspace may not have is taken by a file *in* its image (``ballast``): all of them together
may never take more than there is. A program that meets that bound gets ENOSPC from write(2), before
anything is in the page cache, and others notice nothing. Since blocks that are freed inside are
given back to the disk (``discard``), what a workspace holds is soon what it uses.

The bounds are in the kernel: they hold while no gateway runs, and while a busy machine keeps the
gateway from looking. Workspaces of older releases have no ballast; their file systems are told how
many blocks to leave free (ext4's ``reserved_clusters``), which does not bound who deletes files and
writes others.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from k8e import disk
from k8e.runtimes import mounts
from k8e.runtimes.ballast import Ballast
from k8e.runtimes.base import DiskReport

log = logging.getLogger(__name__)

FLOOR = 64 << 20
"""Bytes that a workspace may hold however others grow; less where there is less for each."""
BURST = 256 << 20
"""What a workspace may take at once on top of that, as long as there is as much for each."""
RATE = 1 << 30
"""Bytes a second that a workspace at rest may begin to grow by; four times that if it grows."""
SOONEST, LATEST = 0.05, 1.0  # seconds between two looks
NOBODY_SECONDS = 5.0  # between two looks where there is no workspace
NICE = -10
CHECK_SECONDS = 1.0  # between two looks at whether a file system has failed
FULL_SECONDS = 0.2  # where nothing can be given, only room that comes back is worth a look
GROWING = 1 << 20
"""Bytes that a workspace has recently taken, if it counts as a growing one."""
SHARES = 16
"""How many times as much of what is short goes to the one that grows most, as to one at rest."""
HELD_BYTES = 4 << 20
"""A workspace that is not full and may grow by less than this is held back."""
METADATA = 8 << 20  # bytes of a file system's own that are written soon: journal, bitmaps, inodes
PER_INODE = 512
RESERVED = 256
"""Blocks that ext4 keeps back beside a ballast, for its own needs; a quarter of few."""
_SYS = Path("/sys/fs/ext4")


class Usage(NamedTuple):
    """The size of a workspace at one moment, in bytes."""

    backed: int
    """What its image has on the disk."""
    used: int
    """What its file system has given to files, written out or not."""
    free: int
    """What its file system could still give."""
    debt: int
    """What its image may still need though no file grows."""
    open: int = 0
    """What its files could take now."""


@dataclass
class Workspace:
    """One workspace whose growth is bounded."""

    sandbox_id: str
    image: str
    target: str
    size: int
    node: str
    """The kernel's folder of its file system."""
    device: int
    least: int
    """Blocks that ext4 keeps back by itself."""
    block: int
    usage: Usage
    ballast: Ballast | None = None
    """What takes up the blocks that it may not have; workspaces of older releases have none."""
    grant: int = 0
    """What it may grow by since ``usage``; all that is free where it is not bounded."""
    recent: float = 0.0
    """Bytes that it has recently taken, of which half are forgotten every second."""
    seen_at: float = 0.0
    bounded: bool = False
    failed: bool = False
    """Whether it can no longer be written; looked at less often."""
    checked_at: float = -CHECK_SECONDS

    @property
    def held(self) -> bool:
        """Whether it could grow by its own limit, but may not."""
        return self.bounded and self.grant < min(HELD_BYTES, self.usage.free)

    def measure(self) -> Usage:
        """Its present usage; OSError if it is gone, and its device perhaps another's."""
        if os.stat(self.target).st_dev != self.device:  # noqa: PTH116 - done often
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        told, backed = os.statvfs(self.target), os.stat(self.image).st_blocks * 512  # noqa: PTH116
        weight = self.ballast.size if self.ballast is not None else 0
        free = told.f_bfree * told.f_frsize + weight
        used = told.f_blocks * told.f_frsize - free
        inodes = told.f_files - told.f_ffree
        own = min(self.size - told.f_blocks * told.f_frsize, METADATA + inodes * PER_INODE)
        if weight:
            own += self.reserved * self.block
        debt = min(max(0, used + own - backed), max(0, self.size - backed))
        return Usage(backed, used, free, debt, told.f_bavail * told.f_frsize)

    @property
    def reserved(self) -> int:
        """Blocks that ext4 keeps back beside a ballast."""
        return min(RESERVED, self.least // 4)

    def bound(self, grant: int) -> None:
        """Let it grow by ``grant`` bytes beyond its ``usage``; the kernel counts from here."""
        bounded = grant < self.usage.free
        if bounded or self.bounded:
            if self.ballast is None:
                left = (self.usage.free - grant) // self.block if bounded else 0
                self._reserve(max(self.least, left))
            elif bounded:
                self._reserve(self.reserved)
                left = (self.usage.free - grant) // self.block - self.reserved
                self.ballast.resize(max(0, left) * self.block)
            else:
                self.ballast.resize(0)
                self._reserve(self.least)
        self.bounded, self.grant = bounded, grant

    def count_grant(self, before: Usage) -> None:
        """Compute what is left of its grant, which was made when it held ``before``."""
        if self.ballast is None:
            # The kernel's bound is a number of blocks to leave: what was taken is gone from it.
            self.grant = max(0, self.grant - (self.usage.used - before.used))
        else:
            self.grant = self.usage.open if self.bounded else self.usage.free

    def _reserve(self, blocks: int) -> None:
        with open(f"{self.node}/reserved_clusters", "w", encoding="ascii") as file:
            file.write(f"{blocks}\n")


@dataclass(frozen=True)
class Report(DiskReport):
    """The state of the disk, and when to look again."""

    another: int = FLOOR
    again: float = LATEST
    """Seconds after which to look again."""


class Growth:
    """Divides the free space of a disk among the workspaces on it. Used by several threads."""

    def __init__(
        self,
        folder: Path,
        keep: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``keep`` says how much of the disk of ``folder`` is not for workspaces."""
        self._folder = folder
        self._keep = keep
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, Workspace] = {}
        self._short = threading.Event()  # somebody should look at once
        self._stopped = False
        self._spare = 0  # what was left at the last look, and nobody was promised since
        self.report: DiskReport = Report(0, 0, 0)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, sandbox_id: str, image: Path, target: Path, handle: bytes | None = None) -> None:
        """Bound a workspace that was just mounted, before anything can be written to it.

        ``handle`` names its ballast, where it has one.
        """
        found = _open(sandbox_id, image, target, handle)
        if found is None:
            return
        with self._lock:
            self._known[sandbox_id] = found
            need = found.usage.free + found.usage.debt
            if need <= self._spare and not found.bounded:
                self._spare -= need  # there is enough for all, so nobody needs to be asked
                found.grant = found.usage.free
                return
            self._share()
        self._short.set()

    def forget(self, sandbox_id: str) -> None:
        """Forget a workspace before it is unmounted: afterwards its device may become another's."""
        with self._lock:
            self._known.pop(sandbox_id, None)

    def kept(self) -> int:
        """Bytes of the disk that are not for workspaces."""
        return self._keep()

    def is_bounded(self, sandbox_id: str) -> bool:
        """Whether a workspace may grow by less than its own limit would let it."""
        found = self._known.get(sandbox_id)
        return found is not None and found.bounded and found.usage.free > HELD_BYTES

    def is_growing(self, sandbox_id: str) -> bool:
        """Whether a workspace has recently taken room."""
        found = self._known.get(sandbox_id)
        return found is not None and found.recent >= GROWING

    def watch(self, tell: Callable[[DiskReport], object]) -> Callable[[], None]:
        """Share again and again in a thread, where ``tell`` is called; return how to stop it.

        A thread of its own, before others: while it waits, a quick writer is refused what there is.
        """

        def look() -> None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            while not self._stopped:
                again = LATEST
                try:
                    report = self.share()
                    again = report.again if self._known else NOBODY_SECONDS
                    tell(report)
                except Exception:  # the next look may do better, and without any nobody is safe
                    log.exception("looking at the disk failed")
                self._short.wait(again)
                self._short.clear()

        def stop() -> None:
            self._stopped = True
            self._short.set()
            thread.join()

        self._stopped = False
        thread = threading.Thread(target=look, name="disk", daemon=True)
        thread.start()
        return stop

    def share(self) -> Report:
        """Measure all workspaces, and divide the free space again."""
        with self._lock:
            return self._share()

    def _share(self) -> Report:
        now = self._clock()
        kept = self._keep()
        failed: list[str] = []
        found: list[Workspace] = []
        for item in list(self._known.values()):
            with contextlib.suppress(OSError):  # it is just being removed
                self._look(item, now)
                found.append(item)
                if item.failed:
                    failed.append(item.sandbox_id)
        free, room = self._room(found, kept)
        grants = share_out(found, room)
        if self._lower(found, grants):  # what was taken away may be there for others
            for item in found:
                with contextlib.suppress(OSError):
                    before, item.usage = item.usage, item.measure()
                    item.count_grant(before)
            free, room = self._room(found, kept)
            grants = share_out(found, room)
        promised = self._raise(found, grants, room)
        self._spare = max(0, room - promised)
        again = min((_again(item) for item in found if item.bounded), default=LATEST)
        held = tuple(item.sandbox_id for item in found if item.held)
        another = level({**_below_floor(found), "": FLOOR}, room)[""]
        found_now = Report(free, kept, promised, held, tuple(failed), another, again)
        self.report = found_now
        return found_now

    def _room(self, found: Iterable[Workspace], kept: int) -> tuple[int, int]:
        """The free space, and how much all workspaces together may grow."""
        free = disk.space(self._folder).free
        return free, free - kept - sum(item.usage.debt for item in found)

    def _look(self, item: Workspace, now: float) -> None:
        before, item.usage = item.usage, item.measure()
        kept = 0.5 ** max(0.0, now - item.seen_at)
        item.recent = item.recent * kept + max(0, item.usage.used - before.used)
        item.seen_at = now
        if now >= item.checked_at + CHECK_SECONDS:
            item.checked_at, item.failed = now, has_failed(item.node, item.target)
        item.count_grant(before)

    def _lower(self, found: Iterable[Workspace], grants: dict[str, int]) -> bool:
        """First lower the grants: some may have grown since they were measured."""
        lowered = False
        for item in found:
            if grants[item.sandbox_id] < item.grant or (
                not item.bounded and grants[item.sandbox_id] < item.usage.free
            ):
                lowered = True
                with contextlib.suppress(OSError):
                    item.bound(grants[item.sandbox_id])
                    before, item.usage = item.usage, item.measure()
                    item.count_grant(before)
        return lowered

    def _raise(self, found: Iterable[Workspace], grants: dict[str, int], room: int) -> int:
        """Then raise grants with what is left; return the sum of all grants."""
        found = list(found)
        promised = sum(min(item.grant, item.usage.free) for item in found)
        for item in found:
            more = min(grants[item.sandbox_id] - item.grant, room - promised)
            if more > 0:
                with contextlib.suppress(OSError):
                    item.bound(item.grant + more)
                    promised += more
        return promised


def share_out(found: list[Workspace], room: int) -> dict[str, int]:
    """How much each workspace may grow; together no more than ``room``.

    All that they could want, if there is so much. Else first the floor, so that a neighbour who
    takes everything leaves each of them some; then for each some, for a sudden need, and most for
    those who are growing; then the rest for these.
    """
    wants = {item.sandbox_id: item.usage.free for item in found}
    if sum(wants.values()) <= room:
        return wants
    room = max(0, room)
    grants = level(_below_floor(found), room)
    room -= sum(grants.values())
    growing = {item.sandbox_id for item in found if item.recent >= GROWING}
    most = max([GROWING, *(item.recent for item in found)])
    shares = {item.sandbox_id: 1 + int(SHARES * item.recent / most) for item in found}
    bursts = {name: BURST * shares[name] for name in wants}
    for bounds in (bursts, dict.fromkeys(growing, room), dict.fromkeys(wants, room)):
        asked = {name: min(most, wants[name] - grants[name]) for name, most in bounds.items()}
        for name, more in level(asked, room, shares).items():
            grants[name] += more
            room -= more
    return grants


def _below_floor(found: Iterable[Workspace]) -> dict[str, int]:
    """How much each workspace may take however the others grow."""
    return {
        item.sandbox_id: min(item.usage.free, max(0, FLOOR - item.usage.used)) for item in found
    }


def level(
    wants: Mapping[str, int], room: int, shares: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Divide ``room`` by ``shares``; none gets more than it wants."""
    shares = shares or dict.fromkeys(wants, 1)
    found: dict[str, int] = {}
    left = sum(shares[name] for name in wants)
    for name in sorted(wants, key=lambda name: wants[name] / shares[name]):
        found[name] = min(wants[name], max(0, room) * shares[name] // left)
        room -= found[name]
        left -= shares[name]
    return found


def has_failed(node: str, target: str) -> bool:
    """Whether a file system refuses writes, such as after an error of the disk below it."""
    if os.statvfs(target).f_flag & os.ST_RDONLY:
        return True
    try:
        with open(f"{node}/errors_count", encoding="ascii") as file:
            if file.read().strip() in ("", "0"):
                return False
        os.utime(target)  # after an error, some go on, and some only look as if they did
    except OSError as error:
        return error.errno in (errno.EROFS, errno.EIO)
    return False


def _again(item: Workspace) -> float:
    """When to look again, so that no workspace is refused room that exists."""
    if item.held:
        return FULL_SECONDS
    rate = RATE * (4 if item.recent >= GROWING else 1)
    return min(LATEST, max(SOONEST, item.grant / rate))


def _open(sandbox_id: str, image: Path, target: Path, handle: bytes | None) -> Workspace | None:
    """A mounted workspace; None if its growth cannot be bounded here."""
    try:
        device = target.stat().st_dev
        node = _SYS / f"loop{os.minor(device)}"
        told = os.statvfs(target)
        reserved = int((node / "reserved_clusters").read_text("ascii"))
        if os.major(device) != mounts.LOOP_MAJOR:
            return None
        size = image.stat().st_size
    except (OSError, ValueError) as error:
        log.warning("the growth of workspace %s cannot be bounded: %s", sandbox_id, error)
        return None
    usual = min(size // told.f_frsize // 50, 4096)  # what ext4 keeps back by itself
    found = Workspace(
        sandbox_id=sandbox_id,
        image=str(image),
        target=str(target),
        size=size,
        node=str(node),
        device=device,
        least=usual,
        block=told.f_frsize,
        usage=Usage(0, 0, 0, 0),
    )
    if handle is not None:
        try:
            ballast = Ballast(handle, target=str(target), image=str(image), device=device)
        except OSError as error:
            log.warning("the ballast of workspace %s cannot be used: %s", sandbox_id, error)
        else:
            found.ballast, found.bounded = ballast, ballast.size > 0
    found.usage = found.measure()
    if found.ballast is not None:
        found.grant = found.usage.open if found.bounded else found.usage.free
    elif reserved > usual:  # a gateway before us has bounded it
        found.bounded = True
        found.grant = max(0, found.usage.free - reserved * found.block)
    return found
