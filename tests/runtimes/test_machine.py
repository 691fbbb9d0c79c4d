"""Limits that are more than the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8e.model import GIB, Limits
from k8e.runtimes import machine
from tests.places import NewPlace

TIB = 1024 * GIB


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (Limits(), ""),
        (Limits(memory=64 << 20, disk=8 << 20, cpus=0.5, pids=16), ""),
        (Limits(memory=TIB), "memory (1024 GiB of "),
        (Limits(disk=TIB), "disk (1024 GiB of "),
        (Limits(cpus=1024), "cpus (1024 of "),
    ],
)
def test_what_nobody_can_reach_here_is_named(tmp_path: Path, limits: Limits, named: str) -> None:
    told = machine.excess(limits, tmp_path)
    assert named in told
    assert bool(named) == bool(told)


def test_more_processes_than_the_kernel_has_numbers_for_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tmp_path / "pid_max"
    few.write_text("4096\n")
    monkeypatch.setattr(machine, "PID_MAX", few)
    told = machine.excess(Limits(pids=5000, cpus=1024), tmp_path)
    assert told.startswith("limits are more than this machine has, and will not be met: cpus (1024")
    assert "pids (5000 of 4096)" in told
    few.write_text("?")
    assert machine.excess(Limits(pids=5000), tmp_path) == ""


def test_whoever_creates_such_a_session_is_told_and_gets_it(new_place: NewPlace) -> None:
    place = new_place(K8E_RUNTIME="container", PYTHONWARNINGS="error,default::RuntimeWarning")
    made = place.cli("sandbox", "create", "--memory", "900G")
    assert made.returncode == 0, made.stdout
    told = made.stderr.decode()
    assert "a limit is more than this machine has, and will not be met: memory (900 GiB of " in told
    assert place.cli("sandbox", "create", "--memory", "64M").stderr == b""
