"""Paths of both runtimes: below one folder of the sandbox, and never above it.

That is the protocols' rule, and no wall: files are opened inside the sandbox, with the rights of
its user, who may run anything there.
"""

from __future__ import annotations

import posixpath

ROOT = "/workspace"


class Outside(Exception):
    """A path leads out of the folder."""


def locate(path: str) -> str:
    """The absolute path in the sandbox of what a client names.

    A leading slash means the folder itself, as it does for upstream's runtimes.
    """
    if "\0" in path:
        raise Outside("the path has a NUL byte")
    found = posixpath.normpath(posixpath.join(ROOT, path.lstrip("/")))
    if found != ROOT and not found.startswith(f"{ROOT}/"):
        raise Outside("the path leads out of the sandbox's folder")
    return found
