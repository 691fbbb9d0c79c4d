"""What happens to guests that do not answer, or answer what nobody asked for."""

from __future__ import annotations

import asyncio

import pytest

from k8e import errors
from k8e.guest import wire
from k8e.model import Phase, SessionSpec
from k8e.sessions import lifetime, live
from k8e.sessions.operations import MAX_VALUE, Operation
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, PATIENCE, World

SOON = 0.02  # seconds


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FIRST_ANSWER", SOON)
    monkeypatch.setattr(live, "EXIT_GRACE", SOON)
    monkeypatch.setattr(lifetime, "PING_SECONDS", SOON)


def nowhere(kind: int, body: bytes) -> None:
    """Takes frames."""


async def test_a_guest_that_stopped_answering_ends_its_session(
    world: World, sessions: Sessions
) -> None:
    session = await sessions.create(ME, SessionSpec())
    heard: asyncio.Queue[int] = asyncio.Queue()
    call = {"op": "exec", "argv": ["true"]}
    sessions.open_now(ME, session.session_id, call, lambda kind, body: heard.put_nowait(kind))
    await world.runtime.launched[0].was_killed()
    async with asyncio.timeout(PATIENCE):
        assert await heard.get() == wire.ERROR
    ended = sessions.get(ME, session.session_id)
    assert (ended.phase, ended.ended_reason) == (Phase.ENDED, "its guest stopped answering")


async def test_a_guest_that_ignores_a_timeout_and_a_ping_ends_its_session(
    world: World, sessions: Sessions
) -> None:
    session = await sessions.create(ME, SessionSpec())
    call = {"op": "exec", "argv": ["true"], "timeout": SOON}
    sessions.open_now(ME, session.session_id, call, nowhere)
    world.runtime.launched[0].talk.answer(wire.RESULT, wire.pack({"id": "x", "pid": 2}))
    await world.runtime.launched[0].was_killed()


async def test_a_slow_operation_of_a_guest_that_answers_goes_on(
    world: World, sessions: Sessions
) -> None:
    session = await sessions.create(ME, SessionSpec())
    talk = world.runtime.launched[0].talk
    operation = sessions.open_now(ME, session.session_id, {"op": "stat", "path": "x"}, nowhere)
    async with asyncio.timeout(PATIENCE):
        while len(talk.calls) < 3:  # pinged twice
            await asyncio.sleep(0)
            if talk.calls[-1] == {"op": "ping"}:
                talk.answer(wire.RESULT, wire.pack({}))
    assert operation is not None
    assert not operation.done
    assert sessions.get(ME, session.session_id).phase is Phase.ACTIVE
    operation.cancel()


@pytest.mark.parametrize(
    ("op", "kind"),
    [("exec", wire.DATA), ("exec", wire.END), ("write", wire.STDIN), ("stat", wire.CREDIT)],
)
def test_a_frame_that_does_not_belong_to_an_operation_is_the_clients_fault(
    op: str, kind: int
) -> None:
    operation = Operation(op, nowhere)
    operation.attach(FakeChannel())  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InvalidRequest, match="does not belong"):
        operation.send(kind, b"\0\0\0\1")


@pytest.mark.parametrize(
    ("op", "kind", "size"),
    [
        ("exec", wire.END, 100),
        ("read", wire.EXIT, 100),
        ("write", wire.EXIT, 100),
        ("stat", wire.RESULT, MAX_VALUE + 1),
        ("exec", wire.EXIT, MAX_VALUE + 1),
        ("exec", wire.CALL, 1),
    ],
)
def test_a_frame_that_only_fills_memory_is_the_guests_fault(op: str, kind: int, size: int) -> None:
    operation = Operation(op, nowhere)
    with pytest.raises(wire.WireError):
        operation.receive(kind, b"x" * size)


class FakeChannel:
    def send(self, kind: int, body: bytes = b"") -> None:
        raise AssertionError("it must not reach the guest")

    def close(self) -> None:
        """Nothing to close."""
