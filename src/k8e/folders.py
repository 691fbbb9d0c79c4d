"""Folders that must be a user's own: nobody else may choose what is in them."""

from __future__ import annotations

import os
from pathlib import Path


def make_own(folder: Path) -> None:
    """Make a folder, if there is none; OSError if another user made it, or could replace it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = os.geteuid()
    # A link is judged by where it is: its target may be ours, and chosen by somebody else.
    for path in (folder, *folder.parents):
        owner = path.lstat().st_uid
        if owner == 0 and path != folder:
            break  # what is above is the machine's
        if owner != own:
            whose = "it" if path == folder else f"the folder {path}"
            raise PermissionError(f"{whose} belongs to uid {owner}")
    if folder.lstat().st_mode & 0o022:
        folder.chmod(0o700)
