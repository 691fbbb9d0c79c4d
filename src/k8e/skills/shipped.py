"""The skill that comes with the package, and its copies in the folders of agents."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import NamedTuple

from k8e.skills import files
from k8e.skills.files import Found
from k8e.skills.receipts import digest

PARTS = ("SKILL.md", "references/cli.md", "references/tools.md")


def texts() -> dict[str, bytes]:
    """The skill's files, by their paths in its folder."""
    root = resources.files("k8e.skills") / "skill"
    return {part: root.joinpath(*part.split("/")).read_bytes() for part in PARTS}


class Copy(NamedTuple):
    """One file of the skill, where it shall be."""

    found: Found
    content: bytes | None
    """What it shall have; None if it shall go."""
    foreign: bool
    """Whether somebody else wrote what is there now."""

    @property
    def changed(self) -> bool:
        return self.content != self.found.data


def plan(folder: Path, root: Path | None, known: dict[str, str], *, gone: bool) -> list[Copy]:
    """What becomes of each file. ``known`` has the digests of what we wrote the last time."""
    shipped = texts()
    names = {str(folder.joinpath(*part.split("/"))): part for part in shipped}
    plans: list[Copy] = []
    for path in dict.fromkeys([*names, *known]):
        content = shipped.get(names.get(path, ""))
        found = files.read(Path(path), root)
        ours = found.data is None or found.data == content
        ours = ours or digest(found.data or b"") == known.get(path)
        plans.append(Copy(found, None if gone else content, not ours))
    return plans
