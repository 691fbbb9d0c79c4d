"""What only the gateway knows is noted, whatever a guest says of the end of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k8e.egress import denials
from k8e.egress.denials import DenialRecord, Ledger
from k8e.guest import wire
from k8e.model import Session, SessionSpec
from k8e.sessions.network import Network
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, World

END = {"code": 3, "status": "completed", "duration_ms": 12, "background": False}
# As many values as one packed value may have, so that nothing can be added to it.
FULL = wire.pack({**END, "filling": [None] * (65_536 - 12)})


class Egress(Ledger):
    """The refusals of the one sandbox of a test, in the place of the kernel."""

    def refuse(self, *names: str) -> None:
        for name in names:
            self.add(DenialRecord(name, "", 443, "dns", denials.NAME[1]), denials.NAME[0])

    def denied(self, _: str) -> int:
        return self.total

    def denials_since(self, _: str, mark: int, until: int | None = None) -> list[dict[str, Any]]:
        return self.since(mark, until)

    def drain(self) -> None:
        """The kernel has nothing to say."""

    def knows(self, _: str) -> bool:
        return False  # so that nobody asks it for more than this

    async def detach(self, _: str) -> None:
        self.__init__()

    async def close(self) -> None:
        pass


@pytest.fixture
def egress(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> Egress:
    egress = Egress()
    network: Network = sessions._network  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(network, "_egress", egress)
    return egress


@pytest.fixture
async def mine(sessions: Sessions, egress: Egress) -> Session:
    return await sessions.create(ME, SessionSpec(session_id="mine"))


def nowhere(kind: int, body: bytes) -> None:
    """A client that does not listen."""


async def rows(sessions: Sessions, kind: str) -> list[dict[str, Any]]:
    lines, _ = await sessions.events.read(sessions.get(ME, "mine"))
    return [item for item in map(json.loads, lines) if item["kind"] == kind]


async def refused(sessions: Sessions) -> list[tuple[str | None, int, list[str]]]:
    """Each row about refusals: of which run, how many, and of what."""
    return [
        (item.get("exec_id"), item["count"], [denial["name"] for denial in item["denials"]])
        for item in await rows(sessions, "egress.denied")
    ]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (wire.EXIT, wire.pack(END)),
        (wire.EXIT, b"nonsense"),
        (wire.EXIT, wire.pack([1])),
        (wire.EXIT, wire.pack({**END, "denials": [], "limits": "x"})),
        (wire.EXIT, FULL),
        (wire.ERROR, wire.pack({"code": "ENOENT", "message": "", "hint": ""})),
        (wire.ERROR, b"nonsense"),
    ],
    ids=["exit", "nonsense", "list", "empty", "full", "error", "nonsense-error"],
)
@pytest.mark.usefixtures("mine")
async def test_what_a_run_was_refused_is_noted_whatever_its_guest_sends(
    world: World, sessions: Sessions, egress: Egress, kind: int, body: bytes
) -> None:
    sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    egress.refuse("a.example", "a.example", "b.example")
    world.runtime.launched[0].talk.answer(kind, body)
    assert await refused(sessions) == [("e1", 3, ["a.example", "b.example"])]
    await sessions.destroy(ME, "mine")
    assert len(await refused(sessions)) == 1, "once"


@pytest.mark.usefixtures("mine")
async def test_refusals_reach_the_audit_trail_when_the_end_is_malformed(
    world: World, sessions: Sessions, egress: Egress
) -> None:
    seen: list[tuple[str, Any]] = []
    sessions.events.observers.append(
        lambda _session, kind, fields, _call: seen.append((kind, fields.get("count")))
    )
    sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    egress.refuse("a.example")
    world.runtime.launched[0].talk.answer(wire.EXIT, b"\xff")
    assert seen[-2:] == [("exec.finished", None), ("egress.denied", 1)]


@pytest.mark.usefixtures("mine")
async def test_limits_that_the_kernel_held_are_noted_when_the_end_is_malformed(
    world: World, sessions: Sessions
) -> None:
    sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    world.runtime.launched[0].hits = {"pids": 2}
    world.runtime.launched[0].talk.answer(wire.EXIT, b"nonsense")
    (found,) = await rows(sessions, "limit.reached")
    assert (found["exec_id"], found["limit"]) == ("e1", "pids")


@pytest.mark.usefixtures("mine")
async def test_refusals_of_a_run_that_never_ends_are_noted_with_its_session(
    world: World, sessions: Sessions, egress: Egress
) -> None:
    sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    left = sessions.open_now(ME, "mine", {"op": "exec", "id": "e2", "argv": ["x"]}, nowhere)
    assert left
    left.cancel()
    egress.refuse("a.example")
    await sessions.destroy(ME, "mine")
    assert ("e1", 1, ["a.example"]) in await refused(sessions)


@pytest.mark.usefixtures("mine")
async def test_refusals_after_a_run_are_noted_with_the_next_one_or_with_the_end(
    world: World, sessions: Sessions, egress: Egress
) -> None:
    talk = world.runtime.launched[0].talk
    for number in (1, 2):
        call = {"op": "exec", "id": f"e{number}", "argv": ["x"]}
        sessions.open_now(ME, "mine", call, nowhere)
        egress.refuse(f"during-{number}.example")
        talk.answer(wire.EXIT, wire.pack(END))
        egress.refuse(f"after-{number}.example")  # by what it left behind
    await sessions.destroy(ME, "mine")
    assert await refused(sessions) == [
        ("e1", 1, ["during-1.example"]),
        (None, 1, ["after-1.example"]),
        ("e2", 1, ["during-2.example"]),
        (None, 1, ["after-2.example"]),
    ]


@pytest.mark.usefixtures("mine")
async def test_who_joins_a_run_late_hides_nothing_that_was_refused_before(
    world: World, sessions: Sessions, egress: Egress
) -> None:
    sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    egress.refuse("early.example")
    sessions.open_now(ME, "mine", {"op": "attach", "id": "e1"}, nowhere)
    egress.refuse("late.example")
    world.runtime.launched[0].talk.answer(wire.EXIT, wire.pack(END))  # to the newest call
    assert await refused(sessions) == [
        (None, 1, ["early.example"]),
        ("e1", 1, ["late.example"]),
    ]


@pytest.mark.usefixtures("mine")
async def test_more_refusals_than_are_kept_are_counted(
    world: World, sessions: Sessions, egress: Egress
) -> None:
    sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    egress.refuse("first.example", *["flood.example"] * denials.KEPT)
    world.runtime.launched[0].talk.answer(wire.EXIT, wire.pack(END))
    assert await refused(sessions) == [("e1", denials.KEPT + 1, ["flood.example"])]


@pytest.mark.usefixtures("mine")
async def test_refusals_are_noted_though_the_sandbox_resists_its_end(
    world: World, sessions: Sessions, egress: Egress
) -> None:
    world.runtime.launched[0].fails_to_die = True
    egress.refuse("a.example")
    await sessions.destroy(ME, "mine")
    assert await refused(sessions) == [(None, 1, ["a.example"])]
