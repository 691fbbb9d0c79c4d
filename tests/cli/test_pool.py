"""``k8e pool`` on real gateways: what waits, who gets it, and that nothing of it is left."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from k8e import SandboxClient
from k8e.conformance import traces
from k8e.errors import Denied
from tests.places import Place, eventually


def pool(place: Place) -> dict[str, object]:
    (found,) = place.json("pool", "--json")["pools"]
    return found


def fill(place: Place, least: int, most: int = 8) -> dict[str, object]:
    return place.json("pool", "set", "--min", str(least), "--max", str(most), "--wait")


def waiting(place: Place) -> set[str]:
    """The sandboxes that there are and that are no session's."""
    there = {path.name for path in (place.run_dir / "sandboxes").glob("sb-*")}
    return there - set(place.sandboxes())


@pytest.fixture(scope="module")
def own_place(runtime: str) -> Generator[Place]:
    """A gateway of each runtime, for the tests of this module."""
    place = Place(K8E_RUNTIME=runtime, K8E_POOL_MIN="0", K8E_POOL_MAX="4")
    yield place
    place.close()


@pytest.fixture
def warm_place(own_place: Place) -> Place:
    """The same, with two sandboxes ready, no session, and no memory of earlier claims."""
    for session in own_place.json("sandbox", "sessions")["sessions"]:
        own_place.json("sandbox", "destroy", session["session_id"])
    own_place.json("gateway", "stop")
    eventually(lambda: not own_place.socket.exists())
    assert fill(own_place, 2, 4)["ready"] == 2
    return own_place


def test_a_session_gets_a_ready_sandbox_with_its_own_environment_and_limits(
    warm_place: Place,
) -> None:
    before = waiting(warm_place)
    with SandboxClient(warm_place.endpoint) as client:
        limits = {"memory": 192 << 20, "pids": 20, "disk": 32 << 20}
        made = client.create_session(env={"WHO": "me"}, limits=limits)
        told = client.exec(
            made, "echo $WHO $(ls -A /workspace | wc -l) $(pwd); df -m --output=size ."
        )
        assert told.stdout.startswith("me 0 /workspace\n")
        assert int(told.stdout.split()[-1]) <= 32
        code = "import os\nfor _ in range(40): os.fork() or os.pause()"
        forks = client.run(
            f"import signal\n{code.replace('os.pause', 'signal.pause')}",
            "python",
            session_id=made,
            timeout=20,
        )
        assert "BlockingIOError" in forks.stderr
        usual = client.create_session()
        assert client.exec(usual, "echo [$WHO]; ls -A").stdout == "[]\n"
        used = {item for item in before if item in warm_place.sandboxes()}
        assert len(used) == 2
        assert len({made, usual}) == 2


def test_the_first_python_of_a_session_finds_an_interpreter_that_waits(warm_place: Place) -> None:
    with SandboxClient(warm_place.endpoint) as client:
        session_id = client.create_session()
        assert client.run("print(6 * 7)", "python", session_id=session_id).stdout == "42\n"
        counted = warm_place.cli("gateway", "metrics").stdout.decode()
    assert 'k8e_pool_claims_total{outcome="hit"} 1.0' in counted
    assert 'k8e_claim_seconds_count{start="warm"} 1.0' in counted
    assert 'k8e_claim_seconds_count{start="cold"} 0.0' in counted


def test_more_than_are_ready_can_be_made_at_once(warm_place: Place) -> None:
    with SandboxClient(warm_place.endpoint) as client, ThreadPoolExecutor(5) as threads:
        made = [done.result() for done in [threads.submit(client.create_session) for _ in "five!"]]
        answers = {client.exec(item, f"echo {item}").stdout.strip() for item in made}
        assert answers == set(made)
    found = pool(warm_place)
    assert (found["hits"], found["misses"], found["target"]) == (2, 3, 4)
    eventually(lambda: pool(warm_place)["ready"] == 4, seconds=30)


def test_a_sandbox_that_died_while_it_waited_is_nobodys(warm_place: Place) -> None:
    before = waiting(warm_place)
    for sandbox_id in before:
        assert traces.kill_all(sandbox_id)
    told = warm_place.json("sandbox", "run", "echo hello")
    assert told["stdout"] == "hello\n"
    assert not before & set(warm_place.sandboxes())
    eventually(lambda: not any(traces.traces(item, [warm_place.folder]) for item in before))


def test_nothing_that_waited_is_left_after_a_kill_or_a_stop(warm_place: Place) -> None:
    before = waiting(warm_place)
    assert len(before) == 2
    warm_place.kill_gateway()
    warm_place.json("sandbox", "status")
    gone = [item for item in before if not traces.traces(item, [warm_place.folder])]
    assert set(gone) == before
    fill(warm_place, 1)
    (member,) = waiting(warm_place)
    session_id = warm_place.json("sandbox", "create")["session_id"]
    warm_place.json("gateway", "stop")
    eventually(lambda: not warm_place.socket.exists())
    eventually(lambda: not waiting(warm_place))
    assert warm_place.json("sandbox", "run", "--session-id", session_id, "true")["exit_code"] == 0
    assert member in warm_place.sandboxes()


def test_draining_replaces_what_waits(warm_place: Place) -> None:
    before = waiting(warm_place)
    assert warm_place.json("pool", "drain") == {"drained": 2}
    eventually(lambda: pool(warm_place)["ready"] == 2, seconds=30)
    eventually(lambda: not any(traces.traces(item, [warm_place.folder]) for item in before))
    assert not before & waiting(warm_place)


def test_the_table_tells_a_person_what_is_ready(place: Place) -> None:
    place.json("pool", "set", "--min", "0", "--max", "0")
    done = place.cli("pool")
    assert done.returncode == 0
    head, row, *_ = done.stdout.decode().splitlines()
    assert head.split()[:3] == ["TEMPLATE", "RUNTIME", "READY"]
    assert row.split()[0] == "default"
    assert "a pool keeps from 3 to 2" in place.error("pool", "set", "--min", "3", "--max", "2")


def test_an_agents_key_cannot_see_or_set_the_pool(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.wait_for_grpc()
    key = place.json("sandbox", "api-key", "create", "poolless")["key"]
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(place.data / "tls" / "ca.crt"))
    with SandboxClient(place.environ["K8E_LISTEN"], api_key=key) as client:
        for call in (client.pool, client.set_pool, client.drain_pool):
            with pytest.raises(Denied):
                call()
    place.json("sandbox", "api-key", "delete", "poolless")
