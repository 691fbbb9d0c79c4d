"""``k8e components``: what the command prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from k8e.cli.components import Lines
from k8e.distro.component_store import ComponentStore
from k8e.distro.components import COMPONENTS, RUNC
from tests.cli.terminals import Terminal
from tests.distro.test_component_store import put
from tests.places import COMMAND, NewPlace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A components folder that has runc and nothing else."""
    store = ComponentStore(tmp_path / "components")
    put(store, RUNC)
    return store.folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "components", *arguments],
        env={**os.environ, "K8E_COMPONENTS_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=50,
    )


def answer(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = run(folder, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_list_has_every_component_and_its_state(folder: Path) -> None:
    told = answer(folder, "list")
    assert told["dir"] == str(folder)
    found = {item["name"]: item for item in told["components"]}
    assert list(found) == [item.name for item in COMPONENTS if not item.is_for_tests]
    assert found["runc"]["state"] == "present"
    assert found["etcd"]["state"] == "missing"
    assert found["etcd"]["files"] == ["bin/etcd"]


def test_only_those_of_a_network_are_listed(folder: Path) -> None:
    names = [item["name"] for item in answer(folder, "list", "--cni", "basic")["components"]]
    assert "conntrack" in names
    assert "cilium" not in names


def test_verify_fails_if_anything_is_wrong(folder: Path) -> None:
    answer(folder, "verify", "runc")
    (folder / "bin/runc").write_bytes(b"another")
    (found,) = answer(folder, "verify", "runc", code=1)["components"]
    assert found["state"] == "wrong"
    assert "checksum" in found["detail"]
    answer(folder, "list", "runc")


def test_what_is_there_is_not_installed_again(folder: Path) -> None:
    told = answer(folder, "install", "runc")
    assert (told["installed"], told["present"]) == ([], ["runc"])


def test_an_unknown_name_is_an_error_that_tells_the_known_ones(folder: Path) -> None:
    told = answer(folder, "install", "runcc", code=1)
    assert "no component runcc" in told["error"]
    assert "containerd" in told["detail"]


SLOW_GO = """#!/bin/sh
case $1 in
version) echo go version go1.26.8 linux/amd64 ;;
env) echo '{}' ;;
*) echo $$ >"$PID"; exec sleep 1000 ;;
esac
"""


def test_who_ends_the_command_ends_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.write_text(SLOW_GO)
    go.chmod(0o755)
    pid, folder = tmp_path / "pid", tmp_path / "components"
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PID": str(pid),
        "K8E_COMPONENTS_DIR": str(folder),
    }
    with subprocess.Popen(
        [*COMMAND, "components", "install", "etcd"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stderr
        assert "etcd: go build: " in command.stderr.readline()
        compiler = int(pid.read_text())
        command.terminate()
        assert command.wait(20) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(compiler, 0)
    assert sorted(item.name for item in folder.iterdir()) == [".lock", "build"]
    assert list((folder / "build").iterdir()) == []


def test_people_get_a_table(folder: Path, new_place: NewPlace) -> None:
    place = new_place(K8E_COMPONENTS_DIR=str(folder))
    with Terminal(place, "components", "list", columns=200) as terminal:
        assert b"VERSION" in terminal.until(b"USE")
        terminal.until(b"present")
        assert b"built with go9.9" in terminal.until(b"starts containers")
        assert terminal.end() == 0


def test_progress_is_told_seldom_where_no_terminal_is(capfd: pytest.CaptureFixture[str]) -> None:
    with Lines(["runc", "etcd"], is_terminal=False) as lines:
        for second in range(20):
            lines.tell("etcd", f"go build: {second} s")
        lines.tell("etcd", "done")
    assert capfd.readouterr().err.splitlines() == ["[2/2] etcd: go build: 0 s", "[2/2] etcd: done"]
