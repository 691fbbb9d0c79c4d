"""A small Python for the guest, with its own loader and libraries, for roots that have none.

Made once of the host's Python: the interpreter, the modules that the guest imports, the shared
libraries of all these and the loader for them. It runs wherever the kernel is the same, whatever
libc an image has, and is mounted where nobody's PATH leads.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import errors

PLACE = "/run/k8e/python"
"""Where it is in a sandbox."""
ALWAYS = ("encodings.ascii", "encodings.latin_1", "encodings.utf_8")
SECONDS = 60
FORM = 2  # to be raised when what is made here changes
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_LOADER = re.compile(r"ld(-linux.*|-musl-.*|64)?\.so(\.\d+)?")
# What the interpreter has loaded after it has imported the names it is given.
_LOOK = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
files = {n: m.__file__ for n, m in sys.modules.items() if getattr(m, "__file__", None)}
print(json.dumps({"files": files, "library": __import__("os").__file__}))
"""
_COMPILE = """
import compileall, py_compile, sys
compileall.compile_dir(sys.argv[1], quiet=2, stripdir=sys.argv[1],
    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""


@dataclass(frozen=True)
class Interpreter:
    """Where it is on the host, and how a sandbox starts it."""

    folder: Path
    loader: str

    @property
    def argv(self) -> list[str]:
        """The loader reads no file of the root (musl's has no cache), and Python no locale."""
        libraries = f"{PLACE}/so"
        blind = [] if "musl" in self.loader else ["--inhibit-cache"]
        loader = [f"{libraries}/{self.loader}", *blind, "--library-path", libraries]
        return [*loader, f"{PLACE}/bin/python3", "-X", "utf8"]


def imports_of(source: str) -> list[str]:
    """The modules that a program imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return sorted(found)


def make_interpreter(folder: Path, interpreter: str, source: str) -> Interpreter:
    """The small Python for a program, made below ``folder`` once per version of either."""
    names = [*imports_of(source), *ALWAYS]
    real = Path(interpreter).resolve()
    stamp = f"{FORM} {_stamps(real)} {names}"
    target = folder / hashlib.sha256(stamp.encode()).hexdigest()[:16]
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        scratch = folder / f"{target.name}.{os.getpid()}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            _make(scratch, real, names)
            scratch.rename(target)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            shutil.rmtree(scratch, ignore_errors=True)
            detail = getattr(error, "stderr", b"") or str(error).encode()
            raise errors.RuntimeUnusable(
                f"no small Python can be made of {real}: {detail.decode(errors='replace')[-300:]}",
                hint="sandboxes with the host's own root file system still work",
            ) from None
    return Interpreter(target, _loader_in(target / "so"))


def _stamps(real: Path) -> list[tuple[str, int]]:
    """What tells whether the interpreter or a library of it was updated since."""
    try:
        libraries = _libraries(real)
    except (OSError, subprocess.SubprocessError):
        libraries = []  # making it says why
    return [(str(path), path.stat().st_mtime_ns) for path in [real, *libraries]]


def _make(scratch: Path, real: Path, names: list[str]) -> None:
    told: dict[str, Any] = json.loads(_run([str(real), "-I", "-S", "-c", _LOOK, *names]))
    library = Path(told["library"]).parent
    files = [Path(path) for path in {*told["files"].values(), told["library"]}]
    target = scratch / "lib" / library.name
    (target / "lib-dynload").mkdir(parents=True)  # by which Python knows its place
    for file in files:
        if file.is_relative_to(library):
            _copy(file, target / file.relative_to(library))
    # Python looks for this in all folders above it, and would take an image's for its modules.
    (scratch / "lib" / f"{library.name.replace('.', '')}.zip").touch()
    _copy(real, scratch / "bin/python3")
    extensions = [file for file in files if ".so" in file.suffixes]
    for file in sorted({item for path in [real, *extensions] for item in _libraries(path)}):
        _copy(file, scratch / "so" / file.name)
    _run([str(real), "-I", "-S", "-c", _COMPILE, str(target)])
    for path in scratch.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.parent.name in ("bin", "so") else 0o644)
    scratch.chmod(0o755)
    made = Interpreter(scratch, _loader_in(scratch / "so"))
    argv = [word.replace(PLACE, str(scratch)) for word in made.argv]
    _run([*argv, "-I", "-S", "-B", "-c", _LOOK, *names])


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _libraries(program: Path) -> list[Path]:
    """What a program of this host is linked with, the loader included."""
    return [Path(found) for found in _LIBRARY.findall(_run(["ldd", str(program)]))]


def _loader_in(folder: Path) -> str:
    found = [file.name for file in folder.iterdir() if _LOADER.fullmatch(file.name)]
    if len(found) != 1:
        raise ValueError(f"the loader is not known: {found}")
    return found[0]


def _run(argv: list[str]) -> str:
    done = subprocess.run(
        argv, check=True, capture_output=True, timeout=SECONDS, env={"PATH": "/usr/bin:/bin"}
    )
    return done.stdout.decode()
