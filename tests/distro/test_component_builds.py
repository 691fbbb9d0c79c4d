"""Components are fetched or built, for real: from the Go module proxy, and from a server here."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from k8e import errors
from k8e.distro import component_builds, component_store, go_modules
from k8e.distro.component_builds import Builder
from k8e.distro.component_store import ComponentStore, State, architecture
from k8e.distro.components import (
    CNI_PLUGINS,
    GVISOR,
    Component,
    GoBuild,
    Patch,
    Release,
    SystemProgram,
    Tree,
)

_PLUGINS = "github.com/containernetworking/plugins/plugins"
SMALL = replace(
    CNI_PLUGINS,
    builds=(
        GoBuild(programs={f"{_PLUGINS}/main/loopback": "bin/cni/loopback"}),
        Tree(source="plugins/main/loopback", folder="share/loopback", suffix=".go"),
    ),
)
"""The smallest component: one program, in one second where Go has compiled it before."""
PROGRAM = b"#!/bin/sh\necho released\n"


class Told:
    """What a builder tells, as lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, text: str) -> None:
        self.lines.append(f"{name}: {text}")

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def store(tmp_path: Path) -> ComponentStore:
    return ComponentStore(tmp_path / "components")


@pytest.fixture
def builder(store: ComponentStore, told: Told) -> Builder:
    if not any(map(shutil.which, ("go", "/usr/local/go/bin/go"))):
        pytest.skip("there is no Go")
    return Builder(store, told)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recipes that a test may change."""
    copy = tmp_path / "recipes"
    shutil.copytree(component_store.RECIPES, copy)
    monkeypatch.setattr(component_store, "RECIPES", copy)
    monkeypatch.setattr(component_builds, "RECIPES", copy)
    return copy


# Builds.


def test_a_component_is_built_from_its_module_and_only_if_that_is_needed(
    builder: Builder, store: ComponentStore, told: Told
) -> None:
    assert builder.install([SMALL]) == [SMALL]
    program = store.folder / "bin/cni/loopback"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert "CNI" in said.stdout + said.stderr
    assert (store.folder / "share/loopback/loopback.go").exists()
    assert told.has("built with go1.")
    assert not any((store.folder / "build").iterdir()), "what was needed for the build is removed"
    assert builder.install([SMALL]) == []
    before = program.read_bytes()
    program.write_bytes(b"another")
    assert builder.install([SMALL]) == [SMALL]
    assert told.has("wrong: ")
    assert program.read_bytes() == before, "a build gives the same bytes each time"


def test_a_module_with_another_checksum_is_refused(
    builder: Builder, store: ComponentStore, recipes: Path
) -> None:
    sums = recipes / "cni-plugins/go.sum"
    lines = sums.read_text("utf-8").splitlines()
    start = "github.com/containernetworking/plugins v1.9.1 "
    changed = [f"{start}h1:{'A' * 43}=" if line.startswith(start) else line for line in lines]
    assert changed != lines
    sums.write_text("\n".join(changed) + "\n", "utf-8")
    with pytest.raises(errors.ToolFailed, match="checksum mismatch"):
        builder.install([SMALL])
    assert store.look(SMALL).state is State.MISSING


def test_a_build_that_fails_says_why_and_leaves_what_was_there(
    builder: Builder, store: ComponentStore, recipes: Path
) -> None:
    builder.install([SMALL])
    broken = replace(SMALL, builds=(GoBuild(programs={f"{_PLUGINS}/main/nothing": "bin/nothing"}),))
    with pytest.raises(errors.ToolFailed, match="main/nothing") as caught:
        builder.install([broken])
    assert "again" in caught.value.hint
    assert store.look(SMALL).state is State.PRESENT


def test_a_patch_whose_text_is_not_there_is_an_error(builder: Builder) -> None:
    patch = Patch(file="plugins/main/loopback/loopback.go", old="no such text", new="")
    patched = replace(SMALL, builds=(replace(SMALL.builds[0], patches=(patch,)),))
    with pytest.raises(errors.ToolFailed, match=r"loopback\.go .*has changed"):
        builder.install([patched])


def test_the_patch_of_gvisor_s_shim_fits(builder: Builder, tmp_path: Path) -> None:
    """The build takes minutes where nothing is cached; this says early that it would fail."""
    assert GVISOR.module
    (patched,) = (step for step in GVISOR.builds if isinstance(step, GoBuild) and step.patches)
    work = tmp_path / "work"
    shutil.copytree(component_store.RECIPES / "gvisor", work)
    sources = go_modules.Sources(go_modules.Go.find(tmp_path), GVISOR.module, work)
    sources.patch(patched.patches)
    text = (work / "patched/pkg/shim/v1/manager.go").read_text("utf-8")
    assert text.count("!os.IsPermission(err)") == 1


def test_without_a_new_go_the_error_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "go"
    old.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
    old.chmod(0o755)
    monkeypatch.setattr(go_modules, "_PLACES", (str(old), str(tmp_path / "none")))
    with pytest.raises(errors.ToolFailed, match=r"is 1\.19\.8") as caught:
        go_modules.Go.find(tmp_path)
    assert "install Go" in caught.value.hint


def test_a_go_that_is_a_little_old_fetches_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "go"
    old.write_text('#!/bin/sh\n[ "$1" = version ] && echo go version go1.25.1 linux/amd64\n')
    old.chmod(0o755)
    monkeypatch.setattr(go_modules, "_PLACES", (str(old),))
    found = go_modules.Go.find(tmp_path)
    assert (found.version, found.toolchain) == ("go1.26.8", "go1.26.8")
    command = found.command(["build"], tmp_path, {})
    assert command.environment()["GOTOOLCHAIN"] == "go1.26.8"
    cache = command.environment()["GOCACHE"]
    assert cache == str(tmp_path / "go-build"), "nobody else uses Go here, so we clean up after it"


def test_a_second_installation_waits_for_the_first(
    builder: Builder, store: ComponentStore, told: Told
) -> None:
    holder = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with store.locked(lambda: None):
        pass
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(store.folder / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        release = other.stdin.close
        waited: list[bool] = []

        def tell(name: str, text: str) -> None:
            told(name, text)
            if "waiting" in text:
                waited.append(True)
                release()

        Builder(store, tell).install([])
        assert waited


# The distribution's programs.


def test_a_program_of_the_distribution_is_found_and_linked(
    store: ComponentStore, told: Told
) -> None:
    program = SystemProgram(("no-such-shell", "sh"), "dash", link="bin/some/shell")
    component = Component("shell", "1", "BSD", "runs", programs=(program,))
    assert store.look(component).state is State.MISSING
    Builder(store, told).install([component])
    assert store.look(component).state is State.PRESENT
    assert subprocess.run([store.folder / "bin/some/shell", "-c", "exit 7"]).returncode == 7


def test_a_program_that_no_package_manager_can_install_is_named(
    store: ComponentStore, told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    component = Component(
        "abc", "1", "BSD", "runs", programs=(SystemProgram(("no-such-abc",), "abc-tools"),)
    )
    with pytest.raises(errors.ToolFailed, match="abc-tools") as caught:
        Builder(store, told).install([component])
    assert "package manager" in caught.value.hint


# Upstream's releases.


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - the name of the base
        pass


@contextmanager
def served(folder: Path) -> Generator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def mirror(tmp_path: Path) -> Generator[tuple[str, Path]]:
    folder = tmp_path / "mirror"
    folder.mkdir()
    with tarfile.open(folder / f"plugins-{architecture()}.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("./loopback")
        member.size = len(PROGRAM)
        archive.addfile(member, io.BytesIO(PROGRAM))
    with served(folder) as url:
        yield url, folder


def released(url: str, checksum: str) -> Component:
    release = Release(
        url=f"{url}/plugins-{{arch}}.tgz",
        members={"./loopback": "bin/cni/loopback"},
        sha256={architecture(): checksum},
    )
    return replace(SMALL, builds=SMALL.builds[:1], releases=(release,))


def checksum_of(folder: Path) -> str:
    (archive,) = folder.iterdir()
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def test_a_release_with_the_right_checksum_is_used(
    store: ComponentStore, told: Told, mirror: tuple[str, Path]
) -> None:
    url, folder = mirror
    component = released(url, checksum_of(folder))
    Builder(store, told).install([component])
    found = store.look(component)
    assert (found.state, found.source) == (State.PRESENT, "upstream's release")
    assert subprocess.check_output([store.folder / "bin/cni/loopback"]) == b"released\n"


def test_a_release_with_another_checksum_is_refused_and_nothing_is_built_instead(
    store: ComponentStore, told: Told, mirror: tuple[str, Path]
) -> None:
    url, folder = mirror
    (archive,) = folder.iterdir()
    wanted = checksum_of(folder)
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(errors.ToolFailed, match=f"checksum .*, not {wanted}") as caught:
        Builder(store, told).install([released(url, wanted)])
    assert "k8e components build" in caught.value.hint
    assert not (store.folder / "bin").exists()


def test_where_the_release_cannot_be_reached_the_component_is_built(
    builder: Builder, store: ComponentStore, told: Told, mirror: tuple[str, Path]
) -> None:
    url, folder = mirror
    component = released(f"{url}/elsewhere", checksum_of(folder))
    builder.install([component])
    assert told.has("cannot be fetched: HTTP Error 404")
    assert store.look(component).source.startswith("built with go")
