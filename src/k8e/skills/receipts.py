"""What was installed where, so that it can be taken away again and nothing else.

A receipt of a configuration says which bytes were replaced. As long as nobody changed the file,
they are put back, and the file is what it was, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, cast

from k8e.skills import files

VERSION = 1
_FOLDER = Path(".k8e") / "agents"


class Change(NamedTuple):
    """One span of a text that became another one."""

    at: int
    old: str
    new: str

    @classmethod
    def between(cls, before: str, after: str) -> Change:
        limit = min(len(before), len(after))
        start = 0
        while start < limit and before[start] == after[start]:
            start += 1
        end = 0
        while end < limit - start and before[-1 - end] == after[-1 - end]:
            end += 1
        return cls(start, before[start : len(before) - end], after[start : len(after) - end])

    def undo(self, text: str) -> str | None:
        """The text of before; None if this change is not in there as it was made."""
        end = self.at + len(self.new)
        if text[self.at : end] != self.new:
            return None
        return text[: self.at] + self.old + text[end:]


class Receipt(NamedTuple):
    """What was done to one agent's files."""

    config: str
    digest: str
    """Of the configuration as we left it."""
    change: Change | None
    """None if somebody else changed the file between two installations."""
    created: bool
    """Whether there was no such file before."""
    made_holder: bool
    """Whether the object around our entry is ours, too."""
    skill: dict[str, str]
    """Digests of the skill's files, by path."""
    folders: list[str]
    """Folders that were made for all this."""
    backup: str = ""

    def original(self, text: str) -> str | None:
        """The configuration of before, if nobody touched what we left."""
        if self.change is None or digest(text.encode()) != self.digest:
            return None
        return self.change.undo(text)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Receipts:
    """All receipts of a user, in one file that only the user can read: entries may hold a token."""

    def __init__(self, home: Path) -> None:
        self.folder = home / _FOLDER
        self._file = self.folder / "receipts.json"
        self._all: dict[str, Any] = self._load()

    def _load(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(files.read_private(self._file))
        except (OSError, ValueError):
            return {}  # without receipts, uninstalling looks for what looks like ours
        if not isinstance(found, dict):
            return {}
        told = cast("dict[str, Any]", found)
        return told.get("receipts", {}) if told.get("version") == VERSION else {}

    def get(self, key: str) -> Receipt | None:
        try:
            found: dict[str, Any] = dict(self._all[key])
            change = found.pop("change")
            return Receipt(change=None if change is None else Change(*change), **found)
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, key: str, receipt: Receipt | None) -> None:
        if receipt is None:
            self._all.pop(key, None)
        else:
            self._all[key] = receipt._asdict()
        if not self._all:
            files.remove_private(self._file)
            files.remove_folders([self.folder])
            return
        content = json.dumps({"version": VERSION, "receipts": self._all}, indent=1)
        files.write_private(self._file, content.encode())

    def back_up(self, name: str, path: Path, data: bytes) -> Path:
        """Keep what a file had before; the newest of each path."""
        mark = digest(str(path).encode())[:8]
        target = self.folder / "backups" / f"{name}-{mark}-{path.name}"
        files.write_private(target, data)
        return target
