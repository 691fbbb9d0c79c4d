"""What whoever meets a limit is told, through the SDK, the command line and gRPC; and quotas."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from k8e import Event, ExecResult, SandboxClient, errors
from k8e.model import MIB
from tests.places import NewPlace, Place, eventually

SMALL = {"memory": "256M", "pids": 40, "disk": "8M", "open_files": 1024, "output": "3M"}
FORKS = "import os, time\nfor _ in range(99):\n  if not os.fork(): time.sleep(9); os._exit(0)"


@pytest.fixture
def small(client: SandboxClient, runtime: str) -> Generator[str]:
    session_id = client.create_session(runtime, [], limits=SMALL)
    yield session_id
    client.destroy_session(session_id)


def reached(client: SandboxClient, session_id: str) -> list[Event]:
    return [item for item in client.events(session_id) if item.kind == "limit.reached"]


def check(client: SandboxClient, done: ExecResult, limit: str, value: int) -> None:
    """A result and an event both name a limit and its value."""
    (met,) = done.limits
    assert (met.limit, met.value) == (limit, value)
    assert f"limit {limit}: " in met.message
    told = reached(client, done.session_id)[-1].fields
    assert (told["exec_id"], told["limit"], told["value"]) == (done.exec_id, limit, value)
    assert told["message"] == met.message


def test_a_run_that_fails_for_a_limit_names_it(client: SandboxClient, small: str) -> None:
    check(client, client.exec(small, "head -c 20M /dev/zero > big"), "disk", 8 * MIB)
    client.exec(small, "rm big")
    flood = client.exec(small, "yes")
    assert (flood.status, flood.truncated) == ("killed", True)
    check(client, flood, "output", 3 * MIB)
    opener = "import os\nwhile True: os.open('/dev/null', os.O_RDONLY)"
    check(client, client.exec(small, ["python3", "-c", opener]), "open_files", 1024)
    assert client.exec(small, "exit 3").limits == []
    check(client, client.run(FORKS, "python", session_id=small), "pids", 40)


def test_a_program_that_is_left_alone_and_floods_is_stopped(
    client: SandboxClient, small: str
) -> None:
    client.start(small, "yes", timeout=60)
    (told,) = eventually(lambda: reached(client, small))
    assert told.fields["limit"] == "output"


def test_memory_that_runs_out_is_named_by_the_run_or_by_the_end_of_the_session(
    client: SandboxClient, runtime: str
) -> None:
    session_id = client.create_session(runtime, [], limits={"memory": "64M"})
    hog: list[str] = ["python3", "-c", "b'x' * (1 << 30)"]
    if runtime == "container":
        check(client, client.exec(session_id, hog), "memory", 64 * MIB)
        client.destroy_session(session_id)
        return
    with pytest.raises(errors.SandboxDied, match=r"out of memory \(its limit is 64 MiB; --memory"):
        client.exec(session_id, hog)
    ended = eventually(lambda: [e for e in client.events(session_id) if e.kind == "session.ended"])
    assert "out of memory" in ended[0].fields["reason"]
    (told,) = reached(client, session_id)
    assert (told.fields["limit"], told.fields["value"]) == ("memory", 64 * MIB)


def test_a_file_that_does_not_fit_names_the_limit(client: SandboxClient, small: str) -> None:
    with pytest.raises(OSError, match="limit disk of /workspace is 8 MiB"):
        client.write_file(small, "big", b"x" * 9_000_000)


def test_the_command_tells_of_a_limit_in_json_and_beside_raw_output(
    place: Place, runtime: str
) -> None:
    asked = ["sandbox", "create", "--runtime", runtime, "--disk", "8M", "--max-output", "64K"]
    more = ["--inodes", "100", "--open-files", "2048"]
    session_id = place.json(*asked, *more)["session_id"]
    limits: dict[str, Any] = place.json("sandbox", "get", session_id)["limits"]
    assert (limits["inodes"], limits["open_files"], limits["output"]) == (100, 2048, 64 << 10)
    run = ["sandbox", "run", "--session-id", session_id]
    done = place.cli(*run, "head -c 20M /dev/zero > big")
    assert b'"limits":[{"limit":"disk","message":"limit disk: /workspace is full (8 MiB)' in (
        done.stdout
    )
    done = place.cli(*run, "--raw", "yes")
    assert len(done.stdout) == 64 << 10
    assert done.stderr.startswith(b"k8e: limit output: the run has printed as much as it may")
    place.json("sandbox", "destroy", session_id)


def test_a_quota_of_sessions_is_told_by_its_name(new_place: NewPlace) -> None:
    place = new_place(K8E_MAX_SESSIONS_PER_TENANT="1", K8E_MAX_CREATIONS_PER_PRINCIPAL="2")
    made = place.json("sandbox", "create", "--runtime", "container")["session_id"]
    told = place.error("sandbox", "create")
    assert "tenant 'default' has 1 sessions; the limit is 1 (K8E_MAX_SESSIONS_PER_TENANT)" in told
    place.json("sandbox", "create", "--runtime", "container", "--tenant", "other")
    place.json("sandbox", "destroy", made)
    told = place.error("sandbox", "create")
    assert "has made 2 sessions within a minute" in told
    assert "K8E_MAX_CREATIONS_PER_PRINCIPAL" in told
