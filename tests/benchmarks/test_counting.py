"""What benchmarks count: memory, leaks, points; and what they compare with."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bare, interactive, leaks, memory, peers
from benchmarks.peers import docker, podman, srt
from benchmarks.subjects import warm
from k8e.bench.measure import Series, TableRow

CLONE_VM = 0x100
ROLLUP = """\
55d0e0e00000-7ffd00000000 ---p 00000000 00:00 0                          [rollup]
Rss:               11504 kB
Pss:                2730 kB
Pss_Dirty:          2500 kB
"""
CONFIG = {
    "process": {"args": ["guest"]},
    "linux": {"cgroupsPath": "/k8e/sb-model"},
    "mounts": [{"source": "/run/x/sb-model/link"}],
}


def test_memory_is_the_proportional_share() -> None:
    assert memory.parse_pss(ROLLUP) == 2730 * 1024
    assert memory.parse_pss("") == 0
    assert 1 < memory.processes_mb([os.getpid()]) < 10_000


def test_a_process_that_has_ended_has_no_memory() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert memory.processes_mb([pid]) == 0


def test_memory_that_two_processes_share_wholly_is_counted_once() -> None:
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(1 << 16)
    # A function that only waits: glibc's pause, in a process of its own that has our memory.
    start = ctypes.cast(libc.pause, ctypes.c_void_p)
    top = ctypes.c_void_p(ctypes.addressof(stack) + len(stack.raw))
    pid = libc.clone(start, top, CLONE_VM | signal.SIGCHLD, None)
    try:
        twins = memory.processes_mb([os.getpid(), pid])
        assert twins == pytest.approx(memory.processes_mb([os.getpid()]), rel=0.2)
        assert memory.parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text()) > 1e6
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_grew_is_a_leak_and_memory_is_not_counted() -> None:
    before = {"mounts": 3, "processes": 2, leaks.GATEWAY_MB: 50}
    after = {"mounts": 5, "processes": 1, leaks.GATEWAY_MB: 60}
    assert leaks.grown(before, after) == {"mounts": 2}
    assert leaks.grown(before, before) == {}


def test_a_family_is_everything_below_a_process() -> None:
    parents = {2: 1, 3: 2, 4: 3, 5: 1, 6: 5}
    assert leaks.family(parents, 2) == {2, 3, 4}
    assert leaks.family(parents, 9) == {9}


def test_what_this_process_holds_can_be_counted(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    before = leaks.count(tmp_path, os.getpid())
    (tmp_path / "run" / "left").touch()
    with open(os.devnull, "rb"):
        after = leaks.count(tmp_path, os.getpid())
    assert leaks.grown(before, after) == {"descriptors": 1, "files": 1}


def test_a_file_with_the_name_of_a_gone_sandbox_is_found(tmp_path: Path) -> None:
    left = tmp_path / "run" / "sandboxes" / "sb-gone"
    left.mkdir(parents=True)
    assert leaks.left_behind(["sb-gone", "sb-other"], tmp_path) == [f"file {left}"]


def test_a_process_with_the_name_of_a_gone_sandbox_is_found(tmp_path: Path) -> None:
    script = "import sys; sys.stdin.read()"
    argv = [sys.executable, "-c", script, f"{tmp_path}/run/sandboxes/sb-gone"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as left:
        assert leaks.left_behind(["sb-gone", "sb-other"], tmp_path) == [f"process {left.pid}"]


def test_more_sandboxes_of_nobody_than_wait_for_sessions_are_told(tmp_path: Path) -> None:
    strays = [tmp_path / "run" / "sandboxes" / name for name in ("sb-a", "sb-b")]
    for path in (*strays, tmp_path / "run" / "sandboxes" / "sb-known"):
        path.mkdir(parents=True)
    assert leaks.unknown(["sb-known"], 2, tmp_path) == []
    told = [f"of nobody: file {path}" for path in strays]
    assert leaks.unknown(["sb-known"], 1, tmp_path) == told


def test_a_bundle_is_renamed_and_given_another_program() -> None:
    model, bundle = Path("/run/x/sb-model"), Path("/tmp/b/sb-other")
    told = json.loads(bare.rename_config(json.dumps(CONFIG), model, bundle))
    assert told["mounts"] == [{"source": "/tmp/b/sb-other/link"}]
    assert told["linux"] == {"cgroupsPath": "/k8e/sb-other"}
    assert told["process"] == {"args": ["guest"]}
    told = json.loads(bare.rename_config(json.dumps(CONFIG), model, bundle, ["echo", "1"]))
    assert told["process"] == {"args": ["echo", "1"]}


def test_points_are_those_of_the_public_benchmark() -> None:
    assert interactive.score([0.0] * 10) == 100
    assert interactive.score([1000.0] * 100) == 90
    assert interactive.score([20_000.0]) == 0
    outliers = [100.0] * 96 + [9000.0] * 4
    assert interactive.score(outliers) == 99, "the worst twentieth is left out"


def test_each_system_and_mode_has_one_document() -> None:
    ours = Series("k8e gvisor, new, sequential", "ms", [3.0, 1.0, 2.0])
    peer = Series("podman run (crun), sequential", "ms", [9.0])
    rows = [TableRow("first echo", "gvisor", ours, peer)] * 2
    rows.append(TableRow("exec", "gvisor", Series("exec, sequential", "ms", [1.0])))
    told = interactive.documents(rows)
    assert [(each["provider"], each["mode"]) for each in told] == [
        ("k8e gvisor, new", "sequential"),
        ("podman run (crun)", "sequential"),
    ]
    assert told[0]["summary"]["ttiMs"]["median"] == 2
    assert told[0]["iterations"] == [{"ttiMs": 3.0}, {"ttiMs": 1.0}, {"ttiMs": 2.0}]


@pytest.mark.parametrize(
    ("told", "language", "count"),
    [
        ({"warm": 2}, "python", 2),
        ({"warm": 2}, "node", None),
        ({"warm": 4, "waiting": {"python": 1, "node": 3}}, "node", 3),
        ({"warm": 1, "waiting": {"python": 1}}, "bash", None),
    ],
)
def test_a_guest_tells_what_it_keeps_warm(
    told: dict[str, Any], language: str, count: int | None
) -> None:
    assert warm.count_ready(told, language) == count


@pytest.mark.parametrize("finder", [podman, docker, srt], ids=lambda each: each.__name__)
def test_a_peer_that_is_not_installed_says_how_to_get_it(
    finder: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(srt, "INSTALLED", tmp_path / "none.js")
    with pytest.raises(peers.Unavailable, match="make bench-peers"):
        finder.found(tmp_path, {}).__enter__()  # type: ignore[attr-defined]


def always(*argv: str) -> peers.Peer:
    """A peer that runs something else than it is asked for."""

    def wrap(_: Sequence[str]) -> list[str]:
        return list(argv)

    return peers.Peer("it", "container", wrap, {})


def test_a_peer_that_does_not_work_says_why_in_its_own_words() -> None:
    with pytest.raises(peers.Unavailable, match="no"):
        always("/bin/sh", "-c", "echo no >&2; exit 3").check()
    with pytest.raises(peers.Unavailable, match="printed"):
        always("/bin/echo", "2").check()
    with pytest.raises(peers.Unavailable, match="nothing"):
        always("/nothing").check()
    assert always("/bin/echo", "1").check().first_line(["echo", "1"]) > 0


def test_the_root_of_peers_has_links_where_this_host_has_folders(tmp_path: Path) -> None:
    root = peers.make_root(tmp_path)
    assert peers.make_root(tmp_path) == root, "it can be made twice"
    assert (root / "usr").is_dir()
    assert (root / "bin").readlink() == Path("usr/bin")
