"""User namespaces of sandboxes: whose they are, which ids they have, and what becomes of them."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

import pytest

from k8e import settings
from k8e.model import Limits
from k8e.runtimes import bundle, container, mounts
from k8e.runtimes.container import Container
from k8e.runtimes.host import Host, SandboxRecord
from k8e.runtimes.uids import FIRST_ID

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="ids of others are root's to give")

NS_GET_OWNER_UID = 0xB704


def owner(path: Path) -> int:
    with path.open("rb") as file:
        return struct.unpack("I", fcntl.ioctl(file, NS_GET_OWNER_UID, bytes(4)))[0]


def test_a_namespace_belongs_to_its_sandboxs_first_uid_and_lives_without_a_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "userns"
    container.make_user_namespace(path, FIRST_ID, bundle.ID_RANGE)
    try:
        assert owner(path) == FIRST_ID
        assert path.stat().st_ino != Path("/proc/self/ns/user").stat().st_ino
    finally:
        mounts.unmount(path)


def test_where_nobody_else_may_make_one_the_sandbox_gets_one_of_root_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(settings.load({"K8E_DATA_DIR": str(tmp_path), "K8E_RUN_DIR": str(tmp_path)}))
    host.folder("sb-x").mkdir(parents=True)
    monkeypatch.setattr(container, "_HOLDER", ["false"])
    record = SandboxRecord("sb-x", "container", Limits(), FIRST_ID)
    assert Container(host).user_namespace(record) == ""
    assert "inotify" in caplog.text
