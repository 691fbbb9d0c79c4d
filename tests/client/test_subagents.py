"""Sub-agents through the SDK, over both wires and on both runtimes."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from k8e import AsyncSandboxClient, SandboxClient, errors
from k8e.conformance import traces
from tests.gateway import worlds
from tests.gateway.worlds import CONNECT
from tests.places import Place, eventually

MANY = 10


@pytest.fixture(scope="module")
def place() -> Generator[Place]:
    with worlds.networked() as place:
        yield place


@pytest.fixture
def parent(client: SandboxClient, runtime: str) -> Generator[str]:
    found = client.create_session(
        runtime, [], env={"COLOUR": "red"}, labels={"project": "x"}, limits={"memory": "128M"}
    )
    yield found
    client.destroy_session(found)


def said(client: SandboxClient, session_id: str, command: str) -> str:
    return client.exec(session_id, command).stdout


def sandboxes(place: Place, parent: str) -> list[str]:
    """The sandboxes of a session and of all children that it ever had."""
    with contextlib.closing(sqlite3.connect(place.data / "sessions.db")) as database:
        query = "SELECT sandbox_id FROM sessions WHERE session_id=? OR parent=?"
        return [row[0] for row in database.execute(query, (parent, parent))]


def left_of(place: Place, parent: str) -> list[str]:
    """What this machine still has of a session and its children."""
    found = sandboxes(place, parent)
    return [item for name in found for item in traces.traces(name, [place.folder])]


def test_a_child_works_in_the_workspace_of_its_parent(client: SandboxClient, parent: str) -> None:
    child = client.run_subagent(parent, "reviewer", "/workspace/review/notes")
    info = client.get_session(child)
    assert (info.parent_id, info.phase) == (parent, "active")
    assert info.labels == {"project": "x", "agent_type": "reviewer"}
    assert info.limits["memory"] == 128 << 20
    assert info.expires_at == client.get_session(parent).expires_at
    listed = {item.session_id: item.parent_id for item in client.list_sessions()}
    assert (listed[parent], listed[child]) == ("", parent)
    assert said(client, child, "pwd; echo $COLOUR") == "/workspace/review/notes\nred\n"
    client.write_file(child, "/workspace/review/notes/a.txt", "from the child")
    assert client.read_file(parent, "review/notes/a.txt") == "from the child"
    client.write_file(parent, "b.txt", "from the parent")
    assert said(client, child, "cat /workspace/b.txt") == "from the parent"


SWAP = """
import os
print("ready", flush=True)
while True:
    try:
        with open("mine", "x") as file:
            file.write("print('theirs')")
        while not os.path.exists(".k8e_run.py"):
            pass
        os.rename("mine", ".k8e_run.py")
    except OSError:
        pass
"""


def test_a_child_that_swaps_the_file_of_a_run_has_nothing_run_by_its_parent(
    client: SandboxClient, parent: str
) -> None:
    child = client.run_subagent(parent, "swapper")
    swapping = client.start(child, ["python3", "-c", SWAP])
    eventually(lambda: said(client, parent, "ls mine"))
    told: set[str] = set()
    for _ in range(10):
        done = client.run(
            "x = 'ours'\nprint(x)", language="python", session_id=parent, env={"K8E_WARM": "0"}
        )
        told.add(done.stdout)
        assert done.exit_code == 0 or "was changed by another program" in done.stderr, done.stderr
        client.exec(parent, "rm -f .k8e_run.py")
    assert told <= {"ours\n", ""}
    swapping.kill()


def test_a_folder_that_cannot_be_is_refused_and_nothing_is_left(
    client: SandboxClient, parent: str
) -> None:
    client.write_file(parent, "file", "not a folder")
    said(client, parent, "ln -s /etc elsewhere; ln -s loop loop; mkdir -m 0 shut")
    before = len(client.list_sessions())
    for path in ("/workspace/file", "/workspace/file/below", "/workspace/elsewhere/new"):
        with pytest.raises(errors.InvalidRequest, match="cannot start in"):
            client.run_subagent(parent, "", path)
    for path in ("/workspace/loop", "/workspace/shut/below"):
        with pytest.raises(errors.InvalidRequest, match="cannot start in"):
            client.run_subagent(parent, "", path)
    with pytest.raises(errors.InvalidRequest, match="not a folder of the workspace"):
        client.run_subagent(parent, "", "/workspace/../etc")
    assert len(client.list_sessions()) == before
    assert said(client, parent, "ls") == "elsewhere\nfile\nloop\nshut\n"


def test_ten_children_made_at_once_share_one_workspace(client: SandboxClient, parent: str) -> None:
    def work(name: str) -> str:
        return said(client, name, f"echo x > {name}; echo x >> all")

    def look(name: str) -> str:
        return said(client, name, "ls")

    with ThreadPoolExecutor(MANY) as pool:
        tasks = [pool.submit(client.run_subagent, parent) for _ in range(MANY)]
        made = [task.result(60) for task in tasks]
        assert len(set(made)) == MANY
        list(pool.map(work, made))
        seen = list(pool.map(look, made))
    assert set(seen) == {"".join(f"{name}\n" for name in sorted([*made, "all"]))}
    assert said(client, parent, "wc -l < all") == f"{MANY}\n"


def test_the_end_of_the_parent_is_the_end_of_all_and_leaves_nothing(
    client: SandboxClient, place: Place, runtime: str
) -> None:
    parent = client.create_session(runtime)
    made = [client.run_subagent(parent) for _ in range(3)]
    client.start(made[0], "sleep 1000")
    client.destroy_session(made[1])
    assert said(client, made[0], "echo kept > file; cat file") == "kept\n"
    assert said(client, parent, "cat file") == "kept\n"
    client.destroy_session(parent)
    for name in (made[0], made[2]):
        with pytest.raises(errors.SessionNotFound, match="its parent ended: destroyed"):
            client.run("true", session_id=name)
    assert len(sandboxes(place, parent)) == 4
    assert left_of(place, parent) == []


def test_a_parent_destroyed_while_children_are_made_leaves_nothing(
    client: SandboxClient, place: Place, runtime: str
) -> None:
    parent = client.create_session(runtime)
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(client.run_subagent, parent) for _ in range(3)]
        eventually(lambda: len(sandboxes(place, parent)) > 1)
        pool.submit(client.destroy_session, parent).result(30)
        for task in tasks:
            failed = task.exception(30)
            assert failed is None or isinstance(failed, errors.SessionNotFound), failed
    assert [item for item in client.list_sessions() if item.parent_id == parent] == []
    assert left_of(place, parent) == []


def test_children_have_the_hosts_of_their_parent_also_later(
    client: SandboxClient, parent: str
) -> None:
    client.update_allowed_hosts(parent, ["a.example"])
    child = client.run_subagent(parent)
    assert client.get_session(child).allowed_hosts == ["a.example"]
    assert client.egress(child).rules == ["a.example"]
    assert client.run(CONNECT, "python", session_id=child).exit_code == 3
    client.update_allowed_hosts(parent, ["b.example", "c.example:443"])
    assert client.egress(child).rules == ["b.example", "c.example:443"]
    assert client.get_session(child).allowed_hosts == ["b.example", "c.example:443"]
    client.update_allowed_hosts(parent, [])
    assert client.egress(child).rules == ["none"]


def test_parent_and_child_do_not_reach_each_other(client: SandboxClient, parent: str) -> None:
    client.update_allowed_hosts(parent, ["open"])
    child = client.run_subagent(parent)
    address = said(client, parent, "hostname -I").split()[0]
    server = client.start(parent, "python3 -m http.server 8000 --bind 0.0.0.0")
    probe = f"timeout 5 bash -c 'exec 3<> /dev/tcp/{address}/8000'"
    ready = "until (exec 3<> /dev/tcp/127.0.0.1/8000) 2>/dev/null; do :; done"
    assert client.exec(parent, ["bash", "-c", f"{ready}; {probe}"]).exit_code == 0
    assert client.exec(child, ["bash", "-c", probe]).exit_code != 0
    server.kill()


def test_a_child_cannot_have_children_and_strangers_are_not_found(
    client: SandboxClient, parent: str
) -> None:
    child = client.run_subagent(parent)
    with pytest.raises(errors.Denied, match="cannot have sub-agents"):
        client.run_subagent(child)
    for name in ("nothing", "'; --", "x" * 10_000, "\0"):
        with pytest.raises(errors.SessionNotFound):
            client.run_subagent(name)
    with pytest.raises(errors.LimitExceeded, match="outlive"):
        client.extend_session(child, 200_000)
    assert said(client, child, "echo alive") == "alive\n"


async def test_the_asynchronous_client_makes_children_at_once(endpoint: str, runtime: str) -> None:
    async with AsyncSandboxClient(endpoint) as client:
        parent = await client.create_session(runtime, [])
        made = await asyncio.gather(*(client.run_subagent(parent, f"a{n}") for n in range(3)))
        infos = await asyncio.gather(*(client.get_session(name) for name in made))
        assert [item.labels["agent_type"] for item in infos] == ["a0", "a1", "a2"]
        await client.write_file(made[0], "file", "x")
        assert await client.read_file(made[2], "file") == "x"
        await client.destroy_session(parent)
        with pytest.raises(errors.SessionNotFound):
            await client.exec(made[0], "true")
