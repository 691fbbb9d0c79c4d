"""Control groups of users, on files that stand in for the kernel's; tests/vm tries real ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from k8e.rootless import cgroup
from k8e.runtimes import cgroups

FILES = ("cgroup.procs", "cgroup.subtree_control")


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group that a user was given, with a shell and a process of k8e's in it."""
    monkeypatch.setattr(cgroup, "MOUNTED", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    found = tmp_path / "user.slice" / "k8e.scope"
    found.mkdir(parents=True)
    for name in FILES:
        (found / name).touch()
    (found / "cgroup.procs").write_text("11\n12\n")
    (found / "cgroup.controllers").write_text("cpu memory pids\n")
    return found


def place(monkeypatch: pytest.MonkeyPatch, **paths: Path | None) -> None:
    """Say where processes are: ``self``, and others by number with an underscore before it."""
    known = {name.lstrip("_"): path for name, path in paths.items()}
    monkeypatch.setattr(cgroup, "_of", known.get)


def test_all_processes_of_a_group_go_aside_and_groups_below_it_may_have_limits(
    scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch, self=scope)
    moved: list[tuple[str, str]] = []
    write = Path.write_text

    def note(path: Path, text: str, encoding: str | None = None) -> int:
        moved.append((path.parent.name, text))
        return write(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", note)
    cgroup.step_aside()
    assert {pid for group, pid in moved if group == cgroup.LEAF} == {"11", "12"}
    assert (scope / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


@pytest.mark.parametrize("controllers", ["memory pids\n", ""])
def test_a_group_without_all_controllers_is_left_alone(
    scope: Path, monkeypatch: pytest.MonkeyPatch, controllers: str
) -> None:
    (scope / "cgroup.controllers").write_text(controllers)
    place(monkeypatch, self=scope)
    cgroup.step_aside()
    assert not (scope / cgroup.LEAF).exists()


def test_a_group_that_cannot_be_left_stays_as_it_was(
    scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch, self=scope)

    def refuse(group: Path, target: Path) -> None:
        raise PermissionError(f"{group} {target}")

    monkeypatch.setattr(cgroup, "_move", refuse)
    cgroup.step_aside()
    assert not (scope / cgroup.LEAF).exists()


def test_groups_are_those_of_the_holder_wherever_a_gateway_is(
    scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = scope / cgroup.LEAF
    place(monkeypatch, self=scope.parent / "other.scope", _1=leaf)
    assert cgroup.given() == scope
    assert not cgroup.reached(), "who is elsewhere cannot start anything there"
    place(monkeypatch, self=leaf, _1=leaf)
    assert cgroup.reached()
    place(monkeypatch, self=leaf, _1=scope.parent)
    assert cgroup.given() is None
    assert not cgroup.reached()


def test_a_gateway_goes_to_where_its_holder_is(
    scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = scope / cgroup.LEAF
    leaf.mkdir()
    place(monkeypatch, self=scope.parent, _77=leaf)
    cgroup.follow(77)
    assert (leaf / "cgroup.procs").read_text().isdecimal()
    place(monkeypatch, self=scope.parent, _77=scope)
    cgroup.follow(77)
    assert (scope / "cgroup.procs").read_text() == "11\n12\n", "that one has none"


def test_a_group_is_made_with_its_limits_for_a_runtime_that_cannot(
    scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", scope)
    group = scope / cgroups.PARENT / "sb-x"
    group.mkdir(parents=True)
    for name in ("cpu.max", "memory.max", "memory.swap.max", "pids.max"):
        (group / name).write_text("max")
    resources = {
        "memory": {"limit": 5000},
        "cpu": {"quota": 50, "period": 100},
        "pids": {"limit": 7},
    }
    cgroups.make("sb-x", resources)
    values = {file.name: file.read_text() for file in group.iterdir()}
    assert values == {
        "cpu.max": "50 100",
        "memory.max": "5000",
        "memory.swap.max": "0",
        "pids.max": "7",
    }


def test_a_command_goes_into_a_group_before_it_becomes_a_program(
    scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", scope)
    group = scope / cgroups.PARENT / "sb-x"
    program = ["/bin/echo", "a b", "$0"]
    failed = subprocess.run(cgroups.within("sb-x", program), capture_output=True, check=False)
    assert (failed.returncode > 0, failed.stdout) == (True, b""), "not without the group"
    group.mkdir(parents=True)
    done = subprocess.run(cgroups.within("sb-x", program), capture_output=True, check=True)
    assert (done.stdout, (group / "cgroup.procs").read_text()) == (b"a b $0\n", "0\n")
