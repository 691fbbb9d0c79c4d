"""The parts of a gateway without root that need no user: ids, groups, holders that died."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from k8e import errors
from k8e.rootless import cgroup, holder, pasta
from k8e.rootless.holder import IdRange
from k8e.runtimes import cgroups, mounts
from k8e.runtimes.workspaces import Workspaces
from k8e.system import start_time

TEXT = """# a comment
other:1000:65536
me:100000:65536
me:300000:131072
1234:500000:10
me:oops:1
me:-1:5
me
"""


def test_ranges_are_those_of_the_name_and_of_the_number_and_nonsense_is_skipped() -> None:
    assert holder.parse(TEXT, {"me", "1234"}) == [
        IdRange(100000, 65536),
        IdRange(300000, 131072),
        IdRange(500000, 10),
    ]
    assert holder.parse(TEXT, {"nobody"}) == []


@pytest.mark.parametrize("text", ["", "0:100000:4095\n"])
def test_too_few_ids_are_an_error_that_says_how_to_get_more(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "subuid").write_text(text)
    monkeypatch.setitem(holder.ID_FILES, "uid", tmp_path / "subuid")
    with pytest.raises(errors.RuntimeUnusable, match="sets aside") as caught:
        holder.find_ids("uid", 0)
    assert "usermod" in caught.value.hint


def test_the_largest_range_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "subgid").write_text("0:100000:5000\n0:200000:9000\n")
    monkeypatch.setitem(holder.ID_FILES, "gid", tmp_path / "subgid")
    assert holder.find_ids("gid", 0) == IdRange(200000, 9000)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "started": 0}', '{"pid": "x", "started": 3}']
)
def test_a_holder_whose_record_says_nothing_useful_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "holder.json").write_text(text)
    assert holder.find(tmp_path) is None
    holder.end(tmp_path)  # no error: nobody is there


def test_a_pid_that_another_process_has_now_is_no_holder(tmp_path: Path) -> None:
    record = {"pid": os.getpid(), "started": start_time(os.getpid())}
    (tmp_path / "holder.json").write_text(json.dumps(record))
    assert holder.find(tmp_path) == holder.Holder(**record)
    (tmp_path / "holder.json").write_text(json.dumps({**record, "started": record["started"] - 1}))
    assert holder.find(tmp_path) is None


def test_a_group_is_divided_only_by_who_left_it_and_only_where_memory_can_be_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "MOUNTED", tmp_path)
    assert cgroup.given() is None, "on cgroup v1 there is none"
    own = tmp_path / "scope" / cgroup.LEAF
    own.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (own.parent / "cgroup.subtree_control").touch()
    monkeypatch.setattr(cgroup, "_own", lambda: own)
    (own.parent / "cgroup.controllers").write_text("cpu pids\n")
    assert cgroup.given() is None
    (own.parent / "cgroup.controllers").write_text("cpu memory pids\n")
    assert cgroup.given() == own.parent
    monkeypatch.setattr(cgroup, "_own", lambda: own.parent)
    assert cgroup.given() is None, "processes are in it"


def test_root_has_all_groups() -> None:
    assert cgroups.root() == cgroups.ROOT
    assert cgroups.path_of("sb-x") == "/k8e/sb-x"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_workspace_in_memory_has_its_size_and_its_number_of_files(tmp_path: Path) -> None:
    target = tmp_path / "w"
    target.mkdir()
    workspaces = Workspaces(tmp_path / "none", in_memory=True)
    workspaces.mount("sb-x", target, size=8 << 20, owner=1000, inodes=50)
    try:
        told = os.statvfs(target)
        assert (told.f_blocks * told.f_frsize, told.f_files) == (8 << 20, 50)
        assert target.stat().st_uid == 1000
        workspaces.replace("sb-x", target, size=4 << 20, owner=1000)
        assert os.statvfs(target).f_blocks * os.statvfs(target).f_frsize == 4 << 20
    finally:
        mounts.unmount(target)
    assert not (tmp_path / "none").exists()


class Killed(BaseException):
    """What stands for the end of a gateway."""


def test_what_carries_packets_is_known_also_to_who_comes_after_a_gateway_killed_while_starting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, tun = tmp_path / "pasta", tmp_path / "tun"
    program.write_text("#!/bin/sh\nexec sleep 30\n", "ascii")
    program.chmod(0o700)
    tun.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(pasta, "TUN", tun)

    def be_killed(_pid: int) -> int:
        raise Killed

    monkeypatch.setattr(os, "pidfd_open", be_killed)
    with pytest.raises(Killed):
        pasta.ensure(tmp_path)
    pid, _ = json.loads((tmp_path / "tether.json").read_text("ascii"))
    try:
        assert pasta.ensure(tmp_path) == "", "a second one could not serve the same network"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
