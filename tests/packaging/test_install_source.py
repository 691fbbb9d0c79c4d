"""install.sh without a clone, and with a server or an agent: as K8E's users start it.

The package that is installed is a stand-in that writes down what it is told; what stands in for
runsc, runc and npm is that of ``test_install``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.packaging.test_install import Machine

RECORDER = """\
import json, os, sys
with open(os.environ["TOLD"], "a") as file:
    kept = {name: os.environ.get(name) for name in ("K8E_URL", "K8E_TOKEN", "K8E_HOME")}
    file.write(json.dumps([sys.argv[1:], kept]) + "\\n")
if sys.argv[1:3] == ["components", "list"]:
    print(json.dumps({"components": [], "dir": os.environ["COMPONENTS"]}, separators=(",", ":")))
sys.exit(3 if os.environ.get("FAILS") in sys.argv else 0)
"""


class Piped(Machine):
    """A machine on which install.sh is read from a pipe, and an archive of the source."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.told = folder / "told"
        self.components = folder / "components"
        (self.package / "__main__.py").write_text(RECORDER)
        (self.package / "cli.py").write_text("import k8e.__main__\n")
        self.archive = folder / "published/k8e.tar.gz"
        self.archive.parent.mkdir()
        self.pack()

    def pack(self, installer: str = "") -> None:
        """Publish the source, or one whose install.sh is another script."""
        published = self.folder / "k8e-9.8.7"
        shutil.copytree(self.clone, published)
        if installer:
            (published / "install.sh").write_text(installer)
        with tarfile.open(self.archive, "w:gz") as archive:
            archive.add(published, published.name)
        shutil.rmtree(published)

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.archive.read_bytes()).hexdigest()

    def pipe(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """``cat install.sh | sh -s - ARGUMENTS``."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        return subprocess.run(
            ["sh", "-s", "-", *arguments],
            input=(self.clone / "install.sh").read_text(),
            env=self.environment(**variables),
            cwd=empty,
            capture_output=True,
            text=True,
        )

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.programs}:{self.bin}:{os.environ['PATH']}",
            "K8E_HOME": str(self.home),
            "K8E_BIN_DIR": str(self.bin),
            "TOLD": str(self.told),
            "COMPONENTS": str(self.components),
            "TMPDIR": str(self.temporary()),
            **variables,
        }

    def temporary(self) -> Path:
        found = self.folder / "temporary"
        found.mkdir(exist_ok=True)
        return found

    def lines(self) -> str:
        return self.told.read_text() if self.told.exists() else ""


SOURCE_S_OWN = """
echo "installing from $(basename "$(dirname "$0")"): $*"
read -r line && echo "read: $line"
test -z "${INSTALL_K8E_SOURCE:-}"
"""
"""An install.sh of the published source: that one is run, not the one of the pipe."""


@pytest.fixture
def machine(tmp_path: Path) -> Piped:
    found = Piped(tmp_path)
    found.pack(SOURCE_S_OWN)
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Piped:
    """A machine on which k8e is installed, so that a second run takes a second."""
    found = Piped(tmp_path_factory.mktemp("prepared"))
    found.pack()
    done = found.pipe(INSTALL_K8E_SOURCE=str(found.archive))
    assert done.returncode == 0, done.stdout + done.stderr
    return found


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - the name of the base
        pass


@pytest.fixture
def url(machine: Piped) -> Generator[str]:
    """Where the archive is served."""
    handler = partial(_Quiet, directory=machine.archive.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/k8e.tar.gz"
        server.shutdown()
        thread.join()


def test_a_pipe_runs_the_installer_of_what_is_published(machine: Piped, url: str) -> None:
    done = machine.pipe(
        "--quiet", INSTALL_K8E_SOURCE=url, INSTALL_K8E_SOURCE_SHA256=machine.checksum
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "installing from k8e-9.8.7: --quiet\n"
    assert list(machine.temporary().iterdir()) == [], "what was fetched is removed"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "INSTALL_K8E_SOURCE_SHA256 is not set"),
        ({"INSTALL_K8E_SOURCE_SHA256": "0" * 64}, f"not {'0' * 64}; nothing of it was used"),
    ],
)
def test_an_archive_that_is_not_known_is_refused(
    machine: Piped, url: str, variables: dict[str, str], why: str
) -> None:
    done = machine.pipe(INSTALL_K8E_SOURCE=url, **variables)
    assert done.returncode == 1
    assert why in done.stderr
    assert "what to do: " in done.stderr
    assert not machine.home.exists()
    assert list(machine.temporary().iterdir()) == []


def test_an_address_that_does_not_answer_is_told(machine: Piped, url: str) -> None:
    done = machine.pipe(
        INSTALL_K8E_SOURCE=f"{url}.other", INSTALL_K8E_SOURCE_SHA256=machine.checksum
    )
    assert done.returncode == 1
    assert "cannot be fetched" in done.stderr


def test_an_archive_and_a_folder_of_this_machine_need_no_checksum(machine: Piped) -> None:
    said = machine.pipe(INSTALL_K8E_SOURCE=str(machine.archive)).stdout
    assert said == "installing from k8e-9.8.7: \n"
    (machine.clone / "install.sh").rename(machine.folder / "install.sh")
    folder = machine.clone.rename(machine.folder / "source")
    (folder / "install.sh").write_text(SOURCE_S_OWN)
    done = subprocess.run(
        ["sh", str(machine.folder / "install.sh")],
        env=machine.environment(INSTALL_K8E_SOURCE=str(folder)),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "installing from source: \n"


def test_a_file_that_is_no_archive_of_k8e_is_refused(machine: Piped) -> None:
    machine.archive.write_bytes(b"no archive")
    assert "no archive" in machine.pipe(INSTALL_K8E_SOURCE=str(machine.archive)).stderr
    with tarfile.open(machine.archive, "w:gz") as archive:
        archive.add(machine.programs, "programs")
    assert "there is no k8e in" in machine.pipe(INSTALL_K8E_SOURCE=str(machine.archive)).stderr
    assert "there is no /none" in machine.pipe(INSTALL_K8E_SOURCE="/none").stderr


def test_a_pipe_without_a_source_says_what_to_set(machine: Piped) -> None:
    done = machine.pipe()
    assert done.returncode == 1
    assert "INSTALL_K8E_SOURCE" in done.stderr


def test_a_script_that_was_cut_off_does_nothing(machine: Piped) -> None:
    script = machine.clone / "install.sh"
    text = script.read_text()
    script.write_text(text[: text.rindex("main ")])
    done = machine.pipe(INSTALL_K8E_SOURCE=str(machine.clone))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not machine.home.exists()


# A whole installation, and then a server or an agent.


@pytest.fixture
def root_machine(prepared: Piped) -> Piped:
    if os.geteuid() != 0:
        pytest.skip("only root can install a server")
    return prepared


def installed(machine: Piped, *arguments: str, **variables: str) -> list[str]:
    """Install once more; what the installed command was told after that."""
    machine.told.unlink(missing_ok=True)
    done = machine.pipe(*arguments, INSTALL_K8E_SOURCE=str(machine.archive), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = machine.lines().splitlines()
    return [line for line in lines if "components" in line or "service" in line]


def test_without_a_word_of_a_cluster_there_is_none(prepared: Piped) -> None:
    assert (prepared.bin / "k8e").exists()
    assert installed(prepared) == []
    assert not (prepared.bin / "k8e-uninstall.sh").exists()


@pytest.mark.parametrize("how", ["variable", "arguments", "flags alone"])
def test_a_server_gets_its_programs_and_starts_with_the_flags(
    root_machine: Piped, how: str
) -> None:
    flags = "--cni basic --node-name one"
    if how == "arguments":
        components, service = installed(root_machine, "server", *flags.split())
    else:
        words = flags if how == "flags alone" else f"server {flags}"
        components, service = installed(root_machine, INSTALL_K8E_EXEC=words, K8E_TOKEN="secret")
        assert '"K8E_TOKEN": "secret"' in service
    assert '["components", "install", "--cni", "basic"]' in components
    assert '["service", "install", "server", "--cni", "basic", "--node-name", "one"]' in service
    assert (root_machine.bin / "k8e-uninstall.sh").stat().st_mode & 0o100


def test_a_url_of_a_cluster_makes_an_agent(root_machine: Piped) -> None:
    components, service = installed(
        root_machine,
        K8E_URL="https://10.0.0.1:6443",
        K8E_TOKEN="secret",
        INSTALL_K8E_SKIP_START="true",
    )
    assert '["components", "install", "--cni", "all"]' in components
    assert '["service", "install", "--no-start", "agent"]' in service
    assert '"K8E_URL": "https://10.0.0.1:6443"' in service


def test_a_server_that_does_not_start_is_an_error(root_machine: Piped) -> None:
    done = root_machine.pipe(
        INSTALL_K8E_SOURCE=str(root_machine.archive), INSTALL_K8E_EXEC="server", FAILS="service"
    )
    assert done.returncode == 1
    assert "k8e server did not start" in done.stderr


def test_uninstalling_leaves_no_file_of_it(root_machine: Piped) -> None:
    machine = root_machine
    installed(machine, "server")
    machine.components.mkdir()
    (machine.components / "manifest.json").write_text("{}")
    (machine.components / "bin").mkdir()
    machine.told.unlink()
    environ = machine.environment(K8E_RUN_DIR="/nowhere/run", K8E_DATA_DIR="/nowhere/data")
    half = ["sh", str(machine.home / "install.sh"), "--purge"]
    refused = subprocess.run(half, env=environ, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "k8e-uninstall.sh" in refused.stderr
    done = subprocess.run(
        ["sh", str(machine.bin / "k8e-uninstall.sh")], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = machine.lines()
    assert told.index('["service", "remove"]') < told.index('["server", "uninstall"]')
    assert not machine.components.exists()
    assert not machine.home.exists()
    assert not machine.bin.exists() or list(machine.bin.iterdir()) == []
