"""A gateway is killed while there are families and paused sessions, or while it changes them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from functools import partial

import pytest

from k8e import errors
from k8e.conformance import traces
from tests.sessions.gateways import Client, Gateways, eventually

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(120),
]
SMALL = {"memory": 64 << 20, "disk": 16 << 20}
COUNTER = "i=0; while :; do i=$((i+1)); echo $i; done > count"
STILL = 0.4  # seconds


def child_of(client: Client, parent: str, **call: str) -> str:
    told = client.call("run_subagent", parent_session_id=parent, **call)
    return str(told["session"]["session_id"])


def destroy(client: Client, session_id: str) -> None:
    client.call("destroy_session", session_id=session_id)


def family(gateways: Gateways, parent: str) -> list[str]:
    """The sandboxes of a parent and of all children that it ever had."""
    with contextlib.closing(sqlite3.connect(gateways.data / "sessions.db")) as database:
        query = "SELECT sandbox_id FROM sessions WHERE session_id=? OR parent=?"
        return [row[0] for row in database.execute(query, (parent, parent))]


def left_of(gateways: Gateways, sandboxes: list[str]) -> list[str]:
    return [item for name in sandboxes for item in gateways.traces(name)]


def background(client: Client, session_id: str, script: str) -> None:
    argv = ["/bin/bash", "-c", script]
    target = {"id": session_id}
    call = {"op": "exec", "session": target, "argv": argv, "background": True, "output": "ring"}
    client.receive(client.open(call))


def size(client: Client, session_id: str) -> int:
    try:
        return int(client.call("stat", session={"id": session_id}, path="count")["size"])
    except FileNotFoundError:
        return 0


def test_a_family_lives_on_with_its_workspace_and_its_relation(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    parent = client.create(runtime=runtime, limits=SMALL)
    first = child_of(client, parent, workspace_path="/workspace/deep")
    second = child_of(client, parent)
    client.shell(first, "echo before > file")
    client = gateways.restart()
    assert client.session(first)["parent_id"] == parent
    assert client.shell(first, "pwd; cat file") == "/workspace/deep\nbefore\n"
    client.shell(second, "echo after > /workspace/deep/file")
    assert client.shell(parent, "cat deep/file") == "after\n"
    with pytest.raises(errors.Denied):
        child_of(client, first)
    third = child_of(client, parent)
    assert client.shell(third, "cat deep/file") == "after\n"
    destroy(client, second)
    assert client.shell(first, "cat file") == "after\n"
    sandboxes = family(gateways, parent)
    destroy(client, parent)
    assert client.session(first)["phase"] == "ended"
    assert left_of(gateways, sandboxes) == []


def test_children_whose_parent_died_meanwhile_are_ended(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    parent = client.create(runtime=runtime, limits=SMALL)
    children = [child_of(client, parent) for _ in range(2)]
    sandbox_id = gateways.sandboxes()[parent]
    gateways.kill()
    assert traces.kill_all(sandbox_id)
    eventually(lambda: not traces.processes(sandbox_id), "the death of the parent")
    client = gateways.start()
    for name in (parent, *children):
        eventually(lambda name=name: client.session(name)["phase"] == "ended", "the end")
    assert left_of(gateways, family(gateways, parent)) == []


def test_a_new_session_does_not_get_the_uids_of_a_family_that_lives(
    gateways: Gateways, client: Client
) -> None:
    parent = client.create(runtime="container", limits=SMALL)
    child = child_of(client, parent)
    client = gateways.restart()
    other = client.create(runtime="container", limits=SMALL)
    maps = [client.shell(name, "cat /proc/self/uid_map").split()[1] for name in (parent, child)]
    assert maps[0] == maps[1]
    assert client.shell(other, "cat /proc/self/uid_map").split()[1] != maps[0]
    destroy(client, child)
    another = client.create(runtime="container", limits=SMALL)
    assert client.shell(another, "cat /proc/self/uid_map").split()[1] != maps[0]
    for name in (parent, other, another):
        destroy(client, name)


def _folder(gateways: Gateways) -> bool:
    return len(list((gateways.run_dir / "sandboxes").glob("sb-*"))) > 1


def _tool(gateways: Gateways) -> bool:
    return len(list((gateways.run_dir / "sandboxes").glob("sb-*/log"))) > 1


def _process(gateways: Gateways) -> bool:
    return len(list((gateways.run_dir / "sandboxes").glob("sb-*/pid"))) > 1


@pytest.mark.parametrize("moment", [_folder, _tool, _process])
def test_a_child_that_was_half_made_is_removed_and_its_parent_lives_on(
    gateways: Gateways, client: Client, runtime: str, moment: Callable[[Gateways], bool]
) -> None:
    parent = client.create(runtime=runtime, limits=SMALL)
    client.shell(parent, "echo kept > file")
    client.open({"op": "run_subagent", "parent_session_id": parent})
    eventually(lambda: moment(gateways), moment.__name__)
    client = gateways.restart()
    assert client.shell(parent, "cat file") == "kept\n"
    listed = client.call("list_sessions")["sessions"]
    alive = {item["session_id"] for item in listed if item["parent_id"] == parent}
    half = [
        sandbox_id
        for sandbox_id in family(gateways, parent)
        if sandbox_id not in {gateways.sandboxes()[name] for name in (parent, *alive)}
    ]
    assert left_of(gateways, half) == []
    sandboxes = family(gateways, parent)
    destroy(client, parent)
    assert left_of(gateways, sandboxes) == []


def test_a_gateway_killed_while_it_ends_a_family_leaves_nothing_of_it(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    parent = client.create(runtime=runtime, limits=SMALL)
    children = [child_of(client, parent) for _ in range(3)]
    client.open({"op": "destroy_session", "session_id": parent})
    eventually(
        lambda: len(list((gateways.run_dir / "sandboxes").glob("sb-*"))) < 4, "the first removal"
    )
    client = gateways.restart()
    # What had not begun to end lives on as a family; a second attempt takes all of it.
    if client.session(parent)["phase"] == "active":
        destroy(client, parent)
    for name in (parent, *children):
        assert client.session(name)["phase"] == "ended"
    assert left_of(gateways, family(gateways, parent)) == []


def test_a_paused_session_stays_paused_and_goes_on_when_it_is_resumed(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    parent = client.create(runtime=runtime, limits=SMALL)
    writer, watcher = child_of(client, parent), child_of(client, parent)
    background(client, writer, COUNTER)
    eventually(lambda: size(client, watcher) > 100, "the counter")
    client.call("pause_session", session_id=writer)
    before = size(client, watcher)
    client = gateways.restart()
    assert client.session(writer)["phase"] == "paused"
    with pytest.raises(errors.SessionPaused):
        client.shell(writer, "true")
    assert size(client, watcher) == before
    time.sleep(STILL)
    assert size(client, watcher) == before
    client.call("resume_session", session_id=writer)
    eventually(lambda: size(client, watcher) > before, "the counter, again")
    assert client.session(writer)["phase"] == "active"
    destroy(client, parent)


def test_a_gateway_killed_in_the_middle_of_a_pause_leaves_one_or_the_other(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    parent = client.create(runtime=runtime, limits=SMALL)
    writer, watcher = child_of(client, parent), child_of(client, parent)
    background(client, writer, COUNTER)
    eventually(lambda: size(client, watcher) > 100, "the counter")
    for op, wanted in (("pause_session", "paused"), ("resume_session", "active")):
        client.open({"op": op, "session_id": writer})
        if wanted == "paused":
            eventually(lambda: client_phase(gateways, writer) == "paused", "the intention")
        client = gateways.restart()
        if client.session(writer)["phase"] == "paused":
            eventually(partial(stands_still, client, watcher), "stillness")
        else:
            assert client.shell(writer, "echo alive") == "alive\n"
    client.call("resume_session", session_id=writer)
    assert client.shell(writer, "echo alive") == "alive\n"
    destroy(client, parent)


def client_phase(gateways: Gateways, session_id: str) -> str:
    with contextlib.closing(sqlite3.connect(gateways.data / "sessions.db")) as database:
        query = "SELECT phase FROM sessions WHERE session_id=?"
        return str(database.execute(query, (session_id,)).fetchone()[0])


def stands_still(client: Client, watcher: str) -> bool:
    before = size(client, watcher)
    time.sleep(STILL)
    return size(client, watcher) == before


def test_a_paused_session_whose_deadline_passes_is_removed_by_the_next_gateway(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, limits=SMALL)
    background(client, session_id, COUNTER)
    client.call("pause_session", session_id=session_id)
    client.call("extend_session", session_id=session_id, lifetime=0.5)
    client = gateways.restart()
    eventually(lambda: client.session(session_id)["phase"] == "ended", "the end")
    assert left_of(gateways, [gateways.sandboxes()[session_id]]) == []


def test_a_paused_sandbox_that_nobody_knows_is_removed(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, limits=SMALL)
    background(client, session_id, COUNTER)
    client.call("pause_session", session_id=session_id)
    sandbox_id = gateways.sandboxes()[session_id]
    gateways.kill()
    with contextlib.closing(sqlite3.connect(gateways.data / "sessions.db")) as database:
        database.execute("UPDATE sessions SET phase='ended' WHERE session_id=?", (session_id,))
        database.commit()
    gateways.start()
    assert gateways.traces(sandbox_id) == []
