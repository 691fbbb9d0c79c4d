"""Scripts: what needs several operations and local files, written once for both clients.

A script is a generator. It yields what it wants done, and is given what came of it:

* :class:`Do`: local work that may block, which an asynchronous client leaves to a thread;
* :class:`Ask`: an operation, with what it uploads;
* :class:`Fetch`: an operation whose chunks are to be written somewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from k8e.client.operations import Operation, Progress
from k8e.client.records import Record

T = TypeVar("T")
Skipped = Callable[[str, str], object]


class Do(NamedTuple):
    """Local work."""

    work: Callable[[], Any]


class Ask(NamedTuple):
    """One operation, and what is uploaded by it."""

    operation: Operation[Any]
    source: Any = None


class Fetch(NamedTuple):
    """One download, and what writes each piece of it, which may block."""

    operation: Operation[Any]
    write: Callable[[bytes], object]


Step = Do | Ask | Fetch
Script = Generator[Step, Any, T]


class Copied(Record, frozen=False):
    """What was copied."""

    bytes: int = 0
    files: int = 0
    folders: int = 0
    links: int = 0
    skipped: int = 0
    """What cannot be copied: FIFOs, sockets, devices, and links that lead out."""
    failed: int = 0
    """Files that could not be read, of which ``on_skip`` was told."""


class Tally:
    """Counts what is copied, and tells how far it is."""

    def __init__(self, progress: Progress | None, on_skip: Skipped | None) -> None:
        self.copied = Copied()
        self.total: int | None = None
        self._progress = progress
        self._on_skip = on_skip

    def part(self) -> Progress:
        """Progress of one file among others."""
        before = self.copied.bytes

        def progress(done: int, _: int | None) -> None:
            self.copied.bytes = before + done
            if self._progress is not None:
                self._progress(self.copied.bytes, self.total)

        return progress

    def skip(self, path: str, why: str) -> None:
        """Something is not copied because of what it is. Without a listener, that is a warning."""
        self.copied.skipped += 1
        if self._on_skip is not None:
            self._on_skip(path, why)
        else:
            warnings.warn(f"{path!r} is not copied: {why}", RuntimeWarning, stacklevel=1)

    def fail(self, path: str, error: OSError) -> None:
        """Something could not be copied. Without a listener, that is the end of the copy."""
        self.copied.failed += 1
        if self._on_skip is None:
            raise error
        self._on_skip(path, error.strerror or str(error))
