"""Installations of k8e on this machine that can run a gateway, for a client without one.

``pip install .`` brings the client alone; ``install.sh`` brings everything. A client of the first
kind finds an installation of the second, checks that it is complete, of a release that fits, and
that no other user can change it, and starts the gateway from there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k8e import errors, settings
from k8e._version import __version__

PARTS = (
    "cryptography",
    "dns",
    "h11",
    "jwt",
    "mcp",
    "prometheus_client",
    "pydantic",
    "python_multipart",
    "starlette",
    "uvicorn",
)
"""The packages without which no gateway starts; those of the extra ``gateway``."""
ASK_SECONDS = 20.0
MAX_SCRIPT = 8192  # bytes of a command that are examined
_SCRIPT = """
import importlib.util, json, sys
from k8e import _version
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps({"version": _version.__version__, "missing": missing}))
"""
INSTALL = (
    "run install.sh in a clone of k8e, or pip install '.[gateway]' there; or use a gateway "
    "elsewhere: k8e sandbox login, or K8E_SANDBOX_ENDPOINT"
)
"""What to do where there is no gateway."""


@dataclass(frozen=True)
class Installation:
    """A Python that can run a gateway."""

    python: str
    isolation: str
    """The flag that keeps modules of the current folder and of others from being taken for ours."""
    home: str = ""
    """K8E_HOME for it, where that is not the one that it finds by itself."""

    def environ(self) -> dict[str, str]:
        """The variables to start it with."""
        kept = {key: value for key, value in os.environ.items() if not self._is_foreign(key)}
        return {"K8E_HOME": self.home, **kept} if self.home else kept

    def _is_foreign(self, key: str) -> bool:
        """Whether a variable concerns our own Python, and the installation has another."""
        return self.isolation == "-I" and key in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")


def find() -> Installation:
    """The installation that can run a gateway: this Python if it has all parts, else another.

    Raises:
        NoGateway: there is none; the message says what was looked at.
    """
    lacking = missing_here()
    if not lacking:
        # -P keeps modules in the current folder from being taken for ours; -I does, and more.
        return Installation(sys.executable, "-I" if sys.flags.isolated else "-P")
    looked = [f"this Python ({sys.executable}) has the client alone, without {lacking[0]}"]
    for python in _pythons():
        problem = _unsafe(python) or _unfit(python)
        if not problem:
            return Installation(str(python), "-I", _home(python))
        looked.append(f"{python}: {problem}")
    if len(looked) == 1:
        looked.append("nothing was installed by install.sh")
    raise errors.NoGateway(
        f"no gateway runs, and none can be started: {'; '.join(looked)}", hint=INSTALL
    )


def missing_here() -> list[str]:
    """The parts of a gateway that this Python lacks."""
    return [name for name in PARTS if not _has(name)]


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _pythons() -> Iterator[Path]:
    """The Pythons of installations, the likeliest first, each once."""
    homes = [os.environ.get("K8E_HOME", "")]
    if os.geteuid() != 0:
        homes.append(str(settings.own_home()))
    homes.append(str(settings.SYSTEM_HOME))
    seen = {Path(sys.prefix) / "bin"}  # our own installation, which lacks something
    for python in (*(Path(home) / "venv/bin/python" for home in homes if home), *_on_path()):
        if python.parent not in seen and os.path.lexists(python):
            seen.add(python.parent)
            yield python


def _on_path() -> Iterator[Path]:
    """The Pythons of our commands ``k8e`` on PATH: K8E's own command has that name too."""
    for folder in os.get_exec_path():
        command = shutil.which("k8e", path=folder)
        python = _python_of(Path(command)) if command else None
        if python is not None:
            yield python


def _python_of(command: Path) -> Path | None:
    """The Python that runs a command of ours; install.sh and pip write one each."""
    try:
        with open(command, "rb") as file:
            text = file.read(MAX_SCRIPT).decode("utf-8", "replace")
    except OSError:
        return None
    if "The command k8e, written by install.sh" not in text and "from k8e.cli import" not in text:
        return None
    found = re.match(r"#!(/\S+/python[\d.]*)\s", text) or re.search(
        # A path that cannot stand in a shebang line: pip and install.sh let the shell start it.
        r"exec'? ['\"]?(/[^'\"\n]*/python[\d.]*)['\"]? ",
        text,
    )
    return Path(found[1]) if found else None


def _home(python: Path) -> str:
    """Where the tools of an installation are, if it would look elsewhere by itself."""
    if python.parent.parent.name != "venv":  # of install.sh
        return ""
    home = python.parent.parent.parent
    usual = (settings.own_home(), settings.SYSTEM_HOME)
    return str(home) if home not in usual and (home / "bin").is_dir() else ""


def _unsafe(program: Path) -> str:
    """Why starting a program is not safe: another user could have put it there."""
    try:
        paths = {item for path in (program, program.resolve()) for item in (path, *path.parents)}
        for path in sorted(paths):
            found = path.lstat()
            if found.st_uid not in (0, os.geteuid()):
                return f"{path} belongs to uid {found.st_uid}"
            if stat.S_ISLNK(found.st_mode):
                continue  # its folder says who may replace it
            sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            if found.st_mode & 0o022 and not sticky:
                return f"other users may change {path} (chmod go-w {path})"
    except OSError as error:
        return f"{error.filename or program}: {error.strerror}"
    return ""


def _unfit(python: Path) -> str:
    """Why an installation cannot be used: incomplete, or of a release that does not fit."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _SCRIPT, *PARTS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_SECONDS,
            check=False,
        )
        told = json.loads(done.stdout)
        version, lacking = str(told["version"]), list(told["missing"])
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, LookupError):
        return "it is not complete (run install.sh again)"
    if lacking:
        return f"it has no {lacking[0]}"
    if _series(version) != _series(__version__):
        return f"it is k8e {version}, and this client is {__version__} (run install.sh again)"
    return ""


def _series(version: str) -> list[str]:
    """The part of a version within which releases fit each other."""
    parts = version.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]
