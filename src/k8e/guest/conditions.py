"""What decides how an interpreter starts: its environment, and what the user has installed.

A warm interpreter saw these when it was started. If they have changed, a new one must run the code.
"""

from __future__ import annotations

import errno
import os

from k8e.guest.spawn import as_user

NAMES_MOST = 5000  # in a folder of the user's packages; looking through more would keep us
READ_MOST = 64  # files in there that Python reads at its start
# What an interpreter reads when it starts, or a library that it is made of.
_DECISIVE = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TZDIR", "LOCPATH", "GCONV_PATH", "NLSPATH")
# What images of Python say of themselves; Python does not look at it.
_OF_IMAGES = (
    "PYTHON_VERSION PYTHON_SHA256 PYTHON_PIP_VERSION PYTHON_SETUPTOOLS_VERSION "
    "PYTHON_GET_PIP_URL PYTHON_GET_PIP_SHA256"
).split()
_DECISIVE_PREFIXES = ("PYTHON", "LD_", "LC_", "MALLOC_", "GLIBC_")
_NODE_PREFIXES = (*_DECISIVE_PREFIXES[1:], "UV_", "V8_", "ICU_", "OPENSSL_", "SSL_")
# What libraries read that are not written in Python, when a module of theirs is loaded.
_NATIVE_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "NPY_", "NUMEXPR_", "NUMBA_"),
    *("CUDA_", "TF_", "GRPC_", "OPENSSL_", "SSL_"),
)
EVERY_VARIABLE = "*"  # for a module that looked at all of them

FileState = tuple[str, int, int, int]


def start_conditions(env: dict[str, str]) -> dict[str, str] | None:
    """What of an environment decides how Python starts; None if no warm one may be used."""
    python = [name for name in env if name.startswith("PYTHON") and name not in _OF_IMAGES]
    if env.get("K8E_WARM") == "0" or python:
        return None
    return {
        name: value
        for name, value in env.items()
        if name in _DECISIVE or (name.startswith(_DECISIVE_PREFIXES) and name not in _OF_IMAGES)
    }


def node_conditions(env: dict[str, str]) -> dict[str, str] | None:
    """What of an environment decides how Node.js starts; None if no warm one may be used."""
    if env.get("K8E_WARM") == "0" or any(name.startswith("NODE_") for name in env):
        return None
    return {
        name: value
        for name, value in env.items()
        if name in _DECISIVE or name.startswith(_NODE_PREFIXES)
    }


def suits(read: list[str], started_with: dict[str, str], env: dict[str, str]) -> bool:
    """Whether modules that have ``read`` these variables would find the same in ``env``."""
    if EVERY_VARIABLE in read:
        return started_with == env
    names = {*started_with, *env}
    native = [name for name in names if name.startswith(_NATIVE_PREFIXES)]
    return all(started_with.get(name) == env.get(name) for name in [*read, *native])


def site_state(home: str) -> list[FileState]:
    """The user's own folders of packages, and the files in there that Python reads at its start.

    OSError if there are more than we want to look at before every run.
    """
    library = os.path.join(home, ".local/lib")
    with as_user():
        paths = [library]
        for name in _names_in(library):
            folder = os.path.join(library, name, "site-packages")
            paths.append(folder)
            paths += [os.path.join(folder, file) for file in _names_in(folder) if _is_read(file)]
            if len(paths) > READ_MOST:
                raise OSError(errno.E2BIG, "too many files that Python reads at its start")
        return [_file_state(path) for path in paths]


def _is_read(file: str) -> bool:
    return file.endswith(".pth") or file.startswith(("sitecustomize", "usercustomize"))


def site_changed(state: list[FileState]) -> bool:
    """Whether a new interpreter could start differently from one that saw ``state``."""
    with as_user():
        return [_file_state(item[0]) for item in state] != state


def _names_in(folder: str) -> list[str]:
    try:
        listing = os.scandir(folder)
    except OSError:
        return []
    names: list[str] = []
    with listing:
        for entry in listing:
            names.append(entry.name)
            if len(names) > NAMES_MOST:
                raise OSError(errno.E2BIG, "too many packages", folder)
    return names


def _file_state(path: str) -> FileState:
    try:
        found = os.stat(path)
    except OSError:
        return (path, 0, 0, 0)
    return (path, found.st_ino, found.st_mtime_ns, found.st_size)
