"""What runs in the sandbox, as a program in it would see it."""

from __future__ import annotations

import os
from typing import Any

MOST_PROCESSES = 1024  # in one answer
STAT_BYTES = 4096
START_TIME = 19  # its place among the fields of ``stat`` that come after the name


def list_processes(_: dict[str, Any]) -> dict[str, Any]:
    """All processes but the guest itself, or in gVisor what stands in its place.

    Only ``stat`` is read: ``cmdline`` is memory of the process, which could keep us waiting.
    """
    found: list[dict[str, Any]] = []
    for number in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if number > 1 and len(found) < MOST_PROCESSES:
            entry = _describe_process(number)
            if entry is not None:
                found.append(entry)
    return {"processes": found}


def _describe_process(number: int) -> dict[str, Any] | None:
    found = read_stat("/proc", number)
    if found is None:
        return None  # it ended while we looked
    comm, fields = found
    return {"pid": number, "ppid": int(fields[1]), "comm": comm, "state": fields[0]}


def read_stat(folder: str, number: int) -> tuple[str, list[str]] | None:
    """The name of a process and what follows it in ``stat``: state, parent, group, session ..."""
    try:
        fd = os.open(f"{folder}/{number}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.fsdecode(os.read(fd, STAT_BYTES))
        finally:
            os.close(fd)
    except OSError:
        return None
    # The name is the program's to choose, and may have parentheses of its own.
    before, _, after = text.rpartition(") ")
    fields = after.split()
    return (before.partition(" (")[2], fields) if len(fields) > START_TIME else None
