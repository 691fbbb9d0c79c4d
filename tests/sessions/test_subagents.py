"""What sessions decide about sub-agents. No sandbox is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k8e import errors
from k8e.guest import wire
from k8e.model import MIB, Limits, Phase, Session, SessionSpec
from k8e.sessions import subagents
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, OTHER, PATIENCE, FakeGuest, World

SPEC = SessionSpec(
    tenant="team",
    env={"COLOUR": "red"},
    labels={"project": "x"},
    limits=Limits(memory=64 * MIB),
    idle_timeout=777,
)


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if check():
                return
            await asyncio.sleep(0)


async def ended(sessions: Sessions, session_id: str) -> str:
    await until(lambda: sessions.get(ME, session_id).phase is Phase.ENDED)
    return sessions.get(ME, session_id).ended_reason


async def family(sessions: Sessions, count: int = 1, spec: SessionSpec = SPEC) -> list[Session]:
    """A parent, and so many children."""
    parent = await sessions.create(ME, spec)
    made = [await sessions.run_subagent(ME, parent.session_id) for _ in range(count)]
    return [parent, *made]


def nowhere(kind: int, body: bytes) -> None:
    """Takes frames."""


async def test_a_child_has_what_its_parent_has_and_shares_its_workspace(
    world: World, sessions: Sessions
) -> None:
    parent = await sessions.create(ME, SPEC)
    child = await sessions.run_subagent(ME, parent.session_id, "reviewer", "/workspace//a/./b/")
    assert child.session_id.startswith("sub-")
    assert (child.parent, child.owner, child.runtime) == (parent.session_id, "me", "gvisor")
    assert (child.spec.tenant, child.spec.env) == ("team", {"COLOUR": "red"})
    assert (child.spec.limits, child.spec.idle_timeout) == (SPEC.limits, 777)
    assert child.spec.labels == {"project": "x", "agent_type": "reviewer"}
    assert child.expires_at == parent.expires_at
    assert child.to_json()["parent_id"] == parent.session_id
    assert parent.to_json()["parent_id"] == ""
    assert sessions.get(ME, child.session_id) == child
    first, second = world.runtime.specs
    assert (first.workspace_of, second.workspace_of) == ("", parent.sandbox_id)
    assert (second.sandbox_id, second.limits) == (child.sandbox_id, SPEC.limits)
    guest = world.runtime.launched[1]
    assert (guest.env, guest.cwd) == ({"COLOUR": "red"}, "/workspace/a/b")


async def test_a_child_has_no_children(sessions: Sessions) -> None:
    parent, child = await family(sessions)
    with pytest.raises(errors.Denied, match="cannot have sub-agents") as caught:
        await sessions.run_subagent(ME, child.session_id)
    assert parent.session_id in caught.value.hint


async def test_a_parent_that_is_missing_or_somebody_elses_is_not_found(sessions: Sessions) -> None:
    parent = await sessions.create(ME, SPEC)
    with pytest.raises(errors.SessionNotFound):
        await sessions.run_subagent(ME, "nothing")
    with pytest.raises(errors.SessionNotFound):
        await sessions.run_subagent(OTHER, parent.session_id)
    await sessions.destroy(ME, parent.session_id)
    with pytest.raises(errors.SessionNotFound, match="not found"):
        await sessions.run_subagent(ME, parent.session_id)
    assert sessions.count() == 0


@pytest.mark.parametrize(
    "path",
    [
        "workspace",
        "relative",
        "/",
        "/work",
        "/workspaces",
        "/workspace/..",
        "/workspace/../etc",
        "/workspace/a/../b",
        "/workspace/..\0",
        "/etc",
        "//etc/workspace",
        "/workspace/\0",
        "/workspace/" + "x" * 5000,
        "..",
        " /workspace",
    ],
)
async def test_a_path_outside_of_the_workspace_is_refused(
    world: World, sessions: Sessions, path: str
) -> None:
    parent = await sessions.create(ME, SPEC)
    with pytest.raises(errors.InvalidRequest):
        await sessions.run_subagent(ME, parent.session_id, "", path)
    assert len(world.runtime.specs) == 1


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("", ""),
        ("/workspace", "/workspace"),
        ("/workspace/", "/workspace"),
        ("//workspace/a", "/workspace/a"),
        ("/workspace/..a/b..", "/workspace/..a/b.."),
        ("/workspace/ein ordner/ü", "/workspace/ein ordner/ü"),
    ],
)
def test_a_path_of_the_workspace_is_taken_as_it_is_meant(path: str, clean: str) -> None:
    assert subagents.check_path(path) == clean


@pytest.mark.parametrize("kind", ["x" * 201, "new\nline", "\0"])
async def test_a_strange_agent_type_is_refused(sessions: Sessions, kind: str) -> None:
    parent = await sessions.create(ME, SPEC)
    with pytest.raises(errors.InvalidRequest, match="agent type"):
        await sessions.run_subagent(ME, parent.session_id, kind)


async def test_children_have_a_limit_that_those_being_made_count_for(tmp_path: Path) -> None:
    world = World(tmp_path, max_children=3)
    async with world.running() as sessions:
        parent, first = await family(sessions)
        world.runtime.gate.clear()
        two = [asyncio.ensure_future(sessions.run_subagent(ME, parent.session_id)) for _ in "ab"]
        await until(lambda: len(world.runtime.specs) == 4)
        with pytest.raises(errors.LimitExceeded, match="K8E_MAX_CHILDREN"):
            await sessions.run_subagent(ME, parent.session_id)
        world.runtime.gate.set()
        await asyncio.gather(*two)
        with pytest.raises(errors.LimitExceeded, match="3 sub-agents"):
            await sessions.run_subagent(ME, parent.session_id)
        await sessions.destroy(ME, first.session_id)
        await sessions.run_subagent(ME, parent.session_id)


async def test_children_count_for_the_limit_of_all_sessions(tmp_path: Path) -> None:
    async with World(tmp_path, max_sessions=3).running() as sessions:
        parent, *_ = await family(sessions, 2)
        with pytest.raises(errors.LimitExceeded, match="K8E_MAX_SESSIONS"):
            await sessions.run_subagent(ME, parent.session_id)


async def test_ten_children_made_at_once_are_ten(world: World, sessions: Sessions) -> None:
    parent = await sessions.create(ME, SPEC)
    made = await asyncio.gather(*(sessions.run_subagent(ME, parent.session_id) for _ in range(10)))
    assert len({child.session_id for child in made}) == 10
    assert {spec.workspace_of for spec in world.runtime.specs[1:]} == {parent.sandbox_id}
    assert sessions.count() == 11


# Ends.


async def test_the_end_of_a_parent_takes_its_children_along_first(
    world: World, sessions: Sessions
) -> None:
    parent, *made = await family(sessions, 3)
    order: list[str] = []
    sessions.on_end.append(lambda session: order.append(session.session_id))
    await sessions.destroy(ME, parent.session_id)
    assert order[-1] == parent.session_id
    assert set(order[:-1]) == {child.session_id for child in made}
    reason = "its parent ended: destroyed by its owner"
    assert {sessions.get(ME, child.session_id).ended_reason for child in made} == {reason}
    assert all(guest.killed.is_set() for guest in world.runtime.launched)
    assert sessions.count() == 0


async def test_the_end_of_a_child_leaves_parent_and_siblings_alone(
    world: World, sessions: Sessions
) -> None:
    parent, first, second = await family(sessions, 2)
    await sessions.destroy(ME, first.session_id)
    assert [item.session_id for item in sessions.listing(ME)] == [
        parent.session_id,
        second.session_id,
    ]
    assert [guest.killed.is_set() for guest in world.runtime.launched] == [False, True, False]


async def test_a_parent_that_dies_takes_its_children_along(
    world: World, sessions: Sessions
) -> None:
    parent, child = await family(sessions)
    world.runtime.launched[0].death.set_result("the sandbox ran out of memory")
    assert await ended(sessions, parent.session_id) == "the sandbox ran out of memory"
    assert "parent ended: the sandbox ran out of memory" in await ended(sessions, child.session_id)


async def test_a_child_that_dies_is_ended_alone(world: World, sessions: Sessions) -> None:
    parent, child = await family(sessions)
    world.runtime.launched[1].death.set_result("it died")
    assert await ended(sessions, child.session_id) == "it died"
    assert sessions.get(ME, parent.session_id).phase is Phase.ACTIVE


async def test_a_parent_that_ends_while_a_child_is_made_leaves_nothing(
    world: World, sessions: Sessions
) -> None:
    parent = await sessions.create(ME, SPEC)
    world.runtime.gate.clear()
    making = asyncio.ensure_future(sessions.run_subagent(ME, parent.session_id))
    await until(lambda: len(world.runtime.specs) == 2)
    await sessions.destroy(ME, parent.session_id)
    with pytest.raises(errors.SessionNotFound, match="not found"):
        await making
    assert sessions.count() == 0
    assert sessions.listing(ME) == []
    assert {item.phase for item in sessions.listing(ME, ended=True)} == {Phase.ENDED}


async def test_a_caller_that_leaves_does_not_hide_the_child_from_its_parents_end(
    world: World, sessions: Sessions
) -> None:
    parent = await sessions.create(ME, SPEC)
    world.runtime.gate.clear()
    making = asyncio.ensure_future(sessions.run_subagent(ME, parent.session_id))
    await until(lambda: len(world.runtime.specs) == 2)
    making.cancel()
    world.runtime.gate.set()
    await until(lambda: sessions.count() == 2 and len(sessions.listing(ME)) == 2)
    await sessions.destroy(ME, parent.session_id)
    assert sessions.listing(ME) == []


async def test_a_child_that_cannot_be_made_leaves_its_parent_as_it_was(
    world: World, sessions: Sessions
) -> None:
    parent = await sessions.create(ME, SPEC)
    world.runtime.failure = errors.ToolFailed("no more loop devices")
    with pytest.raises(errors.ToolFailed, match="loop devices"):
        await sessions.run_subagent(ME, parent.session_id)
    world.runtime.failure = None
    assert (await sessions.run_subagent(ME, parent.session_id)).parent == parent.session_id


# Time.


async def test_children_follow_the_lifetime_of_their_parent(sessions: Sessions) -> None:
    parent, child = await family(sessions)
    longer = await sessions.extend(ME, parent.session_id, 200_000)
    assert sessions.get(ME, child.session_id).expires_at == longer.expires_at
    shorter = await sessions.extend(ME, parent.session_id, 50)
    assert sessions.get(ME, child.session_id).expires_at == shorter.expires_at


async def test_a_child_cannot_outlive_its_parent_but_may_end_before(sessions: Sessions) -> None:
    parent, child = await family(sessions)
    with pytest.raises(errors.LimitExceeded, match="outlive") as caught:
        await sessions.extend(ME, child.session_id, 200_000)
    assert parent.session_id in caught.value.hint
    early = await sessions.extend(ME, child.session_id, 60)
    await sessions.extend(ME, parent.session_id, 200_000)
    assert sessions.get(ME, child.session_id).expires_at == early.expires_at


async def test_a_child_ends_with_its_parents_lifetime(world: World, sessions: Sessions) -> None:
    parent, child = await family(sessions, spec=SessionSpec(lifetime=0.5))
    await ended(sessions, parent.session_id)
    await ended(sessions, child.session_id)
    assert sessions.count() == 0


async def test_a_parent_whose_child_is_being_made_gives_it_its_new_lifetime(
    world: World, sessions: Sessions
) -> None:
    parent = await sessions.create(ME, SPEC)
    world.runtime.gate.clear()
    making = asyncio.ensure_future(sessions.run_subagent(ME, parent.session_id))
    await until(lambda: len(world.runtime.specs) == 2)
    shorter = await sessions.extend(ME, parent.session_id, 100)
    world.runtime.gate.set()
    assert (await making).expires_at == shorter.expires_at


async def test_a_parent_is_not_idle_while_a_child_is_busy(world: World, sessions: Sessions) -> None:
    parent, child = await family(sessions, spec=SessionSpec(idle_timeout=0.3))
    call = {"op": "exec", "argv": ["true"]}
    assert sessions.open_now(ME, child.session_id, call, nowhere)
    deadline = time.monotonic() + 0.9
    await until(lambda: time.monotonic() > deadline)
    assert {item.phase for item in sessions.listing(ME)} == {Phase.ACTIVE}
    assert len(sessions.listing(ME)) == 2
    finished = time.monotonic()
    world.runtime.launched[1].talk.answer(wire.EXIT, wire.pack({"code": 0}))
    assert await ended(sessions, child.session_id) in (
        "it was idle",
        "its parent ended: it was idle",
    )
    assert await ended(sessions, parent.session_id) == "it was idle"
    assert time.monotonic() - finished >= 0.3


# Restarts.


async def restarted(world: World, *gone: int) -> None:
    """Let guests survive, but not these, until the next gateway adopts them."""
    survivors = [
        FakeGuest(guest.sandbox_id)
        for at, guest in enumerate(world.runtime.launched)
        if at not in gone
    ]
    world.runtime.survivors = survivors


async def test_a_family_is_adopted_as_a_family(world: World) -> None:
    async with world.running() as sessions:
        parent, child = await family(sessions)
    await restarted(world)
    async with world.running() as sessions:
        assert sessions.get(ME, child.session_id).parent == parent.session_id
        with pytest.raises(errors.Denied):
            await sessions.run_subagent(ME, child.session_id)
        await sessions.destroy(ME, parent.session_id)
        assert await ended(sessions, child.session_id)
        assert all(guest.killed.is_set() for guest in world.runtime.survivors)


async def test_a_child_whose_parent_is_gone_is_ended_at_a_restart(world: World) -> None:
    async with world.running() as sessions:
        parent, child = await family(sessions)
    await restarted(world, 0)
    async with world.running() as sessions:
        assert sessions.count() == 0
        assert sessions.get(ME, parent.session_id).phase is Phase.ENDED
        assert sessions.get(ME, child.session_id).ended_reason == "its parent was gone"
        assert world.runtime.survivors[0].killed.is_set()


async def test_a_parent_whose_child_is_gone_lives_on(world: World) -> None:
    async with world.running() as sessions:
        parent, child = await family(sessions)
    await restarted(world, 1)
    async with world.running() as sessions:
        assert [item.session_id for item in sessions.listing(ME)] == [parent.session_id]
        assert sessions.get(ME, child.session_id).phase is Phase.ENDED
