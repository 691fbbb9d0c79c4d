"""A gateway is killed at the worst moment, and the next one goes on as if nothing had happened."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from k8e import errors
from k8e.conformance import traces
from k8e.guest import wire
from tests.sessions.gateways import Client, Gateways, eventually

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(120),
]
SMALL = {"memory": 64 << 20, "disk": 16 << 20}


def test_sessions_go_on_with_their_files_environment_and_deadline(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, env={"COLOUR": "red"}, labels={"a": "b"})
    client.shell(session_id, "echo kept > file; echo tmp > /tmp/file")
    before = client.session(session_id)
    client = gateways.restart()
    assert client.session(session_id) == before
    said = client.shell(session_id, "cat file /tmp/file; echo $COLOUR")
    assert said.split() == ["kept", "tmp", "red"]
    client.call("destroy_session", session_id=session_id)


def test_a_running_command_goes_on_and_all_of_its_output_can_be_read(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime)
    script = "seq 5000; until test -e go; do sleep 0.02; done; echo end; exit 7"
    target = {"id": session_id}
    argv = ["/bin/bash", "-c", script]
    # Even one that dies with its client: the loss of the gateway is not the client's leaving.
    call = {"op": "exec", "id": "my-run", "argv": argv, "kill_on_disconnect": True}
    client.output(client.open({**call, "session": target}), until=b"5000\n")
    client = gateways.restart()
    attached = client.open({"op": "attach", "session": target, "id": "my-run"})
    client.shell(session_id, "touch go")
    seen, end = client.output(attached)
    assert seen == "".join(f"{n}\n" for n in range(1, 5001)).encode() + b"end\n"
    assert (end["code"], end["status"]) == (7, "completed")
    again, end = client.output(client.open({**call, "session": target}))
    assert (again, end["code"]) == (seen, 7), "the same id is the same run"
    client.call("destroy_session", session_id=session_id)


def test_a_file_that_was_being_written_keeps_its_old_content(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime)
    client.shell(session_id, "echo old > file")
    upload = client.open({"op": "write", "path": "file", "session": {"id": session_id}})
    client.receive(upload)
    client.send(wire.DATA, upload, bytes(200_000))
    assert client.receive(upload)[0] == wire.CREDIT  # half of it is there
    client = gateways.restart()
    assert client.shell(session_id, "cat file; ls -A") == "old\nfile\n"
    client.call("destroy_session", session_id=session_id)


def _folder(gateways: Gateways) -> bool:
    return any((gateways.run_dir / "sandboxes").glob("sb-*"))


def _bundle(gateways: Gateways) -> bool:
    return any((gateways.run_dir / "sandboxes").glob("sb-*/config.json"))


def _tool(gateways: Gateways) -> bool:
    return any((gateways.run_dir / "sandboxes").glob("sb-*/log"))


def _process(gateways: Gateways) -> bool:
    return any((gateways.run_dir / "sandboxes").glob("sb-*/pid"))


def _workspace(gateways: Gateways) -> bool:
    return any((gateways.data / "workspaces").glob("sb-*"))


@pytest.mark.parametrize("moment", [_folder, _bundle, _tool, _process, _workspace])
def test_what_was_half_made_is_removed(
    gateways: Gateways, client: Client, runtime: str, moment: Callable[[Gateways], bool]
) -> None:
    known = gateways.sandboxes()
    client.open({"op": "create_session", "spec": {"runtime": runtime, "limits": SMALL}})
    eventually(lambda: moment(gateways), moment.__name__)
    client = gateways.restart()
    ((session_id, sandbox_id),) = gateways.sandboxes().items() - known.items()
    found = client.session(session_id)
    if found["phase"] == "active":  # it was faster than our signal
        client.call("destroy_session", session_id=session_id)
    else:
        assert found["phase"] == "ended"
        assert "restart" in found["ended_reason"]
    assert gateways.traces(sandbox_id) == []


def test_a_request_that_was_cut_off_can_be_repeated(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    spec = {"runtime": runtime, "request_id": f"once-{runtime}", "limits": SMALL}
    client.open({"op": "create_session", "spec": spec})
    eventually(lambda: _bundle(gateways), "a bundle")
    client = gateways.restart()
    session_id = client.create(**spec)
    assert client.create(**spec) == session_id
    assert client.shell(session_id, "echo works") == "works\n"
    client.call("destroy_session", session_id=session_id)


def test_a_deadline_holds_through_the_restart(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, lifetime=2.5, limits=SMALL)
    expires = client.session(session_id)["expires_at"]
    client = gateways.restart()
    assert client.session(session_id)["expires_at"] == expires
    eventually(lambda: client.session(session_id)["phase"] == "ended", "the end of the session")
    assert client.session(session_id)["ended_reason"] == "its lifetime was over"
    assert gateways.traces(gateways.sandboxes()[session_id]) == []


def test_a_session_whose_deadline_passed_meanwhile_ends_at_once(
    gateways: Gateways, client: Client
) -> None:
    session_id = client.create(runtime="container", lifetime=0.3, limits=SMALL)
    client = gateways.restart()
    eventually(lambda: client.session(session_id)["phase"] == "ended", "the end of the session")
    with pytest.raises(errors.SessionNotFound, match="not found"):
        client.shell(session_id, "true")


def test_a_sandbox_that_died_meanwhile_is_an_ended_session(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, limits=SMALL)
    sandbox_id = gateways.sandboxes()[session_id]
    gateways.kill()
    assert traces.kill_all(sandbox_id)
    eventually(lambda: not traces.processes(sandbox_id), "the death of the sandbox")
    client = gateways.start()
    # Which of the two depends on whether the host's init has buried the dead processes yet.
    reason = "gone or half made after a restart|ended unexpectedly"
    with pytest.raises((errors.SessionNotFound, errors.SandboxDied), match=reason):
        client.shell(session_id, "true")
    eventually(lambda: client.session(session_id)["phase"] == "ended", "the end of the session")
    assert gateways.traces(sandbox_id) == []


def test_the_automatic_session_is_still_the_automatic_one(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    target = {"auto": f"team-{runtime}", "spec": {"runtime": runtime}}
    call = {"op": "exec", "session": target, "argv": ["touch", "was-here"]}
    client.output(client.open(call))
    client = gateways.restart()
    seen, _ = client.output(client.open({**call, "argv": ["ls"]}))
    assert seen == b"was-here\n"


def test_ten_restarts_in_a_row_lose_nothing(gateways: Gateways, client: Client) -> None:
    sessions = [client.create(runtime=name, limits=SMALL) for name in ("gvisor", "container")]
    for number in range(10):
        client = gateways.restart()
        for session_id in sessions:
            said = client.shell(session_id, f"echo {number} >> count; wc -l < count")
            assert said == f"{number + 1}\n"
    for session_id in sessions:
        client.call("destroy_session", session_id=session_id)
        assert gateways.traces(gateways.sandboxes()[session_id]) == []


def test_a_sandbox_that_dies_is_explained_to_whoever_uses_it(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, limits=SMALL)
    waiting = client.open({"op": "exec", "session": {"id": session_id}, "argv": ["sleep", "1000"]})
    assert client.receive(waiting)[0] == wire.RESULT
    sandbox_id = gateways.sandboxes()[session_id]
    assert traces.kill_all(sandbox_id)
    with pytest.raises(errors.SandboxDied, match="ended unexpectedly"):
        client.output(waiting)
    eventually(lambda: client.session(session_id)["phase"] == "ended", "the end of the session")
    with pytest.raises(errors.SessionNotFound, match=r"not found .*ended unexpectedly"):
        client.shell(session_id, "true")
    assert gateways.traces(sandbox_id) == []


def test_ten_callers_at_once_get_one_automatic_session(gateways: Gateways) -> None:
    clients = [gateways.connect() for _ in range(10)]
    call = {
        "op": "exec",
        "session": {"auto": "crowd", "spec": {"runtime": "container"}},
        "argv": ["true"],
    }
    channels = [client.open(call) for client in clients]
    sessions = {
        wire.unpack_dict(client.receive(channel)[1])["session_id"]
        for client, channel in zip(clients, channels, strict=True)
    }
    assert len(sessions) == 1


def test_strange_session_ids_are_not_found_and_the_connection_lives(client: Client) -> None:
    for name in ("nothing", "\udcff", "'; --", "x" * 10_000, "\0"):
        with pytest.raises(errors.SessionNotFound, match="not found"):
            client.shell(name, "true")
        with pytest.raises(errors.SessionNotFound, match="not found"):
            client.session(name)
    assert client.call("status")["pid"]
