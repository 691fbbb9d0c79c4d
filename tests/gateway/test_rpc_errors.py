"""What calls tell beside their answer: background runs of a session, denials of a stream."""

from __future__ import annotations

import json

import pytest

from k8e import SandboxClient
from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.gateway.rpc import egress
from tests.gateway.serving import RUNTIMES
from tests.gateway.test_rpc import run
from tests.gateway.test_rpc_egress import create, destroy
from tests.gateway.worlds import CONNECT, NOWHERE
from tests.places import NewPlace, Place, eventually

Stub = pb_grpc.SandboxServiceStub


def background_runs(stub: Stub, session_id: str) -> int:
    request = pb.GetSessionRequest(session_id=session_id)
    return stub.GetSession(request, timeout=20).background_runs


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_background_runs_are_counted_while_they_run(stub: Stub, runtime: str) -> None:
    session_id = create(stub, runtime, "none")
    assert background_runs(stub, session_id) == 0
    run(stub, session_id, "mkfifo go")
    for _ in range(2):
        run(stub, session_id, "cat go", background=True)
    stub.CreateTerminal(pb.CreateTerminalRequest(session_id=session_id), timeout=20)  # is none
    assert background_runs(stub, session_id) == 2
    run(stub, session_id, "true", background=True)

    # Opened for both it waits for nobody, and whoever reads has come to the end.
    def ended() -> bool:
        run(stub, session_id, ": <> go")
        return background_runs(stub, session_id) == 0

    eventually(ended)
    destroy(stub, session_id)
    assert background_runs(stub, session_id) == 0


def test_the_sdk_and_the_command_tell_them_too(place: Place, endpoint: str, runtime: str) -> None:
    with SandboxClient(endpoint) as client:
        session_id = client.create_session(runtime)
        started = client.start(session_id, "sleep 300")
        assert client.get_session(session_id).background_runs == 1
        assert place.json("sandbox", "get", session_id)["background_runs"] == 1
        assert {item.background_runs for item in client.list_sessions()} == {None}
        started.kill()
        started.wait()
        assert client.get_session(session_id).background_runs == 0
        client.destroy_session(session_id)
        assert client.get_session(session_id).background_runs == 0


def test_a_gateway_counts_what_one_before_it_started(new_place: NewPlace) -> None:
    place = new_place()
    made = place.json("sandbox", "create", "--runtime", "container")["session_id"]
    place.json("sandbox", "run", "--background", "--session-id", made, "sleep 300")
    place.kill_gateway()
    assert place.json("sandbox", "get", made)["background_runs"] == 1


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_stream_tells_what_was_refused_when_it_ends(stub: Stub, runtime: str) -> None:
    session_id = create(stub, runtime, "none")
    request = pb.ExecRequest(session_id=session_id, code=CONNECT.encode(), language="python")
    stream = stub.ExecStream(request, timeout=50)
    list(stream)
    metadata = dict(stream.trailing_metadata())
    assert metadata["k8e-exit-code"] == "3"
    (refused,) = json.loads(metadata["k8e-denials"])
    assert (refused["address"], refused["port"], refused["count"]) == (NOWHERE, 443, 1)
    assert "allow-list" in refused["rule"]
    quiet = stub.ExecStream(pb.ExecRequest(session_id=session_id, command="true"), timeout=50)
    list(quiet)
    assert "k8e-denials" not in dict(quiet.trailing_metadata())
    destroy(stub, session_id)


def test_denials_in_metadata_are_plain_and_bounded() -> None:
    many = [pb.EgressDenial(name=f"ä{number}.example", port=1) for number in range(1000)]
    text = egress.denials_as_json(many)
    assert text.isascii()
    assert len(text) <= egress.MAX_JSON + 2
    found = json.loads(text)
    assert 10 < len(found) < 1000
    assert found[1]["name"] == "ä1.example"
    assert egress.denials_as_json([]) == "[]"
    assert egress.denials_as_json([pb.EgressDenial(name="x" * 9000)]) == "[]"
