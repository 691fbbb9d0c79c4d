"""Units of a server and an agent. What stands in for systemctl writes down what it is told."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from k8e import errors
from k8e.distro import service
from k8e.distro.service import Service

RECORDER = '#!/bin/sh\necho "$@" >>{told}\nexit {code}\n'


class Machine:
    """Folders for units and programs, and what the programs were told."""

    def __init__(self, folder: Path) -> None:
        self.units, self.programs = folder / "units", folder / "programs"
        self.units.mkdir()
        self.programs.mkdir()
        self._told = folder / "told"
        self.program("systemctl")
        self.program("k8e")

    def program(self, name: str, code: int = 0) -> None:
        path = self.programs / name
        path.write_text(RECORDER.format(told=self._told, code=code))
        path.chmod(0o755)

    def told(self) -> list[str]:
        lines = self._told.read_text().splitlines() if self._told.exists() else []
        self._told.unlink(missing_ok=True)
        return lines

    def service(self, role: str, *arguments: str, **environ: str) -> Service:
        return Service(role, arguments, environ, self.units)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One on which systemd is said to run."""
    found = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(found.programs), prepend=":")
    monkeypatch.setenv("K8E_BIN_DIR", str(found.programs))
    monkeypatch.setattr(service, "SYSTEMD_RUNS", found.units)
    return found


@pytest.fixture
def without_systemd(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(service, "SYSTEMD_RUNS", machine.units / "none")
    return machine


def test_a_server_is_enabled_and_started(machine: Machine) -> None:
    found = machine.service("server", "--cni", "basic", K8E_TOKEN="secret", HOME="/root")
    assert "systemctl status k8e" in found.install()
    assert machine.told() == ["daemon-reload", "enable k8e", "restart k8e"]
    assert f"\nExecStart={machine.programs}/k8e server --cni basic\n" in found.unit.read_text()
    assert found.environment.read_text() == 'K8E_TOKEN="secret"\n'
    assert found.environment.stat().st_mode & 0o777 == 0o600


def test_it_can_be_left_for_the_next_start_of_the_machine(machine: Machine) -> None:
    machine.service("agent").install(start=False)
    assert machine.told() == ["daemon-reload", "enable k8e-agent"]


def test_an_agent_is_removed_and_a_server_that_is_not_there_is_not(machine: Machine) -> None:
    agent = machine.service("agent", K8E_URL="https://10.0.0.1:6443")
    agent.install()
    machine.told()
    assert agent.remove()
    assert machine.told()[0] == "disable --now k8e-agent"
    assert list(machine.units.iterdir()) == []
    assert not machine.service("server").remove()
    assert machine.told() == []


def test_systemd_reads_the_unit_as_it_is_meant(machine: Machine) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze")
    found = machine.service("server", "--node-label", "a=b c", "--node-name", 'x"$HOME%n\\')
    found.install()
    done = subprocess.run([analyze, "verify", found.unit], capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "k8e.service" in line]
    assert complaints == []
    assert r'--node-label "a=b c" --node-name "x\"$$HOME%%n\\"' in found.unit.read_text()


def test_a_variable_with_a_line_break_is_refused(machine: Machine) -> None:
    with pytest.raises(errors.InvalidRequest, match="line break"):
        machine.service("server", K8E_TOKEN="a\nExecStart=b").install()


def test_what_systemd_says_is_told(machine: Machine) -> None:
    machine.program("systemctl", code=1)
    with pytest.raises(errors.ToolFailed, match="systemctl daemon-reload failed"):
        machine.service("server").install()


def test_without_systemd_it_is_started_in_the_background(without_systemd: Machine) -> None:
    said = without_systemd.service("server", "--cni", "none").install()
    assert without_systemd.told() == ["server --cni none --detach"]
    assert "after a reboot" in said
    assert list(without_systemd.units.iterdir()) == []
    without_systemd.service("server").install(start=False)
    assert without_systemd.told() == []


def test_a_start_in_the_background_that_fails_is_an_error(without_systemd: Machine) -> None:
    without_systemd.program("k8e", code=3)
    with pytest.raises(errors.ToolFailed, match="k8e agent did not start"):
        without_systemd.service("agent").install()


@pytest.mark.parametrize("words", [("--token", "K10secret"), ("--token=K10secret",)])
def test_a_token_is_not_where_every_user_can_read_it(
    machine: Machine, words: tuple[str, ...]
) -> None:
    found = machine.service("agent", "--server", "https://10.0.0.1", *words, "--node-name", "x")
    found.install()
    assert "secret" not in found.unit.read_text()
    assert "k8e agent --server https://10.0.0.1 --node-name x\n" in found.unit.read_text()
    assert found.environment.read_text() == 'K8E_TOKEN="K10secret"\n'
    assert found.environment.stat().st_mode & 0o777 == 0o600


def test_without_systemd_a_token_is_no_argument_either(without_systemd: Machine) -> None:
    program = without_systemd.programs / "k8e"
    program.write_text(program.read_text().replace('"$@"', '"$@ $K8E_TOKEN"'))
    without_systemd.service("agent", "--token", "K10secret").install()
    assert without_systemd.told() == ["agent --detach K10secret"]


def test_a_unit_is_stopped_by_systemd_which_would_start_it_again(machine: Machine) -> None:
    server = machine.service("server")
    assert not server.stop()
    server.install()
    machine.told()
    assert server.stop()
    assert machine.told() == ["stop k8e"]
