"""Ranges of host uids for sandboxes, on the whole host: no two sandboxes have the same one.

Processes of one uid may signal each other, and own each other's files. So a range that a sandbox
has is claimed for all gateways of the host, by a link in a folder that they share: it is named
after the range and the sandbox, and leads to the sandbox's folder. Sandboxes outlive their gateway,
and links do so too; one that leads nowhere is a sandbox that was removed, whoever could not say so.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

from k8e import errors
from k8e.runtimes import bundle
from k8e.system import end_all

log = logging.getLogger(__name__)

FIRST_ID = 0x70000000
"""First host uid for sandboxes: a range that neither systemd nor /etc/subuid hands out."""
SLOTS = 4096
CLAIMS = Path("/run/k8e-uids")
"""Where root's gateways claim ranges. Not below the run folder: each gateway has one of its own.
And not in /run/lock, where others may write. Processes do not outlive the machine's run either."""
LOCK_SECONDS = 10.0
LOCK_STEP = 0.002  # whoever has the lock makes one link


class Uids:
    """The ranges of one gateway's sandboxes; used by many threads."""

    def __init__(
        self,
        sandboxes: Path,
        *,
        claims: Path = CLAIMS,
        first: int = FIRST_ID,
        size: int = bundle.ID_RANGE,
        slots: int = SLOTS,
    ) -> None:
        """``sandboxes`` has the folders of this gateway's sandboxes, named after their ids.

        All that share the folder ``claims`` must agree on ``first`` and ``size``.
        """
        self.size = size
        """How many uids a sandbox has."""
        self._sandboxes = sandboxes
        self._claims = claims
        self._first = first
        self._slots = slots
        self._bases: dict[str, int] = {}

    def load(self, recorded: Mapping[str, int]) -> None:
        """Take over the ranges of earlier gateways; ``recorded`` is from sandboxes' records.

        It cannot fail: where nothing can be claimed, sandboxes without uids of their own still can
        be had, and taking a range fails with the reason.
        """
        self._bases.update(recorded)
        try:
            with self._locked():
                self._remove_stale()
                # What was claimed and never recorded is about to be removed, and then freed.
                self._bases.update(
                    (sandbox_id, base)
                    for base, sandbox_id, folder in self._claimed()
                    if folder == self._sandboxes / sandbox_id and os.path.lexists(folder)
                )
                for sandbox_id, base in recorded.items():  # an older release claimed none
                    self._claim(sandbox_id, base)
        except errors.RuntimeUnusable as error:
            log.warning("%s", error)

    def take(self, sandbox_id: str) -> int:
        """Take a range that no other sandbox of this host has; return its first uid."""
        with self._locked():
            base = self._unclaimed()
            if base is None:
                self._remove_stale()
                base = self._unclaimed()
            if base is None:
                raise errors.LimitExceeded(
                    f"more than {self._slots} sandboxes on this host",
                    hint="destroy some; all gateways of the host share these uids",
                )
            return self._claim(sandbox_id, base)

    def share(self, sandbox_id: str, owner: str) -> int:
        """The range of ``owner``, for another sandbox that uses the same files.

        It is free again when no sandbox has it any more.
        """
        with self._locked():
            base = self._bases.get(owner)
            # Also not one that another gateway has found to be gone.
            if base is None or not os.path.lexists(self._path(owner, base)):
                raise errors.SandboxDied("the sandbox whose workspace was to be shared is gone")
            return self._claim(sandbox_id, base)

    def free(self, sandbox_id: str) -> None:
        """Free a sandbox's range when nothing of it is left. Needs no lock, so it never waits."""
        base = self._bases.pop(sandbox_id, None)
        with contextlib.suppress(OSError):  # then it leads nowhere from now on
            for claimed, name in list(self._names()):
                # Also one that a gateway claimed which was killed while it removed the sandbox, and
                # those of a family of which nobody is left.
                gone = claimed == base and base not in self._bases.values()
                if name == sandbox_id or (gone and not self._exists(name)):
                    self._path(name, claimed).unlink(missing_ok=True)

    def _exists(self, sandbox_id: str) -> bool:
        return os.path.lexists(self._sandboxes / sandbox_id)

    def kill(self, sandbox_id: str) -> list[int]:
        """Kill every process that has the range of a sandbox, which shares it with none.

        What comes back are those that did not end.
        """
        base = self._bases.get(sandbox_id)
        if base is None or list(self._bases.values()).count(base) > 1:
            return []
        ours = self._range(base)
        return end_all(lambda: [pid for pid, uids in _processes() if any(map(ours, uids))])

    def _range(self, base: int) -> Callable[[int], bool]:
        return lambda uid: base <= uid < base + self.size

    # With the lock.

    def _unclaimed(self) -> int | None:
        taken = {base for base, _ in self._names()} | set(self._bases.values())
        bases = (self._first + slot * self.size for slot in range(self._slots))
        return next((base for base in bases if base not in taken), None)

    def _claim(self, sandbox_id: str, base: int) -> int:
        with contextlib.suppress(FileExistsError):  # its id is its own: it is the same claim
            self._path(sandbox_id, base).symlink_to(self._sandboxes / sandbox_id)
        self._bases[sandbox_id] = base
        return base

    def _remove_stale(self) -> None:
        """Forget sandboxes that were removed without freeing their range, as if by a crash."""
        gone = list(self._gone())
        # Also a folder that somebody else removed does not end its processes.
        used = {uid for _, uids in _processes() for uid in uids} if gone else set[int]()
        for base, path in gone:
            if not any(map(self._range(base), used)):
                path.unlink(missing_ok=True)

    def _gone(self) -> Iterator[tuple[int, Path]]:
        for base, sandbox_id, folder in self._claimed():
            if not os.path.lexists(folder):
                yield base, self._path(sandbox_id, base)

    def _claimed(self) -> Iterator[tuple[int, str, Path]]:
        """All claims: the range, the sandbox, and its folder."""
        for base, sandbox_id in self._names():
            with contextlib.suppress(OSError):  # freed meanwhile, or no link
                yield base, sandbox_id, self._path(sandbox_id, base).readlink()

    def _names(self) -> Iterator[tuple[int, str]]:
        for name in os.listdir(self._claims):  # noqa: PTH208 - a launch waits: paths take longer
            base, _, sandbox_id = name.partition(".")
            if base.isdecimal() and sandbox_id:
                yield int(base), sandbox_id

    def _path(self, sandbox_id: str, base: int) -> Path:
        return self._claims / f"{base}.{sandbox_id}"

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Be the only process on this host that gives out ranges."""
        try:
            with _opened(self._claims) as fd:
                _lock(fd)
                yield
        except OSError as error:
            raise errors.RuntimeUnusable(
                f"sandboxes can have no uids of their own: {self._claims} cannot be used: "
                f"{error.strerror or error}",
                hint=f"make {self._claims} a folder of the gateway's user, of mode 0700",
            ) from error


@contextlib.contextmanager
def _opened(folder: Path) -> Generator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(folder, flags)
    except FileNotFoundError:
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder, flags)
    try:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o022:
            raise PermissionError("others may write there")
        yield fd
    finally:
        os.close(fd)  # and with it goes the lock


def _lock(fd: int) -> None:
    """Wait for the lock, but not for ever: its holder may have been stopped."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("another gateway keeps it locked") from None
            time.sleep(LOCK_STEP)


def _processes() -> Iterator[tuple[int, set[int]]]:
    """All processes, with their uids."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = status.read_bytes()
            line = text.partition(b"\nUid:")[2].split(b"\n", 1)[0]
            # What has ended uses nothing any more, unless threads of it are still there.
            if b"\nState:\tZ" not in text or b"\nThreads:\t1\n" not in text:
                yield int(status.parent.name), set(map(int, line.split()))
