"""Go, and the source of a component as a Go module that Go has checked."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from k8e import errors
from k8e.distro.build_commands import Command
from k8e.distro.component_store import architecture, remove_tree
from k8e.distro.components import GO_OLDEST, GO_VERSION, Module, Patch

_PLACES = ("go", "/usr/local/go/bin/go", "/usr/lib/go/bin/go")
_OLDEST_SWITCH = (1, 21, 0)  # from here on Go fetches another version of itself


@dataclass(frozen=True)
class Go:
    """The Go compiler of this machine, or the one that it fetches in its place."""

    program: str
    version: str
    toolchain: str
    """What GOTOOLCHAIN must say."""
    caches: Mapping[str, str]
    """The folder for compiled and fetched files."""

    @classmethod
    def find(cls, folder: Path) -> Go:
        """A Go that is new enough, or can fetch one that is.

        Whoever uses Go on this machine has its caches already, and we share them. Else they go
        below ``folder``, so that they are removed with the components.
        """
        found: list[str] = []
        for place in _PLACES:
            program = shutil.which(place)
            version = _version_of(program) if program else ()
            if program and version >= GO_OLDEST:
                return cls(program, f"go{_dotted(version)}", "local", _caches(program, folder))
            if program and version >= _OLDEST_SWITCH:
                newer = f"go{GO_VERSION}"
                return cls(program, newer, newer, _caches(program, folder))
            if program:
                found.append(f"{program} is {_dotted(version)}")
        what = ", ".join(found) or "there is none"
        raise errors.ToolFailed(
            f"components are built with Go {_dotted(GO_OLDEST)} or newer: {what}",
            hint="install Go (https://go.dev/dl) to /usr/local/go, or copy the components folder "
            "of a machine that has them",
        )

    def command(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str]
    ) -> Command:
        """A command of Go in the folder of a module, unaffected by settings for other modules."""
        fixed = {
            **self.caches,
            "GOTOOLCHAIN": self.toolchain,
            "GOFLAGS": "",
            "GOWORK": "off",
            "GOOS": "linux",
            "GOARCH": architecture(),
            "GOEXPERIMENT": "",
        }
        return Command(
            [self.program, *arguments], folder, {**fixed, **environ}, counts="packages compiled"
        )


class Sources:
    """The module of a component, in a folder of its own that requires it."""

    def __init__(self, go: Go, module: Module, work: Path) -> None:
        self.go = go
        self.work = work
        self._module = module
        self._folder: Path | None = None

    def folder(self) -> Path:
        """The folder of the module's own files: Go's cache of modules, once it checked them."""
        if self._folder is None:
            said = self._ask("mod", "download", "-json", self._module.path)
            self._folder = Path(json.loads(said)["Dir"])
        return self._folder

    def patch(self, patches: Sequence[Patch]) -> None:
        """Build from a changed copy from here on; an error unless the text occurs exactly once."""
        copy = self.work / "patched"
        remove_tree(copy)
        shutil.copytree(self.folder(), copy)
        for patch in patches:
            path = copy / patch.file
            text = path.read_text("utf-8")
            if text.count(patch.old) != 1:
                raise errors.ToolFailed(f"{patch.file} of {self._module.path} has changed")
            path.chmod(0o644)
            path.write_text(text.replace(patch.old, patch.new), "utf-8")
        self._ask("mod", "edit", "-replace", f"{self._module.path}=./patched")

    def _ask(self, *arguments: str) -> str:
        command = self.go.command(arguments, self.work, {})
        done = subprocess.run(
            command.argv,
            cwd=self.work,
            env=command.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise errors.ToolFailed(
                f"go {' '.join(arguments[:2])} failed: {said}",
                hint="check the network, and what `go env GOPROXY` says",
            )
        return done.stdout


def _caches(program: str, folder: Path) -> dict[str, str]:
    done = subprocess.run(
        [program, "env", "-json", "GOCACHE", "GOMODCACHE"],
        env={**os.environ, "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        check=False,
    )
    # Below a service manager there may be no HOME, and so no answer.
    known: dict[str, str] = json.loads(done.stdout) if not done.returncode else {}
    if known.get("GOCACHE") and known.get("GOMODCACHE") and Path(known["GOCACHE"]).is_dir():
        return known
    return {"GOCACHE": str(folder / "go-build"), "GOMODCACHE": str(folder / "go-modules")}


def _version_of(program: str) -> tuple[int, ...]:
    done = subprocess.run(
        [program, "version"],
        env={**os.environ, "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
