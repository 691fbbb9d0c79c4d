"""Pausing and resuming by the runtime's program, which may need more than one try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.runtimes.container import Container
from k8e.runtimes.host import Host
from k8e.runtimes.oci import FREEZE_TRIES
from k8e.settings import load


@pytest.fixture
def runtime(tmp_path: Path) -> Container:
    folders = {"data_dir": str(tmp_path / "data"), "run_dir": str(tmp_path / "run")}
    return Container(Host(load({"K8E_CONFIG": str(tmp_path / "none")}, **folders)))


class Tool:
    """Stands in for runc: fails to freeze so many times, and then does it."""

    def __init__(self, failures: int, *, frozen_all_the_same: bool = False) -> None:
        self.asked: list[str] = []
        self._failures = failures
        self._frozen = frozen_all_the_same

    async def run(self, argv: list[str], log: Path, seconds: float) -> None:
        if "state" in argv:
            self._tell(log)
            return
        self.asked.append(argv[-2])
        if len(self.asked) <= self._failures:
            raise errors.ToolFailed("unable to freeze")

    def _tell(self, answer: Path) -> None:
        answer.write_text('{"status": "paused"}' if self._frozen else '{"status": "running"}')


async def pause(runtime: Container, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def command(*arguments: str, **_: Any) -> list[str]:
        return ["runc", *arguments]

    monkeypatch.setattr(runtime, "run", tool.run)
    monkeypatch.setattr(runtime, "command", command)
    runtime.host.folder("sb-x").mkdir(parents=True)
    await runtime.switch("pause", "sb-x", "paused")
    return tool.asked


async def test_a_sandbox_that_could_not_be_frozen_is_frozen_by_a_second_try(
    runtime: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await pause(runtime, Tool(1), monkeypatch) == ["pause"] * 2


async def test_one_that_is_frozen_although_the_program_failed_is_left_alone(
    runtime: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = Tool(9, frozen_all_the_same=True)
    assert await pause(runtime, tool, monkeypatch) == ["pause"]


async def test_one_that_can_never_be_frozen_is_told(
    runtime: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = Tool(9)
    with pytest.raises(errors.TimedOut, match="do not stop") as told:
        await pause(runtime, tool, monkeypatch)
    assert len(tool.asked) == FREEZE_TRIES
    assert "destroy the session" in told.value.hint
