"""The whole contract of a runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from k8e import errors
from k8e.link import Link
from k8e.model import Limits, Rootfs, SandboxSpec


class NotRemoved(errors.K8eError):
    """Something of a sandbox is still there though all was tried; the message says what.

    Nobody has to try again: the host knows, and goes on with it.
    """


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
    """What turns a sandbox into one session's: said once, when it is handed over."""

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

    async def freeze(self) -> None:
        """Stop everything in the sandbox where it is; no error where it is stopped already.

        A command's time-out does not run on meanwhile.
        """
        ...

    async def thaw(self) -> None:
        """Let everything go on; no error where nothing was stopped."""
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
