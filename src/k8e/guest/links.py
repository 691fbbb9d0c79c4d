"""Links and permissions: what a copied tree needs beside its files."""

from __future__ import annotations

import errno
import os
from typing import Any

from k8e.guest.files import PATH_MAX, get_number, locate
from k8e.guest.paths import make_folders
from k8e.guest.spawn import as_user


def make_link(spec: dict[str, Any]) -> dict[str, Any]:
    """Make a symbolic link, in place of a file or link of that name if there is one."""
    path, target = locate(spec.get("path")), spec.get("target")
    if not isinstance(target, str) or not 0 < len(target) <= PATH_MAX or "\0" in target:
        raise OSError(errno.EINVAL, "the link's target is not a path")
    with as_user():
        folder, name = os.path.split(path)
        make_folders(folder)
        scratch = os.path.join(folder, f".{name[:50]}.{os.urandom(6).hex()}")
        os.symlink(target, scratch)
        try:
            os.rename(scratch, path)
        except OSError:
            os.unlink(scratch)
            raise
    return {"path": path}


def set_mode(spec: dict[str, Any]) -> dict[str, Any]:
    """Change who may read, write and execute a file of the user's own."""
    path, mode = locate(spec.get("path")), get_number(spec, "mode", -1)
    if mode < 0:
        raise OSError(errno.EINVAL, "mode is missing")
    with as_user():
        os.chmod(path, mode & 0o777)
    return {"path": path}
