"""The whole contract between runtimes and everything above them.

Sessions and the gateway import this module and ``registry``, and nothing else of the package: they
know neither control groups nor folders of this host, nor the name of any runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from k8e import errors
from k8e.link import Link
from k8e.model import Limits, Rootfs, SandboxSpec

if TYPE_CHECKING:
    from k8e.disk import Reserve
    from k8e.images.service import Images
    from k8e.settings import Settings


class NotRemoved(errors.K8eError):
    """Something of a sandbox is still there though everything was tried; the message says what.

    The caller need not try again: the runtimes know of it and do (``Runtimes.leftovers``).
    """


@dataclass(frozen=True)
class Leftover:
    """A sandbox that has ended and could not be removed completely yet."""

    sandbox_id: str
    what: str
    """What of it is left, in words."""
    since: float
    """When it was to be removed, in seconds since 1970."""
    tries: int = 1


@dataclass(frozen=True)
class Feature:
    """One thing that a runtime can or cannot do on this host."""

    name: str
    usable: bool
    detail: str = ""
    """What was found, or why it is not usable."""
    fix: str = ""
    """What the operator can do about it."""


def _no_features() -> list[Feature]:
    return []


@dataclass(frozen=True)
class Support:
    """What a probe found. ``usable`` means that a sandbox really started and answered."""

    runtime: str
    usable: bool
    detail: str = ""
    fix: str = ""
    features: list[Feature] = field(default_factory=_no_features)

    def has(self, feature: str) -> bool:
        return any(item.usable for item in self.features if item.name == feature)


def _python() -> dict[str, tuple[str, ...]]:
    return {"python": ()}


@dataclass(frozen=True)
class Binding:
    """What makes a sandbox a session's; given once, when the sandbox is handed over."""

    env: dict[str, str]
    cwd: str = ""
    """Where commands start that do not say it; made if missing. Empty for ``/workspace``."""
    limits: Limits | None = None
    """The session's own, where they are not those that the sandbox was launched with.

    All of them hold from then on. What a program can still see of the old ones: in gVisor, the
    total of ``/proc/meminfo``. Another ``disk`` costs as much as a new workspace, which is most of
    what settling saved; the others are written to a few files.
    """
    warm: Mapping[str, Sequence[str]] = field(default_factory=_python)
    """Languages with the modules that are loaded ahead; others wait once they were used. Nothing
    waits where this is empty."""
    hidden: tuple[str, ...] = field(default=(), repr=False)
    """Values that the session's transcript must not show."""
    token: str = field(default="", repr=False)
    """The sandbox's own token, for ``SANDBOX_TOKEN`` and ``/run/k8e/token``; empty for none."""


class Guest(Protocol):
    """A live sandbox with our guest in it."""

    sandbox_id: str

    @property
    def link(self) -> Link | None:
        """The link, if the guest is connected right now."""
        ...

    async def connect(self) -> Link:
        """The link; waits for a guest that is dialling, and says why where none will."""
        ...

    async def settle(self, warm: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Do ahead what needs no session: a workspace, and interpreters with modules loaded.

        ``warm`` has the languages and, for each, what is loaded before any code is there. The
        answer is what of this could not be done and why, in words; none of it keeps a session from
        being bound.
        """
        ...

    async def bind(self, binding: Binding) -> None:
        """Give the sandbox its workspace and its session's environment and limits."""
        ...

    async def wait(self) -> str:
        """Wait until the sandbox is gone; the reason, in words for a user."""
        ...

    def limit_hits(self) -> Mapping[str, int]:
        """How often the sandbox was held to a limit so far, by the limit's name (``Limits``).

        Only what the guest cannot see itself. Asked whenever a program fails, so it must be quick.
        """
        ...

    async def freeze(self) -> None:
        """Stop everything in the sandbox where it is; no error where it is stopped already.

        A command's time-out does not run on meanwhile.
        """
        ...

    async def thaw(self) -> None:
        """Let everything go on; no error where nothing was stopped."""
        ...

    async def heal_workspace(self) -> bool:
        """Put a repaired copy in the place of a workspace that takes no more writes.

        Programs stand still meanwhile; files that they have open stay those of the broken one.
        False where that cannot be done: then it is as it was.
        """
        ...

    async def kill(self) -> None:
        """End the sandbox, frozen or not, and remove everything that belongs to it.

        Raises:
            NotRemoved: something of it resists.
        """
        ...


class Runtime(Protocol):
    """Starts isolated guests."""

    name: str
    networked: bool
    """Whether its sandboxes can be given a network."""

    async def probe(self) -> Support:
        """What this host can do, and why not. May start sandboxes; bounded in time."""
        ...

    def can_change(self, launched: Limits, asked: Limits) -> bool:
        """Whether a sandbox of ``launched`` limits can be bound to a session with others."""
        ...

    async def fetch(self, rootfs: Rootfs) -> None:
        """Have a root file system here, before a launch needs it; that may take minutes."""
        ...

    async def launch(self, spec: SandboxSpec) -> Guest:
        """Start a sandbox; returns when its guest has connected."""
        ...

    async def adopt(self) -> list[Guest]:
        """The sandboxes that are still running after a restart of the gateway."""
        ...

    async def purge(self, sandbox_id: str) -> None:
        """Remove every trace of a sandbox; works with no live process, and twice.

        Raises:
            NotRemoved: something of it resists. It keeps its record and its uids meanwhile.
        """
        ...


class RegisteredRuntime(Runtime, Protocol):
    """A runtime that sessions can have; ``registry.register`` makes it known."""

    title: str
    """How texts for people call it."""
    aliases: Sequence[str]
    """Other names by which clients may ask for it."""
    strength: int
    """How well it isolates: a session that names no runtime gets the strongest that works."""
    weakness: str
    """What its sandboxes do not protect from, told to users who get it in place of a stronger."""

    def facts(self) -> Sequence[str]:
        """What a probe rests on beside the machine; asked for each new session, so be quick."""
        ...

    def recall(self, support: Support) -> None:
        """Choose again what an earlier probe chose; its facts are the same."""
        ...

    def excess(self, limits: Limits) -> str:
        """The limits that no sandbox here can reach, in words; they are accepted all the same."""
        ...

    def remains(self) -> set[str]:
        """The sandboxes of which anything is here, running or not, half made or half removed."""
        ...

    async def find_greedy(self, sandbox_ids: Iterable[str]) -> Mapping[str, str]:
        """Which of these sandboxes must end, and why: they take what no limit can count.

        Asked every few seconds while the runtime has sandboxes.
        """
        ...


@dataclass(frozen=True)
class DiskReport:
    """The state of the disk of all workspaces, and how much of it they were given."""

    free: int
    """Bytes of the disk that nothing uses."""
    kept: int
    """Bytes of them that workspaces do not get."""
    promised: int
    """Bytes that workspaces may still take."""
    held: tuple[str, ...] = ()
    """Sandboxes whose workspaces are held back."""
    failed: tuple[str, ...] = ()
    """Sandboxes whose workspaces can no longer be written, because their file system failed."""
    another: int = 1 << 62
    """Bytes that one more workspace could count on."""


class SharedDisk(Protocol):
    """The disk that the workspaces of several sandboxes share."""

    @property
    def report(self) -> DiskReport:
        """What the last look found."""
        ...

    def __len__(self) -> int:
        """How many workspaces share it."""
        ...

    def is_bounded(self, sandbox_id: str) -> bool:
        """Whether a workspace may grow by less than its own limit would let it."""
        ...

    def is_growing(self, sandbox_id: str) -> bool:
        """Whether a workspace has taken room of late."""
        ...

    def watch(self, tell: Callable[[DiskReport], object]) -> Callable[[], None]:
        """Look again and again in a thread, in which ``tell`` is called; how to stop it."""
        ...


LendNetwork = Callable[[], AbstractAsyncContextManager[str]]
"""Lends the path of a network namespace to try a runtime with; empty where there is none."""


class Machine(Protocol):
    """The machine of a gateway, as the gateway's process needs it."""

    settings: Settings
    images: Images
    """The images that were pulled."""
    reserve: Reserve | None
    """What the gateway keeps of the disk for itself."""

    def running(self) -> list[str]:
        """The sandboxes whose processes are there, whichever gateway made them."""
        ...

    def prepare(self) -> None:
        """Make the folders; raises an error that says what is wrong with them."""
        ...

    def prune_images(self) -> list[str]:
        """Remove the layers that no sandbox and no pulled image uses; their digests."""
        ...

    def leave(self) -> None:
        """Give back what only matters while there are sandboxes; the gateway ends."""
        ...
