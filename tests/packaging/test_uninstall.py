"""install.sh --uninstall and --purge, with a gateway and sandboxes that run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k8e.conformance.lab.ports import free_port
from tests.places import NewPlace, Place, eventually

REPO = Path(__file__).resolve().parents[2]
SCRIPT = (REPO / "install.sh").read_text("utf-8")
MACHINE = Path(os.environ.get("K8E_HOME", "/opt/k8e"))


class Installed:
    """What install.sh leaves, made of the tools and the Python of this machine."""

    def __init__(self, folder: Path, place: Place) -> None:
        folder.chmod(0o755)
        self.place = place
        self.home, self.bin = folder / "home", folder / "command"
        (self.home / "bin").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("runsc", "runc"):
            (self.home / "bin" / name).symlink_to(MACHINE / "bin" / name)
        (self.home / "venv").symlink_to(sys.prefix)
        self.python = self.home / "venv/bin/python"
        (self.bin / "k8e").write_text(f"#!{self.python}\n# The command k8e, written by install.sh")
        place.environ["K8E_HOME"] = str(self.home)
        place.command = [str(self.python), "-P", "-m", "k8e"]

    def remove(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(REPO / "install.sh"), *arguments],
            env={**self.place.environ, "K8E_BIN_DIR": str(self.bin)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=55,
            check=False,
        )


@pytest.fixture
def installed(new_place: NewPlace, tmp_path: Path) -> Installed:
    return Installed(tmp_path, new_place(K8E_RUNTIME="container"))


def test_uninstalling_ends_the_sandboxes_and_says_what_stays(installed: Installed) -> None:
    place = installed.place
    for _ in range(2):
        place.json("sandbox", "create")
    done = installed.remove("--uninstall")
    assert done.returncode == 0, done.stderr
    assert "ended 2 sandboxes" in done.stdout
    assert re.search(rf"kept {place.data} \(\S+\): records of sessions", done.stdout)
    assert "sh install.sh --purge" in done.stdout
    assert not place.answers()
    assert not list(place.run_dir.glob("sandboxes/sb-*"))
    assert not installed.home.exists()
    assert not list(installed.bin.iterdir())
    assert (place.data / "sessions.db").exists()
    assert Path(sys.prefix, "bin/python").exists()


def test_sandboxes_of_a_gateway_that_was_killed_end_too(installed: Installed) -> None:
    place = installed.place
    place.json("sandbox", "create")
    place.kill_gateway()
    done = installed.remove("--uninstall", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert not list(place.run_dir.glob("sandboxes/sb-*"))


def test_a_gateway_in_folders_of_its_own_is_found_by_its_process(installed: Installed) -> None:
    place = installed.place
    place.json("sandbox", "create")
    named = {name: place.environ.pop(name) for name in ("K8E_RUN_DIR", "K8E_DATA_DIR")}
    done = installed.remove("--uninstall")
    place.environ |= named
    assert done.returncode == 0, done.stderr
    assert "ended 1 sandbox\n" in done.stdout
    assert not place.answers()


def test_purging_removes_all_that_was_kept_and_nothing_else(installed: Installed) -> None:
    place = installed.place
    place.environ["K8E_LISTEN"] = f"127.0.0.1:{free_port()}"
    session = place.json("sandbox", "run", "echo kept >kept")["session_id"]
    place.listening()
    eventually((place.data / "server/tls/sandbox-ca.crt").exists)
    place.json("sandbox", "snapshot", "save", session, "kept")
    place.json("sandbox", "api-key", "create", "somebody")
    (place.data / "of-k8e").write_text("not ours")
    (place.home / ".k8e/own").mkdir(parents=True)
    done = installed.remove("--purge")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in place.data.iterdir()] == ["of-k8e"]
    assert f"removed what is ours in {place.data}; other files are in it" in done.stdout
    assert not place.run_dir.exists()
    assert [path.name for path in (place.home / ".k8e").iterdir()] == ["own"]
    assert "k8e and all that it kept is removed" in done.stdout
    again = installed.remove("--purge")
    assert again.returncode == 0, again.stderr


def test_nothing_is_removed_while_something_cannot_be_ended(installed: Installed) -> None:
    place = installed.place
    place.json("sandbox", "create")
    # A program of the installation that belongs to no gateway of these folders.
    script = "import sys; sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [installed.python, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        done = installed.remove("--uninstall")
        other.communicate("")
    assert done.returncode == 1
    assert f"still run (pid {other.pid} of uid {os.geteuid()}); nothing was removed" in done.stderr
    assert "k8e gateway stop --destroy" in done.stderr
    assert installed.python.exists()
    assert (installed.bin / "k8e").exists()


def test_every_file_that_a_gateway_keeps_is_known_to_the_purge() -> None:
    # A cluster has a data folder of its own, which k8e-uninstall.sh removes.
    files = [path for path in (REPO / "src/k8e").rglob("*.py") if path.parent.name != "distro"]
    source = "".join(path.read_text("utf-8") for path in files)
    for folder, variable in (("data_dir", "data_parts"), ("run_dir", "run_parts")):
        found = re.search(rf"^{variable}='([^']*)'", SCRIPT, re.MULTILINE)
        assert found
        known = [re.escape(part).replace(r"\*", ".*") for part in found[1].split()]
        for name in set(re.findall(rf'\b{folder} / "([\w.-]+)"', source)):
            assert re.fullmatch("|".join(known), name), f"{variable} of install.sh lacks {name}"
