"""Processes by more than their number, which the kernel gives to another one day."""

from __future__ import annotations

import contextlib
from pathlib import Path


def start_time(pid: int) -> int:
    """When a process started, in kernel ticks; 0 if there is no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return int(text.rpartition(")")[2].split()[19])
    return 0
