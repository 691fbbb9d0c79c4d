"""Other systems that run here: each starts a sandbox of its own for one command.

They are found by trying them. What is missing is told with the reason; ``make bench-peers``
installs them. The root file system is the same for all: the host's ``/usr`` read-only, as in k8e.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import timing
from k8e.runtimes import cgroups

HOW_TO_INSTALL = "not installed; make bench-peers installs it"
SKELETON = ("usr", "etc", "proc", "sys", "dev", "tmp", "run", "var/tmp", "workspace")
CGROUP = "k8e-bench-peers"
LINKS = ("bin", "sbin", "lib", "lib64")
IDLE = ["sleep", "infinity"]
"""What a standing sandbox runs while it is not used."""


class Unavailable(Exception):
    """A peer that does not work here; the message says why."""


class Standing(NamedTuple):
    """How a system keeps a sandbox for more than one command: its command lines."""

    command: list[str]
    flags: list[str]
    """With which a sandbox is made, its root last."""
    at_once: tuple[str, ...] = ()
    """With which one is removed that does not end when it is asked to."""

    def start(self, name: str) -> list[str]:
        """Makes one of this name, in which nothing happens."""
        return [*self.command, "run", "--detach", f"--name={name}", *self.flags, *IDLE]

    def exec(self, name: str, argv: Sequence[str]) -> list[str]:
        return [*self.command, "exec", name, *argv]

    def remove(self, name: str) -> list[str]:
        return [*self.command, "rm", "--force", *self.at_once, name]


class Peer(NamedTuple):
    """One way to run a command in a sandbox that is made for it."""

    name: str
    kind: str
    """What k8e's runtimes it is like: ``container`` or ``gvisor``."""
    wrap: Callable[[Sequence[str]], list[str]]
    """The command line that runs another one in a new sandbox, and removes the sandbox."""
    env: dict[str, str]
    note: str = ""
    standing: Standing | None = None
    """None for a system whose sandboxes end with their one command."""

    def first_line(self, argv: Sequence[str]) -> float:
        return timing.first_line(self.wrap(argv), self.env)

    def burst(self, argv: Sequence[str], count: int) -> list[float]:
        return timing.burst([self.wrap(argv) for _ in range(count)], self.env)

    def check(self) -> Peer:
        """Run something; Unavailable with the peer's own words if that does not work."""
        try:
            told = timing.output(self.wrap(["echo", "1"]), self.env)
        except (timing.ProgramFailed, OSError) as error:
            raise Unavailable(str(error)) from None
        if told != "1\n":
            raise Unavailable(f"echo 1 printed {told[:80]!r}")
        return self


def environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }


def make_root(folder: Path) -> Path:
    """A root file system without anything of its own; ``/usr`` is mounted into it."""
    root = folder / "rootfs"
    for name in SKELETON:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        if Path("/", name).exists() and not os.path.lexists(root / name):
            (root / name).symlink_to(f"usr/{name}")
    return root


def remove_cgroups() -> None:
    """Remove the cgroup that peers were told to put theirs in."""
    for hierarchy in cgroups.hierarchies():
        for folder in sorted((hierarchy / CGROUP).glob("**/"), reverse=True):
            with contextlib.suppress(OSError):  # somebody else uses it
                folder.rmdir()


Finder = Callable[[Path, dict[str, str]], contextlib.AbstractContextManager[list[Peer]]]


@contextlib.contextmanager
def found(
    folder: Path, tools: dict[str, str], skipped: Callable[[str, str], None]
) -> Generator[list[Peer]]:
    """The peers that work here, for as long as the block runs. ``tools`` are runc and runsc."""
    from benchmarks.peers import docker, podman, srt

    finders: dict[str, Finder] = {
        "podman": podman.found,
        "docker": docker.found,
        "sandbox-runtime": srt.found,
    }
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(remove_cgroups)
        peers: list[Peer] = []
        for name, find in finders.items():
            place = folder / name
            place.mkdir()
            try:
                peers += stack.enter_context(find(place, tools))
            except Unavailable as error:
                skipped(name, str(error))
        usable: list[Peer] = []
        for peer in peers:
            try:
                usable.append(peer.check())
            except Unavailable as error:
                skipped(peer.name, str(error))
        yield usable
