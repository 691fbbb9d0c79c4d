"""Commands of a build, with progress: a build of ten minutes must not look like one that hangs."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k8e import errors

_TELL_SECONDS = 1.0
_MOST_LINES = 200  # lines that are kept of a command's output
_SHOWN_LINES = 15
_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_SECONDS_PER_MINUTE = 60


@dataclass(frozen=True)
class Command:
    """A program of a build, run without input."""

    argv: Sequence[str]
    folder: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables on top of our own; empty means that it is not set."""
    counts: str = ""
    """The meaning of a line of its output, such as ``packages compiled``."""

    def run(self, tell: Callable[[str], None]) -> None:
        """Run it; ToolFailed with the end of its output if it fails."""
        kept: deque[str] = deque(maxlen=_MOST_LINES)
        try:
            process = subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
            )
        except OSError as error:
            raise errors.ToolFailed(f"{self.argv[0]} cannot be started: {error}") from None
        with process:
            try:
                self._follow(process, kept, tell)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            said = "\n".join(list(kept)[-_SHOWN_LINES:])
            raise errors.ToolFailed(
                f"{' '.join(self.argv[:2])} ended with {process.returncode}:\n{said}",
                hint="its output above says why; run the command again to go on from here",
            )

    def environment(self) -> dict[str, str]:
        known = {**os.environ, **self.environ}
        return {name: text for name, text in known.items() if text or name not in self.environ}

    def _follow(
        self, process: subprocess.Popen[bytes], kept: deque[str], tell: Callable[[str], None]
    ) -> None:
        output = process.stdout
        if output is None:
            raise ValueError("the output is not ours")
        began = told = time.monotonic()
        rest, count = b"", 0
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while True:
                if selector.select(_TELL_SECONDS):
                    data = os.read(output.fileno(), _READ_BYTES)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    rest = rest[-_LONGEST_LINE:]
                    kept += (line.decode("utf-8", "replace") for line in lines)
                    count += len(lines)
                now = time.monotonic()
                if now >= told + _TELL_SECONDS:
                    told = now
                    done = f"{count} {self.counts}, " if count and self.counts else ""
                    tell(f"{self._what()}: {done}{duration(now - began)}")

    def _what(self) -> str:
        return " ".join(Path(word).name for word in self.argv[:2] if not word.startswith("-"))


def duration(seconds: float) -> str:
    """A duration for people."""
    minutes, rest = divmod(round(seconds), _SECONDS_PER_MINUTE)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
