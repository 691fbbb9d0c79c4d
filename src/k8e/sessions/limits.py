"""Limits that a session has met, as reported with the end of a run and noted in its events.

The guest reports what it sees in its own sandbox, the kernel what it refused or killed. The guest
is hostile, and may lie about itself: only known names count, and the numbers of limits are the
gateway's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from k8e import metrics
from k8e.guest import wire
from k8e.model import MIB, Limits

MET = {
    "memory": "the session's memory, or a folder that is in memory, is full ({value} in all)",
    "pids": "the session has as many processes and threads as it may ({value})",
    "disk": "/workspace is full ({value})",
    "inodes": "/workspace has as many files as it may ({value})",
    "open_files": "a process has as many open files as it may ({value})",
    "output": "the run has printed as much as it may ({value}), and was stopped",
}
"""What users read when they met a limit of the session."""
MAX_TIMEOUT = 7 * 24 * 3600.0
"""Seconds that a run may ask for."""
TIMEOUT = "timeout"
"""The limit that a run has of its own."""
DISK = "disk"
FLAGS = {"open_files": "--open-files", "output": "--max-output"}
BYTES_PER_INODE = 8192  # where the limit has no unit of its own
_SIZES = ("memory", "disk", "output")
_ALL_WELL = wire.pack({"code": 0})[len(wire.pack({})) :]
"""How the EXIT of most programs says that nothing is wrong."""
_TIMED_OUT = b"timed_out"  # a program may end well after it is told to end


def describe(limits: Limits, name: str) -> dict[str, Any]:
    """Describe one limit that was met: its name, its value, and how to get more."""
    value: int = getattr(limits, name) or limits.disk // BYTES_PER_INODE
    text = f"{value / MIB:g} MiB" if name in _SIZES else f"{value:,}"
    met = MET[name].format(value=text)
    flag = FLAGS.get(name, f"--{name}")
    more = f"create a session with more: {flag}, or limits={{'{name}': …}}"
    return {"limit": name, "value": value, "message": f"limit {name}: {met}; {more}"}


def describe_full_disk() -> dict[str, Any]:
    """Explain that a workspace is full before its own limit, because the disk below it is."""
    met = "/workspace cannot grow, because the disk of the gateway is nearly full"
    more = "delete files in it, or ask the gateway's operator to make room"
    return {"limit": DISK, "value": 0, "message": f"limit {DISK}: {met}; {more}"}


def describe_timeout(seconds: Any) -> dict[str, Any]:
    """Describe the time limit that a run has met; ``seconds`` is the guest's word for it."""
    known: float = seconds if type(seconds) in (int, float) and 0 < seconds <= MAX_TIMEOUT else 0
    text = f" ({known:g} s)" if known else ""
    met = f"the run took longer than it may{text}, and was stopped"
    more = "run it with more: --timeout, or timeout=…"
    return {
        "limit": TIMEOUT,
        "value": int(known) if known == int(known) else known,
        "message": f"limit {TIMEOUT}: {met}; {more}",
    }


class LimitWatch:
    """Finds out which limits a live session has met since the last look."""

    def __init__(self, count_hits: Callable[[], Mapping[str, int]], limits: Limits) -> None:
        """``count_hits`` returns how often each limit of the sandbox was met so far."""
        self._count_hits = count_hits
        self._limits = limits
        self._seen: Mapping[str, int] = {}
        self.is_bounded: Callable[[], bool] = lambda: False
        """Whether its workspace may grow by less than it could: the gateway's disk has no more."""

    def catch_up(self) -> None:
        """Skip what happened before now: another gateway has reported it."""
        self._seen = self._count_hits()

    def news(self) -> list[str]:
        """The limits that the sandbox has met since the last call."""
        now = self._count_hits()
        found = [name for name, count in now.items() if count > self._seen.get(name, 0)]
        self._seen = now
        return found

    def amend(self, body: bytes) -> bytes:
        """Add the limits that the program may have failed for to an EXIT."""
        return self.examine(body)[0]

    def examine(self, body: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """An EXIT with the limits that the program may have failed for, and these limits."""
        if _ALL_WELL in body and b"limits" not in body and _TIMED_OUT not in body:
            return body, []
        try:
            told = wire.unpack_dict(body)
        except wire.WireError:  # its reader will report that; the kernel's count is valid anyway
            return body, self.tell(self.news())
        said: Any = told.pop("limits", None)
        met = self.tell([*self.news(), *(said if isinstance(said, list) else ())])
        seconds = told.pop("timeout", 0)
        if told.get("status") == "timed_out":
            metrics.count_limit(TIMEOUT)
            met.insert(0, describe_timeout(seconds))  # that is what stopped it
        return wire.pack({**told, "limits": met} if met else told), met

    def tell(self, names: Iterable[Any]) -> list[dict[str, Any]]:
        """The limits that were met, each once, for people and programs."""
        known = dict.fromkeys(name for name in names if isinstance(name, str) and name in MET)
        for name in known:
            metrics.count_limit(name)
        return [self._describe(name) for name in known]

    def _describe(self, name: str) -> dict[str, Any]:
        if name == DISK and self.is_bounded():
            return describe_full_disk()
        return describe(self._limits, name)
