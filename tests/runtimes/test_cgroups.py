"""Cgroup paths on v1 and v2, on a fake root.

Cgroup v2 cannot be tried for real on a machine that boots with v1; tests/vm boots one for that.
Here only the file names and the parsing are checked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from k8e.runtimes import cgroups

ID = "sb-x"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def v1(root: Path) -> Path:
    for controller in ("cpu", "memory", "pids"):
        write(root / controller / "cgroup.procs", "1\n")
        (root / controller / "k8e" / ID).mkdir(parents=True)
    (root / "unified").mkdir()  # hybrid hosts have it; without cgroup.procs here it is no hierarchy
    return root


@pytest.fixture
def v2(root: Path) -> Path:
    write(root / "cgroup.controllers", "cpuset cpu io memory pids\n")
    write(root / "cgroup.subtree_control", "")
    write(root / "cgroup.procs", "1\n")
    (root / "k8e" / ID).mkdir(parents=True)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_version_is_recognised(v1: Path) -> None:
    assert not cgroups.is_unified()
    assert {path.name for path in cgroups.hierarchies()} == {"cpu", "memory", "pids"}


def test_version_two_is_one_hierarchy(v2: Path) -> None:
    assert cgroups.is_unified()
    assert cgroups.hierarchies() == [v2]


def test_a_sandbox_lies_below_our_own_group() -> None:
    assert cgroups.path_of(ID) == "/k8e/sb-x"


@pytest.mark.parametrize(("text", "hits"), [("oom_kill 0\n", 0), ("under_oom 1\noom_kill 3\n", 3)])
def test_out_of_memory_is_counted_on_version_one(v1: Path, text: str, hits: int) -> None:
    write(v1 / "memory/k8e" / ID / "memory.oom_control", text)
    assert cgroups.memory_limit_hits(ID) == hits


def test_out_of_memory_is_counted_on_version_two(v2: Path) -> None:
    write(v2 / "k8e" / ID / "memory.events", "low 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert cgroups.memory_limit_hits(ID) == 2


def test_cpu_time_is_read_on_both_versions(v1: Path, tmp_path: Path) -> None:
    write(v1 / "cpuacct/k8e" / ID / "cpuacct.usage", "1500000000\n")
    assert cgroups.cpu_seconds(ID) == 1.5
    write(v1 / "cgroup.controllers", "cpu\n")  # and now it is version two
    assert cgroups.cpu_seconds(ID) is None
    write(v1 / "k8e" / ID / "cpu.stat", "usage_usec 2500000\nuser_usec 1\n")
    assert cgroups.cpu_seconds(ID) == 2.5


def test_no_group_means_no_hits_and_no_limit(v2: Path) -> None:
    assert cgroups.memory_limit_hits("sb-unknown") == 0
    assert cgroups.limit_of("sb-unknown", "memory") == ""


@pytest.mark.parametrize(
    ("controller", "name", "text", "limit"),
    [
        ("cpu", "cpu.cfs_quota_us", "50000\n", "50000"),
        ("cpu", "cpu.cfs_quota_us", "-1\n", ""),
        ("memory", "memory.limit_in_bytes", "1000\n", "1000"),
        ("pids", "pids.max", "max\n", ""),
    ],
)
def test_limits_are_read_on_version_one(
    v1: Path, controller: str, name: str, text: str, limit: str
) -> None:
    write(v1 / controller / "k8e" / ID / name, text)
    assert cgroups.limit_of(ID, controller) == limit


@pytest.mark.parametrize(
    ("controller", "name", "text", "limit"),
    [
        ("cpu", "cpu.max", "50000 100000\n", "50000 100000"),
        ("cpu", "cpu.max", "max 100000\n", ""),
        ("memory", "memory.max", "1000\n", "1000"),
        ("pids", "pids.max", "41\n", "41"),
    ],
)
def test_limits_are_read_on_version_two(
    v2: Path, controller: str, name: str, text: str, limit: str
) -> None:
    write(v2 / "k8e" / ID / name, text)
    assert cgroups.limit_of(ID, controller) == limit


def test_removing_removes_nested_groups_in_every_hierarchy(v1: Path) -> None:
    (v1 / "cpu/k8e" / ID / "inner/deeper").mkdir(parents=True)
    cgroups.remove(ID)
    assert list(v1.glob("*/k8e/*")) == []
    cgroups.remove(ID)
    cgroups.remove_parent()
    assert list(v1.glob("*/k8e")) == []


def test_our_group_stays_while_a_sandbox_is_in_it(v2: Path) -> None:
    cgroups.remove_parent()
    assert (v2 / "k8e" / ID).is_dir()


def test_version_two_lets_groups_have_limits(v2: Path) -> None:
    cgroups.prepare()
    assert (v2 / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_version_one_needs_no_preparation(v1: Path) -> None:
    cgroups.prepare()
    assert not (v1 / "cgroup.subtree_control").exists()


def test_all_sandboxes_together_weigh_less_than_others_on_version_one(v1: Path) -> None:
    write(v1 / "cpu/k8e/cpu.shares", "1024\n")
    cgroups.weigh()
    assert (v1 / "cpu/k8e/cpu.shares").read_text() == "256"


def test_all_sandboxes_together_weigh_less_than_others_on_version_two(v2: Path) -> None:
    write(v2 / "k8e/cpu.weight", "100\n")
    cgroups.weigh()
    assert (v2 / "k8e/cpu.weight").read_text() == "25"


def test_a_host_without_weights_is_no_hindrance(v1: Path) -> None:
    cgroups.weigh()
    assert not (v1 / "cpu/k8e/cpu.shares").exists()


OTHER_LIMITS = {
    "memory": {"limit": 200, "swap": 200},
    "cpu": {"quota": 50000, "period": 100000},
    "pids": {"limit": 33},
}


@pytest.mark.parametrize("before", [100, 300])
def test_a_running_sandbox_gets_other_limits_on_version_one(
    v1: Path, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = v1 / "memory/k8e" / ID
    together = group / "memory.memsw.limit_in_bytes"
    for file in (together, group / "memory.limit_in_bytes"):
        write(file, f"{before}\n")
    write(v1 / "cpu/k8e" / ID / "cpu.cfs_quota_us", "200000\n")
    write(v1 / "pids/k8e" / ID / "pids.max", "max\n")
    order: list[str] = []
    real = Path.write_text

    def note(self: Path, data: str, encoding: str) -> int:
        order.append(self.name)
        return real(self, data, encoding)

    monkeypatch.setattr(Path, "write_text", note)
    cgroups.set_limits(ID, OTHER_LIMITS)
    limits = [cgroups.limit_of(ID, name) for name in ("cpu", "memory", "pids")]
    assert limits == ["50000", "200", "33"]
    assert together.read_text() == "200"
    # The kernel refuses less for both together than for memory alone.
    assert (order.index(together.name) < order.index("memory.limit_in_bytes")) is (before < 200)


def test_a_running_sandbox_gets_other_limits_on_version_two(v2: Path) -> None:
    for name in ("cpu.max", "memory.max", "pids.max"):
        write(v2 / "k8e" / ID / name, "max\n")
    cgroups.set_limits(ID, OTHER_LIMITS)
    limits = [cgroups.limit_of(ID, name) for name in ("cpu", "memory", "pids")]
    assert limits == ["50000 100000", "200", "33"]


def test_processes_that_were_refused_are_counted_on_both_versions(
    request: pytest.FixtureRequest,
) -> None:
    v1 = request.getfixturevalue("v1")
    write(v1 / "pids/k8e" / ID / "pids.events", "max 4\n")
    write(v1 / "memory/k8e" / ID / "memory.oom_control", "oom_kill 2\n")
    assert cgroups.limit_hits(ID) == {"memory": 2, "pids": 4}
    v2 = request.getfixturevalue("v2")
    write(v2 / "k8e" / ID / "pids.events", "max 7\n")
    assert cgroups.limit_hits(ID)["pids"] == 7
    assert cgroups.limit_hits("sb-unknown") == {"memory": 0, "pids": 0}


def test_buffers_of_sockets_are_bounded_where_memory_does_not_have_them(v1: Path) -> None:
    file = v1 / "memory/k8e" / ID / "memory.kmem.tcp.limit_in_bytes"
    cgroups.limit_sockets(ID, 1000)  # a kernel without it
    assert not file.exists()
    write(file, "9223372036854771712\n")
    cgroups.limit_sockets(ID, 1000)
    assert file.read_text() == "1000"
