"""Egress over gRPC: K8E's calls, and what is ours beside them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.gateway.rpc import egress
from tests.gateway.serving import RUNTIMES, USUAL, failing
from tests.gateway.worlds import CONNECT, NOWHERE

Stub = pb_grpc.SandboxServiceStub
Status = grpc.StatusCode


def create(stub: Stub, runtime: str, *hosts: str) -> str:
    request = pb.CreateSessionRequest(runtime_class=runtime, allowed_hosts=hosts)
    return stub.CreateSession(request, timeout=50).session_id


def destroy(stub: Stub, session_id: str) -> None:
    stub.DestroySession(pb.DestroySessionRequest(session_id=session_id), timeout=50)


def update(stub: Stub, session_id: str, *hosts: str) -> list[str]:
    request = pb.UpdateAllowedHostsRequest(session_id=session_id, hosts=hosts)
    return list(stub.UpdateAllowedHosts(request, timeout=20).hosts)


def asked(stub: Stub, session_id: str) -> list[str]:
    """The words of a session's policy, which every call must tell alike."""
    got = stub.GetSession(pb.GetSessionRequest(session_id=session_id), timeout=20)
    listed = stub.ListSessions(pb.ListSessionsRequest(), timeout=20).sessions
    (same,) = (item for item in listed if item.session_id == session_id)
    told = stub.GetEgress(pb.GetEgressRequest(session_id=session_id), timeout=20)
    assert got.allowed_hosts == same.allowed_hosts == told.allowed_hosts
    return list(got.allowed_hosts)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_policy_is_asked_for_told_and_replaced(stub: Stub, runtime: str) -> None:
    session_id = create(stub, runtime, "A.example", "*.b.example:443")
    assert asked(stub, session_id) == ["A.example", "*.b.example:443"]
    told = stub.GetEgress(pb.GetEgressRequest(session_id=session_id), timeout=20)
    assert list(told.rules) == ["a.example", "*.b.example:443"]
    assert (told.session_id, told.network, told.reason) == (session_id, True, "")
    assert (told.denied, list(told.denials)) == (0, [])

    in_effect = update(stub, session_id, "default", "8.8.8.0/24")
    assert {"github.com", "8.8.8.0/24"} <= set(in_effect)
    assert asked(stub, session_id) == ["default", "8.8.8.0/24"]
    assert update(stub, session_id) == ["none"], "an empty list allows nothing"
    assert asked(stub, session_id) == ["none"]
    destroy(stub, session_id)


def test_a_session_that_asks_for_nothing_gets_the_gateway_s_default(stub: Stub) -> None:
    for hosts in ([], [""]):
        session_id = create(stub, "container", *hosts)
        assert asked(stub, session_id) == [USUAL]
        destroy(stub, session_id)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_was_refused_is_in_the_answer_and_in_the_list(stub: Stub, runtime: str) -> None:
    session_id = create(stub, runtime, "none")
    request = pb.ExecRequest(session_id=session_id, code=CONNECT.encode(), language="python")
    done = stub.Exec(request, timeout=50)
    assert done.exit_code == 3, done.stderr
    (refused,) = done.denials
    assert (refused.address, refused.port, refused.protocol) == (NOWHERE, 443, "tcp")
    assert "allow-list" in refused.rule
    assert (refused.count, refused.at) == (1, 0)
    quiet = pb.ExecRequest(session_id=session_id, command="true")
    assert list(stub.Exec(quiet, timeout=50).denials) == []
    told = stub.GetEgress(pb.GetEgressRequest(session_id=session_id), timeout=20)
    assert told.denied == 1
    assert told.denials[0].address == NOWHERE
    assert told.denials[0].at > 1_700_000_000
    destroy(stub, session_id)


def test_bad_words_and_no_session_are_invalid(stub: Stub) -> None:
    session_id = create(stub, "container", "none")
    for word, text in (("b@d", "'b@d' is not a host name"), ("a.example:0", "no valid port")):
        failed = failing(lambda word=word: update(stub, session_id, "a.example", word))
        assert (failed.status, failed.code) == (Status.INVALID_ARGUMENT, "invalid_request")
        assert text in failed.details
    assert asked(stub, session_id) == ["none"]
    many = [f"host{n}.example" for n in range(300)]
    failed = failing(lambda: update(stub, session_id, *many))
    assert failed.status is Status.RESOURCE_EXHAUSTED
    destroy(stub, session_id)
    assert failing(lambda: update(stub, session_id)).status is Status.NOT_FOUND
    assert failing(lambda: update(stub, "")).status is Status.INVALID_ARGUMENT
    empty = pb.GetEgressRequest()
    assert failing(lambda: stub.GetEgress(empty, timeout=20)).status is Status.INVALID_ARGUMENT


@pytest.mark.parametrize("told", [[{}], [1], 7, [{"name": 1}], [{"name": "x", "port": 1 << 40}]])
def test_denials_that_are_none_are_the_guest_s_failure(told: Any) -> None:
    with pytest.raises(errors.GuestFailed, match="nonsense"):
        egress.denials(told)
    assert egress.denials(None) == []
