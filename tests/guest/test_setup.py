"""Making a sandbox ready: nothing of it is skipped because it failed before."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8e.guest import setup, spawn


def test_a_sandbox_that_could_not_be_made_ready_never_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("mounting failed")

    monkeypatch.setattr(setup, "SLOT", str(tmp_path))
    monkeypatch.setattr(setup.SessionPlace, "_mount", refuse)
    place = setup.SessionPlace()
    with pytest.raises(OSError, match="mounting failed"):
        place.settle()
    with pytest.raises(OSError, match="before"):
        place.settle()


class Processes:
    """Some that are there, and those that were killed, which stay in sight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, breeding: bool) -> None:
        self.there = [10, 11, 12]
        self.killed: list[int] = []
        self._breeding = breeding
        monkeypatch.setattr(spawn, "_all_processes", self._list)
        monkeypatch.setattr(spawn, "_send_signal_to", self._kill)

    def _kill(self, pid: int, _: int) -> None:
        self.killed.append(pid)

    def _list(self) -> list[int]:
        if self._breeding:
            self.there.append(self.there[-1] + 1)
        return list(self.there)


def test_all_but_the_spared_are_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch, breeding=False)
    spawn.kill_others(lambda pid: pid == 11)
    assert processes.killed == [10, 12]


def test_the_first_process_beside_the_guest_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "first_process", lambda: 10)
    processes = Processes(monkeypatch, breeding=False)
    spawn.kill_others(lambda _: False)
    assert processes.killed == [11, 12]


def test_processes_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Processes(monkeypatch, breeding=True)
    with pytest.raises(OSError, match="do not end"):
        spawn.kill_others(lambda _: False)
