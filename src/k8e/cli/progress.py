"""How far a copy has come, on a terminal, and what is not copied."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator

from k8e.cli import fast

_STEP = 0.1  # seconds between two pictures of the bar
_WIDTH = 30


class Bar:
    """Shows how far a copy is where somebody looks, and what is not copied everywhere."""

    def __init__(self, *, visible: bool) -> None:
        self._visible = visible
        self._began = time.monotonic()
        self._drawn = 0.0

    def draw(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if not self._visible or now < self._drawn + _STEP:
            return
        self._drawn = now
        speed = size(done / max(now - self._began, 0.001))
        bar = self._bar(done, total, now)
        fast.write(2, f"\r\x1b[K{bar}  {size(done)}  {speed}/s".encode())

    def _bar(self, done: int, total: int | None, now: float) -> str:
        if not total:  # only that something happens
            at = int((now - self._began) / _STEP) % _WIDTH
            return f"[{' ' * at}#{' ' * (_WIDTH - 1 - at)}]     "
        share = min(1.0, done / total)
        return f"[{('#' * int(share * _WIDTH)).ljust(_WIDTH)}] {share:4.0%}"

    def skip(self, path: str, why: str) -> None:
        """Tell that something is not copied. Names come from a sandbox: nothing of them may act."""
        plain = "".join(char if char.isprintable() else "\ufffd" for char in path)
        self.close()
        fast.write(2, f"k8e: warning: {plain} is not copied: {why}\n".encode("utf-8", "replace"))

    def close(self) -> None:
        if self._visible and self._drawn:
            fast.write(2, b"\r\x1b[K")


def size(count: float) -> str:
    """So many bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@contextlib.contextmanager
def shown() -> Generator[Bar]:
    """A bar that is gone afterwards."""
    bar = Bar(visible=os.isatty(2))
    try:
        yield bar
    finally:
        bar.close()
