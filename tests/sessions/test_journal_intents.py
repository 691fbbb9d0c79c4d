"""Execs that were sent and not noted: what a killed gateway leaves, the next one writes down."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k8e.audit import act
from k8e.audit.act import Act, AuditCaller
from k8e.guest import wire
from k8e.link import FrameSink
from k8e.model import Phase, Session, SessionSpec
from k8e.sessions import journal as module
from k8e.sessions.events import Events
from k8e.sessions.journal import Intents
from k8e.sessions.operations import GuestOperations

ACT = Act(AuditCaller("key:mine:id-1", "socket", "uid 7, pid 8"), "exec", "mine")
CALL = {"op": "exec", "id": "run-1", "argv": ["echo", "hello"]}
BODY = wire.pack(CALL)


def session() -> Session:
    return Session("mine", "me", SessionSpec(), "gvisor", "sb-one", Phase.ACTIVE, 0, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "intents"


@pytest.fixture
def intents(path: Path) -> Iterator[Intents]:
    opened = Intents(path)
    opened.forget()
    yield opened
    opened.close()


def left(path: Path) -> list[module.Intent]:
    """What a gateway finds that starts now."""
    opened = Intents(path)
    try:
        return list(opened.left())
    finally:
        opened.close()


def test_a_call_is_there_until_it_is_noted(intents: Intents, path: Path) -> None:
    noted: list[int] = []
    first = intents.keep(ACT, "mine", 7, BODY, lambda: noted.append(1))
    second = intents.keep(None, "other", 0, BODY, lambda: noted.append(2))
    expected = [module.Intent(ACT, "mine", 7, BODY), module.Intent(None, "other", 0, BODY)]
    assert left(path) == expected
    first()
    assert left(path) == expected, "it goes when all are noted"
    second()
    assert (noted, left(path)) == ([1, 2], [])
    assert b"hello" not in path.read_bytes(), "nor what it was"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_call_that_does_not_fit_is_noted_before_it_is_sent(intents: Intents, path: Path) -> None:
    noted: list[int] = []
    intents.keep(ACT, "mine", 0, b"x" * module.SIZE, lambda: noted.append(1))()
    assert (noted, left(path)) == ([1], [])


def test_noting_that_fails_keeps_nothing_for_ever(intents: Intents, path: Path) -> None:
    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        intents.keep(ACT, "mine", 7, BODY, fail)()
    assert left(path) == []


@pytest.mark.parametrize("seed", range(50))
def test_any_bytes_in_the_file_are_read_without_harm(path: Path, seed: int) -> None:
    data = bytearray(os.urandom(module.SIZE))
    data[:8] = (seed * 1500).to_bytes(8, "little")
    path.write_bytes(data)
    assert len(left(path)) < module.SIZE


def test_half_a_call_is_none(intents: Intents, path: Path) -> None:
    intents.keep(ACT, "mine", 7, BODY, lambda: None)
    data = bytearray(path.read_bytes())
    data[0] -= 1
    path.write_bytes(data)
    assert left(path) == []


class Asked:
    """A link that keeps what it is asked; dies when it is told to, like a gateway."""

    def __init__(self, dies: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self._dies = dies

    def open(self, call: dict[str, Any], on_frame: FrameSink, on_lost: Any, body: bytes) -> Any:
        self.calls.append(wire.unpack_dict(body))
        if self._dies:
            os._exit(0)


class Network:
    def mark(self, sandbox_id: str) -> int:
        return 0


class Alive:
    """As much of a live session as an operation needs."""

    def __init__(self) -> None:
        self.session = session()
        self.has_background = False

    def began(self, operation: Any, timeout: float) -> None:
        pass


async def rows(events: Events) -> list[dict[str, Any]]:
    lines, _ = await events.read(session())
    return [json.loads(line) for line in lines]


def opener(tmp_path: Path, path: Path) -> tuple[GuestOperations, Events]:
    events = Events(tmp_path / "events")
    events.start(["sb-one"])
    none: Any = None
    any_network: Any = Network()
    intents = Intents(path)
    return GuestOperations(
        events, any_network, intents, own=none, on_dead=none, on_lost=lambda live, operation: None
    ), events


def die_in_between(tmp_path: Path, path: Path, call: dict[str, Any], *, sent: bool) -> None:
    """A gateway that is killed between the sending of a call and its note, or just after both."""
    pid = os.fork()
    if pid == 0:
        try:
            opening, events = opener(tmp_path, path)
            events.begin(session())
            live: Any = Alive()
            link: Any = Asked(dies=sent)
            opening.start(live, link, call, lambda kind, body: None)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("env", [{}, {"TOKEN": "hidden-value"}], ids=["plain", "with an env"])
async def test_what_was_sent_by_a_killed_gateway_is_noted_once(
    tmp_path: Path, path: Path, env: dict[str, str]
) -> None:
    die_in_between(tmp_path, path, {**CALL, "env": env}, sent=True)
    assert all(b"hidden-value" not in intent.body for intent in left(path))
    opener(tmp_path, path)[0].recover(lambda _: session())
    opening, events = opener(tmp_path, path)
    opening.recover(lambda _: session())
    found = [(row["kind"], row["exec_id"], row["command"]) for row in await rows(events)]
    assert found == [("exec.started", "run-1", "echo hello")]


async def test_what_was_noted_is_not_noted_again(tmp_path: Path, path: Path) -> None:
    die_in_between(tmp_path, path, dict(CALL), sent=False)
    opening, events = opener(tmp_path, path)
    opening.recover(lambda _: session())
    assert [row["kind"] for row in await rows(events)] == ["exec.started"]


async def test_an_exec_that_was_tried_again_is_noted_again(tmp_path: Path, path: Path) -> None:
    _, events = opener(tmp_path, path)
    events.begin(session())
    events.exec_started(session(), "run-1", command="echo hello")
    events.exec_failed(session(), "run-1", "guest_failed")
    events.close()
    die_in_between(tmp_path, path, dict(CALL), sent=True)
    opening, events = opener(tmp_path, path)
    opening.recover(lambda _: session())
    kinds = [row["kind"] for row in await rows(events)]
    assert kinds == ["exec.started", "exec.finished", "exec.started"]


def test_where_no_memory_can_be_had_everything_is_noted_first(tmp_path: Path) -> None:
    opened = Intents(tmp_path / "no" / "such" / "folder")
    noted: list[int] = []
    then = opened.keep(ACT, "mine", 0, BODY, lambda: noted.append(1))
    assert noted == [1]
    then()
    opened.forget()
    opened.close()
    assert (noted, list(opened.left())) == ([1], [])


async def test_a_note_says_who_it_was(tmp_path: Path, path: Path) -> None:
    kept = Intents(path)
    kept.forget()
    kept.keep(ACT, "mine", 0, BODY, lambda: None)
    kept.close()
    opening, events = opener(tmp_path, path)
    seen: list[Act | None] = []

    def observe(*_: object) -> None:
        seen.append(act.current())

    events.observers.append(observe)
    opening.recover(lambda _: session())
    assert seen == [ACT]
    assert act.current() is None
