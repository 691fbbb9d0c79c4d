"""Installation of components: upstream's release if its checksum is known, else a build.

Sources come as Go modules, with their checksums in ``build/<component>/go.sum``; Go refuses a
module with another one. Go's build cache is shared by all components and by later builds, so a
build that was interrupted goes on where it was.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from k8e import errors
from k8e.distro import images
from k8e.distro.build_commands import Command, duration
from k8e.distro.component_store import (
    RECIPES,
    ComponentStore,
    State,
    architecture,
    find_program,
    remove_tree,
)
from k8e.distro.components import CBuild, Component, GoBuild, Tree
from k8e.distro.go_modules import Go, Sources
from k8e.distro.releases import fetch_release

Tell = Callable[[str, str], None]
"""Called with a component's name and its progress, at least once a second."""

_COMPILER = {"gcc": "gcc", "libc6-dev": "", "pkg-config": "pkg-config"}


class Builder:
    """Brings components into a store."""

    def __init__(self, store: ComponentStore, tell: Tell, jobs: int = 0) -> None:
        self._store = store
        self._tell = tell
        self._jobs = jobs or len(os.sched_getaffinity(0))
        self._go: Go | None = None

    def install(self, wanted: Sequence[Component], *, build: bool = False) -> list[Component]:
        """Get missing, outdated and damaged components; return those that were got.

        Args:
            wanted: the components.
            build: whether to build all of them from source, also those that are there.
        """
        first = wanted[0].name if wanted else ""
        with self._store.locked(lambda: self._tell(first, "waiting for another installation")):
            todo = [item for item in wanted if build or not self._is_present(item)]
            for component in todo:
                self._get(component, build=build)
        return todo

    def _is_present(self, component: Component) -> bool:
        finding = self._store.look(component, thorough=True)
        if finding.state is not State.PRESENT and finding.detail:
            self._tell(component.name, f"{finding.state}: {finding.detail}")
        return finding.state is State.PRESENT

    def _get(self, component: Component, *, build: bool) -> None:
        began = time.monotonic()
        if component.programs:
            self._install_programs(component)
            return
        scratch = self._store.scratch(component)
        try:
            made = scratch / "made"
            made.mkdir()
            source = None if build else self._fetch(component, made)
            if source is None:
                source = self._build(component, scratch, made)
            for image in component.images:
                images.write(component, image, made, architecture(), others=self._store.folder)
            self._store.admit(component, made, source, time.monotonic() - began)
        finally:
            remove_tree(scratch)
        self._tell(component.name, f"done in {duration(time.monotonic() - began)}: {source}")

    # Upstream's releases.

    def _fetch(self, component: Component, made: Path) -> str | None:
        """The source of the files; None if there is no release, or it cannot be reached."""
        found = [item for item in component.releases if architecture() in item.sha256]
        if not found or len(found) != len(component.releases):
            return None
        for release in found:
            try:
                fetch_release(release, made, lambda text: self._tell(component.name, text))
            except OSError as error:
                self._tell(component.name, f"the release cannot be fetched: {error}")
                return None
        return "upstream's release"

    # Builds.

    def _build(self, component: Component, scratch: Path, made: Path) -> str:
        if component.debian:
            self._unpack_packages(component, scratch, made)
            return "Debian"
        go = self._go = self._go or Go.find(self._store.folder)
        work = scratch / "module"
        shutil.copytree(RECIPES / component.name, work)
        if component.module is None:
            raise LookupError(component.name)
        sources = Sources(go, component.module, work)
        for step in component.builds:
            if isinstance(step, GoBuild):
                self._build_go(component, step, sources=sources, made=made)
            elif isinstance(step, CBuild):
                self._build_c(component, step, sources=sources, made=made)
            else:
                _copy_tree(step, sources.folder(), made)
        return f"built with {go.version}"

    def _build_go(
        self, component: Component, step: GoBuild, *, sources: Sources, made: Path
    ) -> None:
        if step.libraries:
            self._need_compiler(component, step.libraries)
        if step.patches:
            sources.patch(step.patches)
        output = made / "go"
        output.mkdir()
        flags = ["-s", "-w", *(f"-X '{name}={text}'" for name, text in step.variables.items())]
        if step.libraries:
            flags += ["-linkmode external", "-extldflags -static"]
        # Upstream has vetted its tests; that would take as long again as compiling them.
        command = ["test", "-c", "-vet=off"] if step.is_test else ["build", "-v"]
        command += ["-trimpath", "-buildvcs=false", "-p", str(self._jobs)]
        command += ["-tags", ",".join(step.tags), "-ldflags", " ".join(flags)]
        command += ["-o", f"{output}/", *step.programs]
        environ = {"CGO_ENABLED": "1" if step.libraries else "0"}
        self._run(component, sources.go.command(command, sources.work, environ))
        for package, name in step.programs.items():
            built = component.name if package == "." else package.rpartition("/")[2]
            built += ".test" if step.is_test else ""
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (output / built).rename(made / name)
        output.rmdir()

    def _build_c(self, component: Component, step: CBuild, *, sources: Sources, made: Path) -> None:
        self._need_compiler(component, ())
        target = made / step.file
        target.parent.mkdir(parents=True, exist_ok=True)
        command = ["gcc", "-Os", "-Wall", "-Werror", "-static", "-s"]
        command += [f"-DVERSION={component.version}", "-o", str(target)]
        self._run(component, Command([*command, str(sources.folder() / step.source)]))

    def _need_compiler(self, component: Component, libraries: Iterable[str]) -> None:
        missing = [name for name, tool in _COMPILER.items() if tool and not shutil.which(tool)]
        if "pkg-config" in missing or "gcc" in missing:
            missing = list(_COMPILER)
        for library in libraries:
            known = ["pkg-config", "--exists", library]
            if missing or subprocess.run(known, check=False).returncode:
                missing.append(f"{library}-dev")
        if missing:
            self._install_packages(component, missing)

    # The distribution's packages.

    def _install_programs(self, component: Component) -> None:
        missing = [item for item in component.programs if find_program(item.names) is None]
        if missing:
            self._install_packages(component, [item.package for item in missing])
        for program in component.programs:
            path = find_program(program.names)
            if path is None:
                raise errors.ToolFailed(f"{program.package} brought no {program.names[0]}")
            if program.link:
                self._store.link(program.link, path)
        self._tell(component.name, "done: the distribution's package")

    def _install_packages(self, component: Component, packages: Sequence[str]) -> None:
        if not shutil.which("apt-get") or os.geteuid() != 0:
            why = "only root may install them" if shutil.which("apt-get") else "there is no apt-get"
            raise errors.ToolFailed(
                f"{component.name} needs packages of the distribution, and {why}: "
                f"{', '.join(packages)} (Debian's names)",
                hint="install them with the system's package manager, then run this again",
            )
        self._tell(component.name, f"installing {', '.join(packages)}")
        wait = ["-o", "DPkg::Lock::Timeout=120", "-q"]
        environ = {"DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", *wait, "install", "-y", "--no-install-recommends", *packages]
        try:
            self._run(component, Command(install, environ=environ))
        except errors.ToolFailed:  # a list of packages that is too old, as a rule
            self._run(component, Command(["apt-get", *wait, "update"], environ=environ))
            self._run(component, Command(install, environ=environ))

    def _unpack_packages(self, component: Component, scratch: Path, made: Path) -> None:
        """Unpack single files of packages that need not be installed; apt checks the signatures."""
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise errors.ToolFailed(
                f"{component.name} is taken from a Debian package, and there is no apt-get",
                hint="install it on a Debian or Ubuntu machine, and copy the components folder",
            )
        fetched = scratch / "fetched"
        fetched.mkdir()
        fetched.chmod(0o777)  # apt fetches as a user of its own where that one can come here
        packages = {name.partition("/")[0] for name in component.debian}
        self._run(component, Command(["apt-get", "-q", "download", *packages], folder=fetched))
        for archive in fetched.glob("*.deb"):
            unpacked = str(scratch / "unpacked")
            self._run(component, Command(["dpkg-deb", "-x", str(archive), unpacked]))
        for name, file in component.debian.items():
            (made / file).parent.mkdir(parents=True, exist_ok=True)
            (scratch / "unpacked" / name.partition("/")[2]).rename(made / file)

    def _run(self, component: Component, command: Command) -> None:
        command.run(lambda text: self._tell(component.name, text))


def _copy_tree(step: Tree, module: Path, made: Path) -> None:
    source = module / step.source
    for path in sorted(source.rglob(f"*{step.suffix}")):
        if path.is_file():
            target = made / step.folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
