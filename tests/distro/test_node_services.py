"""What a node offers on the PATH of its machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from k8e.distro import node_services


@pytest.mark.anyio
async def test_what_fails_by_a_defect_is_tried_again_and_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody awaits it: it would end without a word."""
    monkeypatch.setattr(node_services, "_FIRST_PAUSE", 0.01)
    tries: list[int] = []

    async def work() -> None:
        tries.append(1)
        if len(tries) < 3:
            async with asyncio.TaskGroup():
                raise AssertionError("a defect")

    async with asyncio.timeout(20):
        await node_services.persist("signing", work)
    assert len(tries) == 3
    assert "a defect" in caplog.text


def offer(folder: Path) -> None:
    socket, config = Path("/run/containerd.sock"), Path("/etc/k8e/k8e.yaml")
    node_services.offer_commands(
        Path("/components/bin"), containerd_socket=socket, folder=folder, config=config
    )


def test_commands_are_offered_unless_the_machine_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ours = tmp_path / "own", tmp_path / "ours"
    own.mkdir()
    (own / "kubectl").write_text("#!/bin/sh\n", "utf-8")
    (own / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{own}:{ours}")
    for _ in range(2):  # the second start finds what the first one has written
        offer(ours)
        assert [path.name for path in ours.iterdir()] == ["ctr"]
        text = (ours / "ctr").read_text("utf-8")
        assert "exec /components/bin/ctr --address /run/containerd.sock" in text
    node_services.withdraw_commands(ours)
    assert not list(ours.iterdir())
    assert (own / "kubectl").exists()
