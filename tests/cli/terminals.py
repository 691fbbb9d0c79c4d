"""A terminal with a command on it, for tests that type."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from typing import Any

from tests.places import COMMAND, Place, wait_readable

PATIENCE = 60.0


class Terminal:
    """The command on a terminal of its own, which also sends it signals when it is resized."""

    def __init__(
        self, place: Place, *arguments: str, rows: int = 30, columns: int = 100, **environ: str
    ) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(rows, columns)
        self.modes = self.state()
        self.seen = b""
        self.process = subprocess.Popen(
            ["setsid", "-c", *COMMAND, *arguments],
            env=place.environ | {"TERM": "xterm"} | environ,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def state(self) -> list[Any]:
        """How the terminal treats keys and output."""
        return termios.tcgetattr(self.slave)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def until(self, wanted: bytes) -> bytes:
        """Read until ``wanted`` was printed; what came, which is then forgotten."""
        while wanted not in self.seen:
            assert wait_readable(self.master, PATIENCE), self.seen
            self.seen += os.read(self.master, 65536)
        before, _, self.seen = self.seen.partition(wanted)
        return before + wanted

    def end(self) -> int:
        """Wait for the command's end; its exit code."""
        return self.process.wait(PATIENCE)
