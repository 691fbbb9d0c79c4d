"""Python and Node as warm interpreters: how each is started, and what decides that.

A warm interpreter saw these when it was started. If they have changed, a new one must run the code.
"""

from __future__ import annotations

import errno
import marshal
import os
import time
from typing import Any

from k8e.guest.spawn import STEADY, UID, as_user, find_program

NAMES_MOST = 5000  # in a folder of the user's packages; looking through more would keep us
SITE_SECONDS = 1.0  # of CPU time, for all of them; links can make the way to each of them long
READ_MOST = 64  # files in there that Python reads at its start
# What an interpreter reads when it starts, or a library that it is made of.
_DECISIVE = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TZDIR", "LOCPATH", "GCONV_PATH", "NLSPATH")
# What images of Python say of themselves; Python does not look at it.
_OF_IMAGES = (
    "PYTHON_VERSION PYTHON_SHA256 PYTHON_PIP_VERSION PYTHON_SETUPTOOLS_VERSION "
    "PYTHON_GET_PIP_URL PYTHON_GET_PIP_SHA256"
).split()
# Of the linker: what they name may be the user's, and change while an interpreter waits.
_LINKING = "LD_"
_DECISIVE_PREFIXES = ("LC_", "MALLOC_", "GLIBC_")
_NODE_PREFIXES = (*_DECISIVE_PREFIXES, "UV_", "V8_", "ICU_", "OPENSSL_", "SSL_")
# What libraries read that are not written in Python, when a module of theirs is loaded.
_NATIVE_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "NPY_", "NUMEXPR_", "NUMBA_"),
    *("CUDA_", "TF_", "GRPC_", "OPENSSL_", "SSL_"),
)
EVERY_VARIABLE = "*"  # for a module that looked at all of them

FileState = tuple[str, int, int, int]


def start_conditions(env: dict[str, str]) -> dict[str, str] | None:
    """What of an environment decides how Python starts; None if no warm one may be used."""
    own = [name for name in env if name.startswith("PYTHON") and name not in _OF_IMAGES]
    return None if own else _conditions(env, _DECISIVE_PREFIXES)


def node_conditions(env: dict[str, str]) -> dict[str, str] | None:
    """What of an environment decides how Node.js starts; None if no warm one may be used."""
    own = any(name.startswith("NODE_") for name in env)
    return None if own else _conditions(env, _NODE_PREFIXES)


def _conditions(env: dict[str, str], prefixes: tuple[str, ...]) -> dict[str, str] | None:
    if env.get("K8E_WARM") == "0" or any(name.startswith(_LINKING) for name in env):
        return None
    return {
        name: value for name, value in env.items() if name in _DECISIVE or name.startswith(prefixes)
    }


def suits(read: list[str], started_with: dict[str, str], env: dict[str, str]) -> bool:
    """Whether modules that have ``read`` these variables would find the same in ``env``."""
    if EVERY_VARIABLE in read:
        return started_with == env
    names = {*started_with, *env}
    native = [name for name in names if name.startswith(_NATIVE_PREFIXES)]
    return all(started_with.get(name) == env.get(name) for name in [*read, *native])


def is_installed(program: str) -> bool:
    """Whether a Python is of the machine or the image, and has no packages but theirs.

    One in a virtual environment, or one of the user's, has them where we do not look.
    """
    with as_user():
        try:
            owner = os.lstat(program).st_uid
        except OSError:
            return False
        return owner != UID and not any(map(os.path.exists, _venv_files(program)))


def _venv_files(program: str) -> list[str]:
    """What makes a Python one of a virtual environment; it goes by the name, not by the file."""
    folder = os.path.dirname(program)
    return [os.path.join(place, "pyvenv.cfg") for place in (folder, os.path.dirname(folder))]


def site_state(home: str, program: str) -> list[FileState]:
    """The user's own folders of packages, and the files in there that Python reads at its start.

    OSError if there are more than we want to look at before every run.
    """
    library = os.path.join(home, ".local/lib")
    until = time.process_time() + SITE_SECONDS
    with as_user():
        paths = [library]
        if not program.startswith(STEADY):  # on the way to it there may be links of the user's
            paths += [program, *_venv_files(program)]
        for name in _names_in(library):
            _check_time(until)
            folder = os.path.join(library, name, "site-packages")
            paths.append(folder)
            paths += [os.path.join(folder, file) for file in _names_in(folder) if _is_read(file)]
            if len(paths) > READ_MOST:
                raise OSError(errno.E2BIG, "too many files that Python reads at its start")
        return _file_states(paths, until)


def _is_read(file: str) -> bool:
    return file.endswith(".pth") or file.startswith(("sitecustomize", "usercustomize"))


def site_changed(state: list[FileState]) -> bool:
    """Whether a new interpreter could start differently from one that saw ``state``."""
    try:
        with as_user():
            until = time.process_time() + SITE_SECONDS
            return _file_states([item[0] for item in state], until) != state
    except OSError:
        return True


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


def _file_states(paths: list[str], until: float) -> list[FileState]:
    states: list[FileState] = []
    for path in paths:
        _check_time(until)
        states.append(_file_state(path))
    return states


def _check_time(until: float) -> None:
    """OSError where the way to the user's packages is so long that every run would wait for it."""
    if time.process_time() > until:
        raise OSError(errno.ELOOP, "looking at the user's packages takes too long")


def _file_state(path: str) -> FileState:
    try:
        found = os.stat(path)
    except OSError:
        return (path, 0, 0, 0)
    return (path, found.st_ino, found.st_mtime_ns, found.st_size)


CODE_MOST = 32 << 10  # bytes; longer code takes longer to compile than we may wait for an answer
BOOT_FILE = "/proc/self/fd/100"  # boot.py makes it
_ANEW = "it starts anew each time"


def boot_folder(guest_file: str) -> str:
    """Where the boot programs of a packed guest are."""
    return os.path.splitext(guest_file)[0].replace("guest-", "boot-")


class PythonKind:
    """``python3 -c``, or ``python3 FILE`` for several lines."""

    language = "python"
    program = "python3"
    most_ready = 3
    reads_input = True
    loads_modules = True

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def is_there(self) -> bool:
        return os.path.isdir(self._folder)

    def command(self, passed: list[int], modules: list[str]) -> tuple[list[str], dict[str, str]]:
        """What is started, and the variables that it finds besides its environment."""
        told = " ".join([self._folder, *map(str, passed), *modules])
        return [self.program, BOOT_FILE], {"PYTHONPATH": self._folder, "K8E_BOOT": told}

    def conditions(self, env: dict[str, str]) -> dict[str, str] | None:
        return start_conditions(env)

    def obstacle(self, env: dict[str, str]) -> str:
        """Why none may wait in this environment; empty if one may."""
        if start_conditions(env) is None:
            return f"{_ANEW} with PYTHON…, LD_… or K8E_WARM=0 in its environment"
        if not is_installed(find_program(self.program, env["PATH"], "/")):
            return f"{_ANEW} in a virtual environment, or where it is the session's own"
        return ""

    def site(self, env: dict[str, str]) -> list[FileState]:
        return site_state(env["HOME"], find_program(self.program, env["PATH"], "/"))

    def takes(self, spec: dict[str, Any]) -> bool:
        """Whether a warm one could run this as a new one would."""
        return _is_plain_text(spec["code"])

    def message(self, spec: dict[str, Any], env: dict[str, str], cwd: str) -> bytes | None:
        pairs = [(os.fsencode(name), os.fsencode(value)) for name, value in env.items()]
        what = (spec["code"], spec.get("script") or "", os.fsencode(cwd))
        return marshal.dumps((*what, pairs, bool(spec.get("stdin"))), 2)


class NodeKind:
    """``node -e``."""

    language = "node"
    program = "node"
    most_ready = 1  # it takes five times as much memory as Python
    reads_input = False
    loads_modules = False

    def __init__(self, folder: str) -> None:
        self._boot = folder + "/node.js"

    def is_there(self) -> bool:
        return os.path.isfile(self._boot)

    def command(self, passed: list[int], modules: list[str]) -> tuple[list[str], dict[str, str]]:
        variables = {"NODE_OPTIONS": "--require=" + self._boot, "K8E_BOOT": str(passed[0])}
        return [self.program, "-e", " "], variables

    def conditions(self, env: dict[str, str]) -> dict[str, str] | None:
        return node_conditions(env)

    def obstacle(self, env: dict[str, str]) -> str:
        refused = node_conditions(env) is None
        return f"{_ANEW} with NODE_…, LD_… or K8E_WARM=0 in its environment" if refused else ""

    def site(self, env: dict[str, str]) -> list[FileState]:
        return []

    def takes(self, spec: dict[str, Any]) -> bool:
        # For the words, Node does something else before it runs the code; what begins with a hyphen
        # is an option to it; and its input is what it was started with.
        code = spec["code"]
        if spec.get("stdin") or code.startswith(b"-") or b"import" in code or b"crypto" in code:
            return False
        return _is_plain_text(code)

    def message(self, spec: dict[str, Any], env: dict[str, str], cwd: str) -> bytes | None:
        pairs = [name + "=" + value for name, value in env.items()]
        try:
            return b"\0".join([cwd.encode(), spec["code"], *(pair.encode() for pair in pairs)])
        except UnicodeEncodeError:
            return None  # Node's strings could not hold it


def _is_plain_text(code: bytes) -> bool:
    if len(code) > CODE_MOST or b"\0" in code:
        return False
    try:
        code.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
