"""In what warm interpreters differ by language: how one is started and told a program."""

from __future__ import annotations

import marshal
import os
from typing import Any

from k8e.guest.conditions import (
    FileState,
    is_installed,
    node_conditions,
    site_state,
    start_conditions,
)
from k8e.guest.spawn import find_program

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
