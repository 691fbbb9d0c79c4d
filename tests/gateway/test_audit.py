"""The audit trail over the real wire: what leaves rows, and who may read them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.gateway import serving
from tests.gateway.devices import WRONG, Metadata, Stub, ask, bearer, log_in, new_key
from tests.gateway.serving import Running, failing

SECONDS = 40
SECRET = "s3cr3t-value"


def rows(stub: Stub, metadata: Metadata = (), **wanted: Any) -> list[dict[str, Any]]:
    asked = pb.GetAuditRequest(**wanted)
    return [json.loads(line) for line in stub.GetAudit(asked, metadata=metadata, timeout=20).rows]


@pytest.fixture
def mine(stub: Stub, agent: Metadata) -> Iterator[str]:
    """A session of a key."""
    asked = pb.CreateSessionRequest(runtime_class="container", env={"TOKEN": SECRET})
    session_id = stub.CreateSession(asked, metadata=agent, timeout=SECONDS).session_id
    yield session_id
    gone = pb.DestroySessionRequest(session_id=session_id)
    stub.DestroySession(gone, metadata=agent, timeout=SECONDS)


def named(row: dict[str, Any], who: str = "principal") -> str:
    """A principal without the id that tells it from others who had the name."""
    return str(row.get(who) or "").partition(":id-")[0]


def test_a_session_leaves_a_row_for_each_thing_and_two_for_a_run(
    running: Running, stub: Stub, agent: Metadata, mine: str
) -> None:
    def call(name: str, request: Any) -> Any:
        return getattr(stub, name)(request, metadata=agent, timeout=SECONDS)

    call("Exec", pb.ExecRequest(session_id=mine, command="seq 20000; exit 4"))
    call("WriteFile", pb.WriteFileRequest(session_id=mine, path="a", content=SECRET))
    call("ReadFile", pb.ReadFileRequest(session_id=mine, path="a"))
    for op, more in (
        ("mkdir", {"path": "folder"}),
        ("symlink", {"path": "link", "target": "a"}),
        ("chmod", {"path": "a", "mode": 0o600}),
        ("rename", {"path": "a", "to": "b"}),
        ("remove", {"path": "b"}),
    ):
        ask(running, agent, op=op, session={"id": mine}, **more)
    call("PauseSession", pb.PauseSessionRequest(session_id=mine))
    call("ResumeSession", pb.ResumeSessionRequest(session_id=mine))
    call("UpdateAllowedHosts", pb.UpdateAllowedHostsRequest(session_id=mine, hosts=["a.example"]))
    call("ExposeService", pb.ExposeServiceRequest(session_id=mine, port=8000))
    call("UnexposeService", pb.UnexposeServiceRequest(session_id=mine, port=8000))
    call("ConfirmAction", pb.ConfirmActionRequest(session_id=mine, action="pay"))
    ask(running, agent, op="save_snapshot", session_id=mine, name="audited")
    ask(running, agent, op="delete_snapshot", name="audited")
    found = rows(stub, session_id=mine)
    assert [row["action"] for row in found] == [
        "session.created",
        "exec.started",
        "exec.finished",
        "file.written",
        "file.read",
        "folder.made",
        "file.linked",
        "file.mode",
        "file.renamed",
        "file.removed",
        "session.paused",
        "session.resumed",
        "egress.changed",
        "port.exposed",
        "port.unexposed",
        "approval.asked",
        "exec.started",  # the program that packs the workspace
        "exec.finished",
        "snapshot.saved",
    ]
    assert {(named(row), row["via"], row["outcome"]) for row in found} == {
        ("key:agent", "key", "allowed")
    }
    assert all(row["peer"].startswith("127.0.0.1:") for row in found)
    assert found[1]["detail"]["command"] == "seq 20000; exit 4"
    assert found[2]["detail"]["exit_code"] == 4
    assert found[2]["detail"]["duration_ms"] >= 0
    assert [found[at]["detail"]["size"] for at in (3, 4)] == [len(SECRET)] * 2
    assert rows(stub, action="snapshot.deleted", principal="key:agent")
    assert SECRET not in json.dumps(rows(stub, limit=5000))


def test_what_changes_the_gateway_leaves_a_row(running: Running, stub: Stub) -> None:
    made = ask(running, op="create_api_key", name="short", ttl="1h", roles=["agent"])
    ask(running, op="delete_api_key", name="short")
    ask(running, op="set_pool", min=0, max=0)
    ask(running, op="drain_pool")
    ask(running, op="apply_template", template={"name": "audited"})
    ask(running, op="delete_template", name="audited")
    ask(running, op="prune_images")
    found = rows(stub, principal="local", limit=7)
    assert [row["action"] for row in found] == [
        "key.created",
        "key.deleted",
        "pool.set",
        "pool.drained",
        "template.applied",
        "template.deleted",
        "image.pruned",
    ]
    assert found[0]["detail"]["roles"] == ["agent"]
    assert found[4]["detail"]["name"] == "audited"
    assert made["key"] not in json.dumps(rows(stub, limit=5000))


def test_a_certificate_is_told_from_its_key(running: Running, stub: Stub, agent: Metadata) -> None:
    device = log_in(stub, agent)
    with device.channel(running) as channel:
        shown = pb_grpc.SandboxServiceStub(channel)
        failing(lambda: shown.GetSession(pb.GetSessionRequest(session_id="sess-no"), timeout=20))
    login, refused = rows(stub, principal="key:agent")[-2:]
    assert (login["action"], login["via"], login["detail"]["device"]) == (
        "key.login",
        "key",
        "test",
    )
    assert (refused["action"], refused["via"], refused["session"]) == (
        "call.refused",
        "certificate",
        "sess-no",
    )


def test_refusals_leave_rows(stub: Stub, agent: Metadata, other: Metadata, mine: str) -> None:
    failing(lambda: stub.Exec(pb.ExecRequest(session_id=mine, command="id"), metadata=other))
    asked = pb.ApproveActionRequest(approval_id="approval-x", approved=True)
    failing(lambda: stub.ApproveAction(asked, metadata=agent))
    theirs, agents = rows(stub, denied=True)[-2:]
    assert (named(theirs), theirs["session"]) == ("key:other", mine)
    assert theirs["detail"]["code"] == "session_not_found"
    assert (named(agents), agents["detail"]["code"]) == ("key:agent", "denied")
    assert theirs["seq"] not in [row["seq"] for row in rows(stub, agent, limit=5000)]


def probes(mine: str) -> dict[str, Any]:
    """Calls that name a session, each in its own way."""
    terminal = f"{mine}.tty"
    return {
        "GetSession": pb.GetSessionRequest(session_id=mine),
        "PollRun": pb.PollRunRequest(run_id=f"{mine}.run"),
        "GetTranscript": pb.GetTranscriptRequest(session_id=f"{mine}.run"),
        "RunSubAgent": pb.RunSubAgentRequest(parent_session_id=mine),
        "TerminalWrite": pb.TerminalWriteRequest(terminal_id=terminal, data=b"x"),
        "TerminalResize": pb.TerminalResizeRequest(terminal_id=terminal, rows=1, cols=1),
        "TerminalForeground": pb.TerminalForegroundRequest(terminal_id=terminal),
        "TerminalSignal": pb.TerminalSignalRequest(
            terminal_id=terminal, signal=pb.TERMINAL_SIGNAL_INT
        ),
        "TerminalDestroy": pb.TerminalDestroyRequest(terminal_id=terminal),
        "CreateSession": pb.CreateSessionRequest(session_id=mine, runtime_class="container"),
    }


def test_a_refused_call_names_the_session_whichever_way_it_was_meant(
    running: Running, stub: Stub, mine: str
) -> None:
    prober = new_key(running, "prober")
    for name, request in probes(mine).items():
        call = functools.partial(getattr(stub, name), request, metadata=prober, timeout=20)
        if name == "PollRun":
            assert call().status == "not_found"
        else:
            failing(call)
    stream = pb.TerminalStreamRequest(terminal_id=f"{mine}.tty")
    failing(lambda: list(stub.TerminalStream(stream, metadata=prober, timeout=20)))
    frames: list[dict[str, Any]] = [
        {"op": "run_subagent", "parent_session_id": mine},
        {"op": "create_session", "spec": {"session_id": mine, "runtime": "container"}},
        {"op": "ping", "session": {"id": mine}},
    ]
    with running.channel() as channel, serving.Frames(channel, prober) as run:
        for number, asked in enumerate(frames, 1):
            run.send(wire.CALL, number, wire.pack(asked))
            run.until(wire.ERROR)
    found = {row["detail"]["call"]: row["session"] for row in rows(stub, prober, denied=True)}
    names = [*probes(mine), "TerminalStream", *(str(asked["op"]) for asked in frames)]
    assert found == dict.fromkeys(names, mine)


def test_a_refused_stranger_leaves_a_row_without_what_it_showed() -> None:
    # With a gateway of its own: of the strangers of one address, only the first few leave rows.
    with serving.gateway(K8E_POOL_MAX="0") as fresh, fresh.channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        failing(lambda: stub.ListSessions(pb.ListSessionsRequest(), metadata=bearer(WRONG)))
        (stranger,) = rows(stub, denied=True)
        assert (stranger["principal"], stranger["detail"]["code"]) == ("", "unauthenticated")
        assert WRONG not in json.dumps(rows(stub, limit=5000))


def test_who_is_no_admin_sees_rows_of_its_own_alone(
    running: Running, stub: Stub, agent: Metadata, other: Metadata, mine: str
) -> None:
    seen = rows(stub, agent, limit=5000)
    assert seen
    assert {named(row, "owner") or named(row) for row in seen} == {"key:agent"}
    assert rows(stub, other, session_id=mine) == []
    assert rows(stub, other, principal="key:agent") == []
    failed = failing(lambda: stub.VerifyAudit(pb.VerifyAuditRequest(), metadata=agent, timeout=20))
    assert failed.status is grpc.StatusCode.PERMISSION_DENIED
    boss = new_key(running, "auditor", "admin")
    assert len(rows(stub, boss, limit=5000)) > len(seen)


def test_an_approver_is_named_with_the_owner(
    running: Running, stub: Stub, agent: Metadata, mine: str
) -> None:
    boss = new_key(running, "audit-boss", "approver")
    asked = pb.ConfirmActionRequest(session_id=mine, action="deploy")
    approval = stub.ConfirmAction(asked, metadata=agent, timeout=20).approval_id
    decision = pb.ApproveActionRequest(approval_id=approval, approved=False, reason="no")
    stub.ApproveAction(decision, metadata=boss, timeout=20)
    row = rows(stub, agent, session_id=mine)[-1]
    assert (named(row), named(row, "owner"), row["outcome"]) == (
        "key:audit-boss",
        "key:agent",
        "denied",
    )


def test_the_chain_of_all_this_is_whole(stub: Stub) -> None:
    told = stub.VerifyAudit(pb.VerifyAuditRequest(), timeout=20)
    assert (told.ok, list(told.problems)) == (True, [])
    assert stub.VerifyAudit(pb.VerifyAuditRequest(expect=told.head), timeout=20).ok
    forged = told.head[:-1] + ("0" if told.head[-1] != "0" else "1")
    assert not stub.VerifyAudit(pb.VerifyAuditRequest(expect=forged), timeout=20).ok
    failed = failing(lambda: stub.VerifyAudit(pb.VerifyAuditRequest(expect="x"), timeout=20))
    assert failed.status is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "wanted", [{"limit": -1}, {"limit": 5001}, {"since": -1.0}, {"forward": True, "cursor": "x"}]
)
def test_nonsense_is_refused(stub: Stub, wanted: dict[str, Any]) -> None:
    failed = failing(lambda: rows(stub, **wanted))
    assert failed.status is grpc.StatusCode.INVALID_ARGUMENT
