"""The standing sessions of tenants: one each, mended when it is gone, and nothing runs twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8e import SandboxClient, errors
from k8e.cli import state
from k8e.conformance import traces
from tests.places import NewPlace, Place, eventually

RUN = ["sandbox", "run"]


def state_file(place: Place, tenant: str = "default") -> Path:
    return place.home / ".k8e" / "sandbox" / tenant / "state.json"


def noted(place: Place, tenant: str = "default") -> str:
    """The session in a tenant's state file, which must be whole."""
    found = json.loads(state_file(place, tenant).read_text())
    assert set(found) == {"created_at", "phase", "session_id", "tenant_id"}
    assert (found["phase"], found["tenant_id"]) == ("active", tenant)
    return found["session_id"]


def sessions(place: Place, *flags: str) -> list[dict[str, Any]]:
    return place.json("sandbox", "sessions", *flags)["sessions"]


def starts(place: Place) -> int:
    """How many commands were ever started, in all sessions."""
    return sum(
        place.cli("sandbox", "events", item["session_id"]).stdout.count(b'"kind":"exec.started"')
        for item in sessions(place, "--all")
    )


# Many at once.


@pytest.mark.parametrize("running", [False, True], ids=["no gateway", "a fresh gateway"])
def test_ten_commands_at_once_end_in_one_session_for_each_tenant(
    new_place: NewPlace, running: bool
) -> None:
    place = new_place(K8E_RUNTIME="container")
    if running:
        place.json("gateway", "--background")
    tenants = ["default", "blue"] * 5
    started = [
        place.start(*RUN, *(["--tenant", tenant] if tenant != "default" else []), f"echo {number}")
        for number, tenant in enumerate(tenants)
    ]
    used: dict[str, set[str]] = {"default": set(), "blue": set()}
    for number, (process, tenant) in enumerate(zip(started, tenants, strict=True)):
        stdout, stderr = process.communicate(timeout=50)
        assert (process.returncode, stderr) == (0, b""), stdout
        found = json.loads(stdout)
        assert found["stdout"] == f"{number}\n"
        used[tenant].add(found["session_id"])
    for tenant, ids in used.items():
        assert ids == {noted(place, tenant)}
        assert sorted(item.name for item in state_file(place, tenant).parent.iterdir()) == [
            "state.json"
        ], "no scratch file is left"
    assert {item["session_id"] for item in sessions(place)} == used["default"] | used["blue"]
    assert starts(place) == 10


# Mending.


def destroy(place: Place, session_id: str) -> None:
    """Not by the command, which would remove the state file too."""
    with SandboxClient(place.endpoint) as client:
        client.destroy_session(session_id)


def expire(place: Place, session_id: str) -> None:
    place.json("sandbox", "extend", session_id, "--lifetime", "0.01")


def kill(place: Place, session_id: str) -> None:
    (sandbox_id,) = place.sandboxes()
    assert traces.kill_all(sandbox_id)


@pytest.mark.parametrize("end", [destroy, expire, kill])
def test_a_run_after_the_end_of_its_session_gets_a_new_one_and_the_state_follows(
    new_place: NewPlace, runtime: str, end: Callable[[Place, str], None]
) -> None:
    place = new_place(K8E_RUNTIME=runtime)
    first = place.json(*RUN, "echo one")["session_id"]
    assert noted(place) == first
    end(place, first)
    eventually(lambda: place.json("sandbox", "get", first)["phase"] == "ended")
    assert noted(place) == first, "it names a dead session now"
    assert place.json("sandbox", "status")["session_id"] == ""
    second = place.json(*RUN, "echo two")
    assert second["stdout"] == "two\n"
    assert second["session_id"] != first
    assert noted(place) == second["session_id"]
    assert place.json("sandbox", "status")["session_id"] == second["session_id"]
    assert starts(place) == 2


def test_a_run_while_its_session_is_being_destroyed_gets_a_new_one(
    new_place: NewPlace, runtime: str
) -> None:
    place = new_place(K8E_RUNTIME=runtime)
    first = place.json(*RUN, "echo one")["session_id"]
    with SandboxClient(place.endpoint) as client:
        ended = 0
        for _ in range(3):
            old = client.list_sessions()[0].session_id
            destroying = place.start("sandbox", "destroy", old)
            eventually(
                lambda old=old: f"session {old} ends" in (place.data / "gateway.log").read_text()
            )
            found = place.json(*RUN, "echo again")
            assert found["stdout"] == "again\n"
            ended += found["session_id"] != old
            assert destroying.wait(20) == 0
            for pipe in (destroying.stdin, destroying.stdout, destroying.stderr):
                assert pipe
                pipe.close()
        assert ended == 3
    assert first in {item["session_id"] for item in sessions(place, "--all")}


@pytest.mark.parametrize("end", [destroy, expire, kill])
def test_a_session_that_ends_during_a_command_is_an_error_and_nothing_runs_again(
    new_place: NewPlace, runtime: str, end: Callable[[Place, str], None]
) -> None:
    place = new_place(K8E_RUNTIME=runtime)
    with place.start(*RUN, "--raw", "--timeout", "60", "echo begun; sleep 60") as running:
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline() == b"begun\n"
        session_id = noted(place)
        end(place, session_id)
        assert running.wait(20) == 1
        told = json.loads(running.stderr.read())
        assert running.stdout.read() == b""
    assert told["detail"] == "run the command again; a new session is made where none was named"
    assert starts(place) == 1
    assert len(sessions(place, "--all")) == 1, "nor was a session made for it"
    found = place.json(*RUN, "echo on")
    assert found["stdout"] == "on\n"
    assert noted(place) == found["session_id"] != session_id
    assert starts(place) == 2


def test_a_killed_gateway_is_told_by_the_sdk_and_nothing_runs_again(new_place: NewPlace) -> None:
    place = new_place(K8E_RUNTIME="container")
    script = (
        "import sys\n"
        "from k8e import SandboxClient, errors\n"
        "with SandboxClient(tenant_id=sys.argv[1]) as client:\n"
        "    client.run('true')\n"
        "    print('ready', flush=True)\n"
        "    try:\n"
        "        client.run('echo ran >> runs; until test -e go; do sleep 0.05; done')\n"
        "    except errors.GatewayUnreachable as error:\n"
        "        print('was not started again' in error.hint)\n"
        "    print(client.run('touch go; cat runs').stdout.split())\n"
    )
    for tenant in ("", "team"):
        with subprocess.Popen(
            [sys.executable, "-c", script, tenant],
            env=place.environ,
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdout
            assert program.stdout.readline() == "ready\n"
            (living,) = {item["session_id"] for item in sessions(place)}
            with SandboxClient(place.endpoint) as client:
                eventually(
                    lambda living=living, client=client: any(
                        item.path == "/workspace/runs" for item in client.list_files(living)
                    )
                )
            place.kill_gateway()
            assert program.communicate(timeout=40)[0] == "True\n['ran']\n"
        for item in sessions(place):
            place.json("sandbox", "destroy", item["session_id"])


# The state file.


def test_a_session_of_the_environment_wins_over_the_state(place: Place, session_id: str) -> None:
    standing = place.json(*RUN, "--tenant", "env", "--runtime", "container", "true")["session_id"]

    def run(*flags: str) -> str:
        environ = {"K8E_SANDBOX_SESSION_ID": session_id, "K8E_SANDBOX_TENANT": "env"}
        return json.loads(place.cli(*RUN, *flags, "true", stdin=b"", **environ).stdout)[
            "session_id"
        ]

    assert run() == session_id
    assert noted(place, "env") == standing, "the state is not touched"
    assert run("--session-id", standing) == standing
    gone = place.error(*RUN, "true", K8E_SANDBOX_SESSION_ID="nobody-s")
    assert "session nobody-s not found" in gone, "a named session is never replaced by another"
    place.json("sandbox", "destroy", standing)


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00{]")


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def folder(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("/nonexistent/elsewhere")


def another_type(path: Path) -> None:
    path.write_text('{"session_id":{"a":["b"]}}')


def dead(path: Path) -> None:
    path.write_text('{"session_id":"sess-of-before","phase":"creating","pid":1}')


@pytest.mark.parametrize("spoil", [garbage, deep, huge, folder, pipe, dangling, another_type, dead])
def test_a_spoilt_state_file_harms_nothing(place: Place, spoil: Callable[[Path], None]) -> None:
    tenant = f"spoilt-{spoil.__name__.replace('_', '-')}"
    file = state_file(place, tenant)
    file.parent.mkdir(parents=True)
    spoil(file)
    flags = ["--tenant", tenant]
    found = place.json(*RUN, *flags, "--runtime", "container", "echo fine")
    assert found["stdout"] == "fine\n"
    told = place.json("sandbox", "status", *flags)
    assert told["session_id"] == found["session_id"], "the gateway knows"
    if spoil is not folder:
        assert noted(place, tenant) == found["session_id"]
    assert place.json(*RUN, *flags, "true")["session_id"] == found["session_id"]
    place.json("sandbox", "destroy", found["session_id"])
    assert file.exists() == (spoil is folder)


@pytest.mark.parametrize("home", ["/proc", "/nonexistent", "/dev/null", ""])
def test_a_home_that_cannot_be_written_to_harms_nothing(place: Place, home: str) -> None:
    tenant = ["--tenant", "homeless"]
    found = place.json(*RUN, *tenant, "--runtime", "container", "echo fine", HOME=home)
    assert found["stdout"] == "fine\n"
    again = place.json(*RUN, *tenant, "true", HOME=home)
    assert again["session_id"] == found["session_id"]
    assert place.json("sandbox", "status", *tenant, HOME=home)["session_id"] == found["session_id"]
    assert place.json("sandbox", "destroy", found["session_id"], HOME=home) == {"ok": True}


def test_a_state_file_that_cannot_be_removed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state.save("default", "sess-1")
    assert state.load("default") == "sess-1"

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    state.forget("sess-1")


def test_copying_to_the_standing_session_notes_it_too(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    flags = ["--tenant", "copies"]
    session_id = place.json(*RUN, *flags, "--runtime", "container", "true")["session_id"]
    state_file(place, "copies").unlink()
    assert place.json("sandbox", "cp", *flags, str(tmp_path / "file"), ":")["files"] == 1
    assert noted(place, "copies") == session_id
    place.json("sandbox", "destroy", session_id)


def test_a_session_of_another_tenant_is_not_touched(place: Place) -> None:
    for tenant in ("one", "two"):
        place.json(*RUN, "--tenant", tenant, "--runtime", "container", f"echo {tenant} > name")
    for tenant in ("one", "two"):
        assert place.json(*RUN, "--tenant", tenant, "cat name")["stdout"] == f"{tenant}\n"
        with SandboxClient(place.endpoint, tenant) as client:
            assert client.run("cat name").stdout == f"{tenant}\n"
        place.json("sandbox", "destroy", noted(place, tenant))
    with SandboxClient(place.endpoint) as client, pytest.raises(errors.InvalidRequest):
        client.run("")
