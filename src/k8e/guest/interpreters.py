"""Python and Node as warm interpreters: how each is started, and which conditions it depends on.

A warm interpreter saw these when it was started. If they have changed, a new one must run the code.
"""

from __future__ import annotations

import errno
import marshal
import os
import time
from typing import Any

from k8e.guest.spawn import STEADY, UID, as_user, find_program

NAMES_MOST = 5000  # entries of a folder of the user's packages; more would take too long
# Seconds of CPU time, for all of them; links can make the path to each of them long.
SITE_SECONDS = 1.0
READ_MOST = 64  # files in there that Python reads at its start
# What an interpreter reads when it starts, or a library that it is made of.
_DECISIVE = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TZDIR", "LOCPATH", "GCONV_PATH", "NLSPATH")
# Images of Python set these about themselves; Python ignores them.
_OF_IMAGES = (
    "PYTHON_VERSION PYTHON_SHA256 PYTHON_PIP_VERSION PYTHON_SETUPTOOLS_VERSION "
    "PYTHON_GET_PIP_URL PYTHON_GET_PIP_SHA256"
).split()
# The dynamic linker's: they may name the user's files, which can change while an interpreter waits.
_LINKING = "LD_"
_DECISIVE_PREFIXES = ("LC_", "MALLOC_", "GLIBC_")
_NODE_PREFIXES = (*_DECISIVE_PREFIXES, "UV_", "V8_", "ICU_", "OPENSSL_", "SSL_")
# What libraries not written in Python read when their module is loaded.
_NATIVE_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "NPY_", "NUMEXPR_", "NUMBA_"),
    *("CUDA_", "TF_", "GRPC_", "OPENSSL_", "SSL_"),
)
EVERY_VARIABLE = "*"  # for a module that read all of them

FileState = tuple[str, int, int, int]


def start_conditions(env: dict[str, str]) -> dict[str, str] | None:
    """The variables that decide how Python starts; None if no warm interpreter may be used."""
    own = [name for name in env if name.startswith("PYTHON") and name not in _OF_IMAGES]
    return None if own else _conditions(env, _DECISIVE_PREFIXES)


def node_conditions(env: dict[str, str]) -> dict[str, str] | None:
    """The variables that decide how Node.js starts; None if no warm interpreter may be used."""
    own = any(name.startswith("NODE_") for name in env)
    return None if own else _conditions(env, _NODE_PREFIXES)


def _conditions(env: dict[str, str], prefixes: tuple[str, ...]) -> dict[str, str] | None:
    if env.get("K8E_WARM") == "0" or any(name.startswith(_LINKING) for name in env):
        return None
    return {
        name: value for name, value in env.items() if name in _DECISIVE or name.startswith(prefixes)
    }


def suits(read: list[str], started_with: dict[str, str], env: dict[str, str]) -> bool:
    """Whether modules that read these variables would find the same values in ``env``."""
    if EVERY_VARIABLE in read:
        return started_with == env
    names = {*started_with, *env}
    native = [name for name in names if name.startswith(_NATIVE_PREFIXES)]
    return all(started_with.get(name) == env.get(name) for name in [*read, *native])


def is_installed(program: str) -> bool:
    """Whether a Python belongs to the machine or the image, and has no packages but theirs.

    One in a virtual environment, or one of the user's, has them where we do not look.
    """
    with as_user():
        try:
            owner = os.lstat(program).st_uid
        except OSError:
            return False
        return owner != UID and not any(map(os.path.exists, _venv_files(program)))


def _venv_files(program: str) -> list[str]:
    """The files that make a Python one of a virtual environment; the name decides, not the file."""
    folder = os.path.dirname(program)
    return [os.path.join(place, "pyvenv.cfg") for place in (folder, os.path.dirname(folder))]


def site_state(home: str, program: str) -> list[FileState]:
    """The state of the user's package folders, and of files there that Python reads at its start.

    OSError if there are more than we want to look at before every run.
    """
    library = os.path.join(home, ".local/lib")
    until = time.process_time() + SITE_SECONDS
    with as_user():
        paths = [library]
        if not program.startswith(STEADY):  # the path may go through links of the user's
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
    """Raise OSError where looking through the user's packages would slow every run."""
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
_ANEW = "it starts fresh each time"


def boot_folder(guest_file: str) -> str:
    """The folder with the boot programs of a packed guest."""
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
        """The command, and the variables that it needs besides its environment."""
        told = " ".join([self._folder, *map(str, passed), *modules])
        return [self.program, BOOT_FILE], {"PYTHONPATH": self._folder, "K8E_BOOT": told}

    def conditions(self, env: dict[str, str]) -> dict[str, str] | None:
        return start_conditions(env)

    def obstacle(self, env: dict[str, str]) -> str:
        """Why no interpreter may wait in this environment; empty if one may."""
        if start_conditions(env) is None:
            return f"{_ANEW} with PYTHON…, LD_… or K8E_WARM=0 in its environment"
        if not is_installed(find_program(self.program, env["PATH"], "/")):
            return f"{_ANEW} in a virtual environment, or where it is the session's own"
        return ""

    def site(self, env: dict[str, str]) -> list[FileState]:
        return site_state(env["HOME"], find_program(self.program, env["PATH"], "/"))

    def takes(self, spec: dict[str, Any]) -> bool:
        """Whether a warm interpreter could run this as a new one would."""
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
        # Node treats these words in a special way; a leading hyphen makes an option; and the
        # program's input would be what Node was started with.
        code = spec["code"]
        if spec.get("stdin") or code.startswith(b"-") or b"import" in code or b"crypto" in code:
            return False
        return _is_plain_text(code)

    def message(self, spec: dict[str, Any], env: dict[str, str], cwd: str) -> bytes | None:
        pairs = [name + "=" + value for name, value in env.items()]
        try:
            return b"\0".join([cwd.encode(), spec["code"], *(pair.encode() for pair in pairs)])
        except UnicodeEncodeError:
            return None  # too long for a string of Node's


def _is_plain_text(code: bytes) -> bool:
    if len(code) > CODE_MOST or b"\0" in code:
        return False
    try:
        code.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
