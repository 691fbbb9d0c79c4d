"""How far a copy has come: a bar on a terminal, and what is told in the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from k8e.cli import fast

_STEP = 0.1  # seconds between two pictures of the bar
_WIDTH = 30


class Report:
    """Counts what is copied, and shows it where somebody looks."""

    def __init__(self, *, visible: bool) -> None:
        self.files = self.folders = self.links = self.skipped = self.failed = 0
        self.bytes = 0
        self._total = 0
        self._visible = visible
        self._began = time.monotonic()
        self._drawn = 0.0

    def expect(self, total: int) -> None:
        """So many bytes are to come."""
        self._total = total

    def counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The same chunks, while they are counted."""
        for chunk in chunks:
            self.bytes += len(chunk)
            self._draw()
            yield chunk

    def reached(self, done: int, total: int) -> None:
        """So many bytes are done, of ``total`` if that is known."""
        self.bytes, self._total = done, total
        self._draw()

    def skip(self, path: str, why: str, *, failed: bool = False) -> None:
        """Tell that something is not copied. Names come from a sandbox: nothing of them may act."""
        self.skipped += not failed
        self.failed += failed
        plain = "".join(char if char.isprintable() else "\ufffd" for char in path)
        self._clear()
        fast.write(2, f"k8e: warning: {plain} is not copied: {why}\n".encode("utf-8", "replace"))

    def summary(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "failed": self.failed,
            "files": self.files,
            "folders": self.folders,
            "links": self.links,
            "skipped": self.skipped,
        }

    def _draw(self) -> None:
        now = time.monotonic()
        if not self._visible or now < self._drawn + _STEP:
            return
        self._drawn = now
        speed = _size(self.bytes / max(now - self._began, 0.001))
        line = f"{self._bar(now)}  {_size(self.bytes)}  {speed}/s"
        if self.files:
            line += f"  {self.files} files"
        fast.write(2, f"\r\x1b[K{line}".encode())

    def _bar(self, now: float) -> str:
        if not self._total:  # only that something happens
            at = int((now - self._began) / _STEP) % _WIDTH
            return f"[{' ' * at}#{' ' * (_WIDTH - 1 - at)}]     "
        share = min(1.0, self.bytes / self._total)
        return f"[{('#' * int(share * _WIDTH)).ljust(_WIDTH)}] {share:4.0%}"

    def _clear(self) -> None:
        if self._visible and self._drawn:
            fast.write(2, b"\r\x1b[K")

    def close(self) -> None:
        self._clear()


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@contextlib.contextmanager
def shown() -> Generator[Report]:
    """A report whose bar is gone afterwards."""
    report = Report(visible=os.isatty(2))
    try:
        yield report
    finally:
        report.close()
