"""The uids and gids that the machine's administrator set aside for a user."""

from __future__ import annotations

import pwd
from dataclasses import dataclass
from pathlib import Path

from k8e import errors

FILES = {"uid": Path("/etc/subuid"), "gid": Path("/etc/subgid")}
LEAST = 4096
"""Fewer ids than this are of no use: the user of a sandbox is number 1000 there."""


@dataclass(frozen=True)
class Range:
    """Ids from ``first`` on."""

    first: int
    count: int


def find(kind: str, uid: int) -> Range:
    """The largest range of subordinate ids of a user.

    Raises:
        RuntimeUnusable: there is none that is large enough.
    """
    name = _name(uid)
    try:
        text = FILES[kind].read_text("utf-8", "replace")
    except OSError:
        text = ""
    found = max(parse(text, {name, str(uid)}), key=lambda item: item.count, default=Range(0, 0))
    if found.count < LEAST:
        raise errors.RuntimeUnusable(
            f"{FILES[kind]} sets aside {found.count or 'no'} ids for the user {name}, and a "
            f"gateway that is not root needs {LEAST} or more",
            hint=f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name} "
            "(choose numbers that nobody else has there), or run k8e as root",
        )
    return found


def parse(text: str, owners: set[str]) -> list[Range]:
    """The ranges of ``owners`` in the text of such a file; lines that make no sense are skipped."""
    found: list[Range] = []
    for line in text.splitlines():
        owner, _, numbers = line.strip().partition(":")
        first, _, count = numbers.partition(":")
        if owner in owners and first.isdecimal() and count.isdecimal():
            found.append(Range(int(first), int(count)))
    return found


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
