"""What clients do when their gateway dies: each action is one call, or a few that belong together.

An action runs in a thread with a connection of its own, and has the session that it changes to
itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tests.chaos import world as worlds
from tests.chaos.world import ABSENT, ACTIVE, ALLOWED, PAUSED, Someone, World
from tests.sessions.gateways import Client


class Turn(NamedTuple):
    """What an action gets; its own randomness, so that a seed means the same whoever is faster."""

    world: World
    client: Client
    random: Random
    someone: Someone | None

    @property
    def one(self) -> Someone:
        assert self.someone is not None
        return self.someone

    def name(self, prefix: str) -> str:
        return f"{prefix}-{self.random.randrange(1 << 32):08x}"

    def family(self) -> list[Someone]:
        """The children of the one."""
        people = self.world.people.values()
        return [item for item in people if item.parent == self.one.session_id]


Action = Callable[[Turn], None]


def create(turn: Turn) -> None:
    world, client = turn.world, turn.client
    one = world.people.setdefault((name := turn.name("s")), Someone(name))
    with one.phase.becoming(ACTIVE):
        _make(world, client, one)
    call = {"op": "exec", "session": {"id": name}, "argv": ["bash", "-c", worlds.PROBE]}
    client.receive(client.open({**call, "background": True, "output": "ring"}))


def _make(world: World, client: Client, one: Someone, **spec: object) -> None:
    client.create(
        session_id=one.session_id,
        runtime=world.runtime,
        allowed_hosts=[ALLOWED],
        env={"WHO": one.session_id},
        limits=worlds.SMALL,
        **spec,
    )


def create_brief(turn: Turn) -> None:
    world, client = turn.world, turn.client
    one = Someone(turn.name("brief"), deadline=time.time() + 30)
    world.people[one.session_id] = one
    one.phase.may = [ABSENT, ACTIVE]
    _make(world, client, one, lifetime=1.0)
    one.deadline = float(client.session(one.session_id)["expires_at"])


def restore(turn: Turn) -> None:
    """A session that begins with a snapshot."""
    world, client = turn.world, turn.client
    saved = world.saved()
    one = world.people.setdefault((name := turn.name("s")), Someone(name))
    for file, digest in world.contents[saved[0]].items():
        one.files[file] = worlds.Aspect(digest)
    with one.phase.becoming(ACTIVE):
        _make(world, client, one, snapshot=saved[0])


def destroy(turn: Turn) -> None:
    client, one = turn.client, turn.one
    children = turn.family()
    for child in children:
        child.phase.may.append(ABSENT)
    with one.phase.becoming(ABSENT):
        client.call("destroy_session", session_id=one.session_id)
    for child in children:
        child.phase.may = [ABSENT]


def run(turn: Turn) -> None:
    client, one = turn.client, turn.one
    exec_id = turn.name("run")
    aspect = one.runs[exec_id] = worlds.Aspect(False)
    call = {"op": "exec", "session": {"id": one.session_id}, "id": exec_id, "background": True}
    with aspect.becoming(True):
        client.receive(client.open({**call, "argv": ["bash", "-c", worlds.RUN]}))


def write(turn: Turn) -> None:
    client, one = turn.client, turn.one
    name = turn.random.choice(("a", "b"))
    data, digest = worlds.content(turn.random)
    with one.files[name].becoming(digest):
        worlds.upload(client, one.session_id, name, data)


def compute(turn: Turn) -> None:
    """Set a variable in a context."""
    client, one = turn.client, turn.one
    value = turn.random.randrange(1000)
    call = {"op": "exec", "session": {"id": one.session_id}, "context": "c", "language": "python"}
    with one.variable.becoming(value):
        code = f"x = {value}".encode()
        client.output(client.open({**call, "code": code, "make_context": "python"}))


def allow(turn: Turn) -> None:
    client, one = turn.client, turn.one
    words = ("none",) if one.words.sure == (ALLOWED,) else (ALLOWED,)
    family = turn.family()
    for child in family:
        child.words.may.append(words)
    with one.words.becoming(words):
        client.call("update_allowed_hosts", session_id=one.session_id, hosts=list(words))
    for child in family:
        child.words.may = [words]


def pause(turn: Turn) -> None:
    client, one = turn.client, turn.one
    family = turn.family()
    for child in family:
        child.phase.may.append(PAUSED)
    with one.phase.becoming(PAUSED):
        client.call("pause_session", session_id=one.session_id)
    for child in family:
        child.phase.may = [PAUSED]


def resume(turn: Turn) -> None:
    client, one = turn.client, turn.one
    family = turn.family()
    for child in family:
        child.phase.may = [ACTIVE, PAUSED]
    with one.phase.becoming(ACTIVE):
        client.call("resume_session", session_id=one.session_id)
    for child in family:
        child.phase.may = [ACTIVE]


def save(turn: Turn) -> None:
    world, client, one = turn.world, turn.client, turn.one
    name = turn.name("snap")
    aspect = world.snapshots[name] = worlds.Aspect(False)
    world.contents[name] = {file: item.sure for file, item in one.files.items()}
    with aspect.becoming(True):
        client.call("save_snapshot", session_id=one.session_id, name=name)


def forget(turn: Turn) -> None:
    world, client = turn.world, turn.client
    saved = world.saved()[0]
    with world.snapshots[saved].becoming(False):
        client.call("delete_snapshot", name=saved)


def expose(turn: Turn) -> None:
    client, one = turn.client, turn.one
    if one.exposed.sure:
        with one.exposed.becoming(""):
            client.call("unexpose", session_id=one.session_id, port=8000)
        return
    one.exposed.may = ["", "any"]
    told = client.call("expose", session_id=one.session_id, port=8000)
    one.exposed = worlds.Aspect(told["url"])


def confirm(turn: Turn) -> None:
    client, one = turn.client, turn.one
    told = client.call("confirm_action", session_id=one.session_id, action="rm -r /workspace")
    one.approvals.append(told["approval_id"])


def have_child(turn: Turn) -> None:
    world, client, one = turn.world, turn.client, turn.one
    told = client.call("run_subagent", parent_session_id=one.session_id)["session"]
    child = Someone(told["session_id"], parent=one.session_id)
    child.phase = worlds.Aspect(ACTIVE)
    child.words = worlds.Aspect(one.words.sure)
    world.people[child.session_id] = child


def change_template(turn: Turn) -> None:
    world, client = turn.world, turn.client
    name = turn.random.choice(("t1", "t2"))
    aspect = world.templates.setdefault(name, worlds.Aspect(0))
    pids = turn.random.choice((0, 32, 48))
    if not pids and not aspect.sure:
        pids = 64
    with aspect.becoming(pids):
        if pids:
            recipe = {"name": name, "limits": {"pids": pids}, "runtime": world.runtime}
            client.call("apply_template", template={**recipe, "pool": {"min": 1, "max": 1}})
        else:
            client.call("delete_template", name=name)


def refill(turn: Turn) -> None:
    """Empty the pool, and fill it again."""
    world, client = turn.world, turn.client
    client.call("drain_pool")
    client.call("set_pool", runtime=world.runtime, min=1, max=2, wait=True)


def probe(turn: Turn) -> None:
    """Have the runtimes tried out, which starts sandboxes of nobody's."""
    turn.client.call("doctor", fresh=True)


ALONE: dict[str, Action] = {
    "create": create,
    "create_brief": create_brief,
    "restore": restore,
    "forget": forget,
    "change_template": change_template,
    "refill": refill,
    "probe": probe,
}
"""What needs no session."""
WITH_SNAPSHOT = ("restore", "forget")
SLOW = ("probe",)
"""What takes seconds, and so is left out where there is little time."""
WITH_ONE: dict[str, tuple[Action, tuple[str, ...], bool]] = {
    "destroy": (destroy, (ACTIVE, PAUSED), True),
    "run": (run, (ACTIVE,), True),
    "write": (write, (ACTIVE,), False),
    "compute": (compute, (ACTIVE,), True),
    "allow": (allow, (ACTIVE,), False),
    "pause": (pause, (ACTIVE,), False),
    "resume": (resume, (PAUSED,), False),
    "save": (save, (ACTIVE,), False),
    "expose": (expose, (ACTIVE,), True),
    "confirm": (confirm, (ACTIVE,), True),
    "have_child": (have_child, (ACTIVE,), False),
}
"""What needs one: in which phases, and whether a child will do."""
