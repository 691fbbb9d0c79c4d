"""``install.sh server`` and ``k8e-uninstall.sh`` on a machine, with all that they really do."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e import settings
from k8e.distro.component_store import ComponentStore, State
from k8e.distro.components import needed
from tests.cluster import machine as machines
from tests.cluster import traces
from tests.cluster.machine import Lan, Machine

REPO = Path(__file__).resolve().parents[2]
INSTALL_SECONDS = 600.0
SOURCE = (
    "src proto sdk requirements install.sh pyproject.toml hatch_build.py README.md LICENSE"
).split()
KUBELET_S_OWN = "/.written/usr/libexec/kubernetes"
"""Where kubelet makes a folder for drivers, whether it has any or not."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Prepared:
    """Folders that a machine can share: k8e as it was installed, and components to remove."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bin = folder / "home", folder / "command"
        self.source, self.components = folder / "source", folder / "components"
        for name in SOURCE:
            path = REPO / name
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, self.source / name, ignore=ignored)
            else:
                shutil.copy(path, self.source / name)
        self._copy_components(ComponentStore(settings.load({}).components_dir))
        # What comes from a package index is got here: a machine has an internet of its own.
        done = subprocess.run(
            ["sh", str(self.source / "install.sh"), "--quiet"],
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def environ(self) -> dict[str, str]:
        return {
            "K8E_HOME": str(self.home),
            "K8E_BIN_DIR": str(self.bin),
            "K8E_COMPONENTS_DIR": str(self.components),
        }

    def _copy_components(self, store: ComponentStore) -> None:
        """Those of every network: which one an agent needs is known when it has joined."""
        for component in needed("all"):
            if store.look(component).state is not State.PRESENT:
                pytest.skip(f"there is no {component.name}; make components gets it")
        self.components.mkdir(parents=True)
        shutil.copy2(store.folder / "manifest.json", self.components)
        for name in ("bin", "images", "share"):
            target = self.components / name
            shutil.copytree(store.folder / name, target, symlinks=True, copy_function=_link)


def _link(source: str, target: str) -> None:
    """Have a file at another place too, without its bytes where that can be."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture
def prepared() -> Generator[Prepared]:
    if os.geteuid() != 0:
        pytest.skip("a machine needs root")
    # Not in /tmp, of which a machine has one of its own.
    folder = Path(tempfile.mkdtemp(prefix="k8e-install-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield Prepared(folder)
    shutil.rmtree(folder)


@pytest.fixture
def lan(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> Generator[Lan]:
    monkeypatch.setattr(machines, "COMPONENTS", prepared.components)
    found = Lan()
    yield found
    found.close()


@pytest.fixture
def machine(lan: Lan) -> Generator[Machine]:
    found = Machine(lan, 1)
    yield found
    found.close()


@pytest.fixture
def other(lan: Lan) -> Generator[Machine]:
    found = Machine(lan, 2)
    yield found
    found.close()


def test_a_server_and_an_agent_are_installed_and_a_server_is_removed_without_a_trace(
    machine: Machine, other: Machine, prepared: Prepared
) -> None:
    def run(*command: str) -> str:
        return machine.run(*command, check=False).stdout

    before = traces.of_machine(run)
    environ = {**prepared.environ, "INSTALL_K8E_EXEC": "server --cni basic"}
    environ["K8E_KUBECONFIG_OUTPUT"] = "/root/admin.yaml"
    installer = str(prepared.source / "install.sh")
    install = ("sh", installer, "--quiet")
    machine.run(*install, check=True, seconds=INSTALL_SECONDS, **environ)
    assert machine.path("/root/admin.yaml").exists()
    token = machine.path("/var/lib/k8e/server/node-token").read_text("ascii").strip()
    joining = {"K8E_URL": f"https://{machine.address}:6443", "K8E_TOKEN": token}
    other.run(*install, check=True, seconds=INSTALL_SECONDS, **prepared.environ, **joining)
    nodes = machine.run("/usr/local/bin/kubectl", "get", "nodes", "--no-headers").stdout
    assert [line.split()[:2] for line in nodes.splitlines()] == [
        ["node-1", "Ready"],
        ["node-2", "Ready"],
    ]
    uninstaller = str(prepared.bin / "k8e-uninstall.sh")
    machine.run(uninstaller, seconds=INSTALL_SECONDS)
    assert not machine.path("/root/admin.yaml").exists(), "it was told so at its start alone"
    after = traces.of_machine(run)
    more = {kind: after[kind] - before[kind] for kind in before}
    own = {str(prepared.bin / name) for name in ("k8e", "k8e-sandbox", "k8e-sandbox-cli")}
    more["files"] = {
        name
        for name in more["files"]
        if not name.startswith(KUBELET_S_OWN)
        and name.removeprefix("/.written") not in own  # an overlay's note that they are gone
    }
    assert not any(more.values()), {kind: lines for kind, lines in more.items() if lines}
    left = run("find", str(prepared.bin.parent), "-not", "-path", f"{prepared.source}*")
    kept = {str(prepared.bin.parent), str(prepared.bin), str(prepared.components)}
    assert set(left.split()) <= kept, left
