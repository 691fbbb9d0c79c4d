"""Every row of K8E's table of calls works over the real wire, on each runtime.

Each call has tests of its own elsewhere; here is the proof that none is missing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.gateway import serving
from tests.places import eventually

SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
SECONDS = 50


class Scene(NamedTuple):
    """A live session, and how to call its gateway."""

    stub: pb_grpc.SandboxServiceStub
    channel: grpc.Channel
    runtime: str
    session: str

    def exec(self, command: str) -> pb.ExecResponse:
        return self.stub.Exec(pb.ExecRequest(session_id=self.session, command=command))

    def background(self, command: str) -> str:
        asked = pb.ExecRequest(session_id=self.session, command=command, background=True)
        return self.stub.Exec(asked).run_id

    def terminal(self, *argv: str) -> str:
        asked = pb.CreateTerminalRequest(session_id=self.session, argv=argv, rows=24, cols=80)
        return self.stub.CreateTerminal(asked).terminal_id


@pytest.fixture(scope="module", params=serving.RUNTIMES)
def scene(
    stub: pb_grpc.SandboxServiceStub, channel: grpc.Channel, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    asked = pb.CreateSessionRequest(runtime_class=request.param)
    session = stub.CreateSession(asked).session_id
    yield Scene(stub, channel, request.param, session)
    stub.DestroySession(pb.DestroySessionRequest(session_id=session))


def create_and_destroy(scene: Scene) -> None:
    asked = pb.CreateSessionRequest(runtime_class=scene.runtime, tenant_id="rows")
    made = scene.stub.CreateSession(asked).session_id
    assert made
    assert scene.stub.DestroySession(pb.DestroySessionRequest(session_id=made)).ok


def exec_(scene: Scene) -> None:
    done = scene.exec("echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3)
    assert (done.status, done.session_id) == ("completed", scene.session)


def exec_stream(scene: Scene) -> None:
    asked = pb.ExecRequest(session_id=scene.session, command="echo one; echo two")
    call = scene.stub.ExecStream(asked)
    assert "".join(part.chunk for part in call) == "one\ntwo\n"
    assert dict(call.trailing_metadata())["k8e-exit-code"] == "0"


def files(scene: Scene) -> None:
    asked = pb.WriteFileRequest(session_id=scene.session, path="rows.txt", content="rows")
    assert scene.stub.WriteFile(asked).ok
    read = pb.ReadFileRequest(session_id=scene.session, path="/workspace/rows.txt")
    assert scene.stub.ReadFile(read).content == "rows"
    listed = scene.stub.ListFiles(pb.ListFilesRequest(session_id=scene.session)).files
    assert "/workspace/rows.txt" in [item.path for item in listed]


def pip_install(scene: Scene) -> None:
    # Nothing is reachable here: that pip was asked, with the package as data, is what shows.
    asked = pb.PipInstallRequest(session_id=scene.session, packages=["./nothing"])
    done = scene.stub.PipInstall(asked)
    assert done.exit_code != 0
    assert "nothing" in done.output


def run_sub_agent(scene: Scene) -> None:
    asked = pb.RunSubAgentRequest(parent_session_id=scene.session, agent_type="research")
    child = scene.stub.RunSubAgent(asked).session_id
    written = pb.ExecRequest(session_id=child, command="echo child > from-child")
    assert scene.stub.Exec(written).exit_code == 0
    assert scene.exec("cat from-child").stdout == "child\n"
    grandchild = pb.RunSubAgentRequest(parent_session_id=child)
    failed = serving.failing(lambda: scene.stub.RunSubAgent(grandchild))
    assert failed.status is grpc.StatusCode.PERMISSION_DENIED
    assert scene.stub.DestroySession(pb.DestroySessionRequest(session_id=child)).ok


def confirm_and_approve(scene: Scene) -> None:
    asked = pb.ConfirmActionRequest(session_id=scene.session, action="delete it")
    first = scene.stub.ConfirmAction(asked)
    assert first.approval_id
    assert not first.approved
    answers: list[bool] = []

    def wait() -> None:
        again = pb.ConfirmActionRequest(
            session_id=scene.session, action="delete it", approval_id=first.approval_id
        )
        answers.append(scene.stub.ConfirmAction(again, timeout=SECONDS).approved)

    waiting = threading.Thread(target=wait)
    waiting.start()
    decision = pb.ApproveActionRequest(approval_id=first.approval_id, approved=True)
    assert scene.stub.ApproveAction(decision).ok
    waiting.join(SECONDS)
    assert answers == [True]


def sessions(scene: Scene) -> None:
    found = scene.stub.GetSession(pb.GetSessionRequest(session_id=scene.session))
    assert (found.phase, found.runtime_class) == ("Active", scene.runtime)
    listed = scene.stub.ListSessions(pb.ListSessionsRequest(phase="all")).sessions
    assert scene.session in [item.session_id for item in listed]


def pause_and_resume(scene: Scene) -> None:
    assert scene.stub.PauseSession(pb.PauseSessionRequest(session_id=scene.session)).ok
    found = scene.stub.GetSession(pb.GetSessionRequest(session_id=scene.session))
    assert found.phase == "Paused"
    failed = serving.failing(lambda: scene.exec("true"))
    assert failed.status is grpc.StatusCode.FAILED_PRECONDITION
    assert scene.stub.ResumeSession(pb.ResumeSessionRequest(session_id=scene.session)).ok
    assert scene.exec("echo awake").stdout == "awake\n"


def certificates(scene: Scene) -> None:
    authority = scene.stub.GetCACert(pb.GetCACertRequest()).cert
    assert authority.startswith("-----BEGIN CERTIFICATE-----")


def login(scene: Scene) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    signed = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, hashes.SHA256())
    request = signed.public_bytes(serialization.Encoding.PEM).decode()
    with serving.Frames(scene.channel) as frames:
        frames.ask(1, op="create_api_key", name=f"rows-{scene.runtime}")
        bearer = (("authorization", f"Bearer {frames.result(1)['key']}"),)
    asked = pb.LoginRequest(csr=request, device_name="rows")
    answer = scene.stub.Login(asked, metadata=bearer)
    assert answer.cert.startswith("-----BEGIN CERTIFICATE-----")
    assert answer.ca_cert == scene.stub.GetCACert(pb.GetCACertRequest()).cert
    assert 0 < answer.valid_days <= 90


def runs(scene: Scene) -> None:
    run_id = scene.background("echo begun; echo bad >&2; exit 4")

    def ended() -> pb.PollRunResponse | None:
        found = scene.stub.PollRun(pb.PollRunRequest(run_id=run_id))
        return found if found.status == "completed" else None

    done: pb.PollRunResponse = eventually(ended)
    assert (done.stdout, done.stderr, done.exit_code) == ("begun\n", "bad\n", 4)
    transcript = scene.stub.GetTranscript(pb.GetTranscriptRequest(session_id=run_id))
    assert transcript.eof
    assert sorted(transcript.output.splitlines()) == ["bad", "begun"]


def events(scene: Scene) -> None:
    scene.exec("echo told")
    answer = scene.stub.GetEvents(pb.GetEventsRequest(session_id=scene.session))
    kinds = [json.loads(line)["kind"] for line in answer.events]
    assert kinds[0] == "session.created"
    assert {"exec.started", "exec.finished"} <= set(kinds)
    assert answer.returned == len(kinds)


def processes(scene: Scene) -> None:
    scene.background("exec sleep 40")
    asked = pb.GetProcessesRequest(session_id=scene.session)

    def found() -> bool:
        return any(item.comm == "sleep" for item in scene.stub.GetProcesses(asked).processes)

    assert eventually(found)


def snapshots(scene: Scene) -> None:
    name = f"rows-{scene.runtime}"
    digest = "sha256:" + "0" * 64
    put = scene.stub.SnapshotPut(pb.SnapshotPutRequest(name=name, layers=[digest]))
    assert (put.name, put.layers) == (name, 1)
    got = scene.stub.SnapshotGet(pb.SnapshotGetRequest(name=name))
    assert list(got.layers) == [digest]
    assert name in scene.stub.SnapshotList(pb.SnapshotListRequest()).names


def terminals(scene: Scene) -> None:
    """All seven, in the life of one terminal."""
    terminal = scene.terminal("cat")
    stream = scene.stub.TerminalStream(pb.TerminalStreamRequest(terminal_id=terminal))
    resized = pb.TerminalResizeRequest(terminal_id=terminal, rows=30, cols=100)
    assert scene.stub.TerminalResize(resized).ok
    typed = pb.TerminalWriteRequest(terminal_id=terminal, data=b"typed\n")
    assert scene.stub.TerminalWrite(typed).ok
    seen = b""
    for frame in stream:
        seen += frame.data
        if seen.count(b"typed") == 2:  # the terminal's echo, and the program's own
            break
    asked = pb.TerminalForegroundRequest(terminal_id=terminal)
    group = scene.stub.TerminalForeground(asked).process_group_id
    interrupt = pb.TerminalSignalRequest(terminal_id=terminal, signal=pb.TERMINAL_SIGNAL_INT)
    assert scene.stub.TerminalSignal(interrupt).process_group_id == group
    ends = [frame.exit for frame in stream if frame.HasField("exit")]
    assert [end.signal for end in ends] == ["SIGINT"]
    assert scene.stub.TerminalDestroy(pb.TerminalDestroyRequest(terminal_id=terminal)).ok


def exposing(scene: Scene) -> None:
    asked = pb.ExposeServiceRequest(session_id=scene.session, port=8123)
    url = scene.stub.ExposeService(asked).url
    assert url.startswith("http://127.")
    listed = scene.stub.ListExposed(pb.ListExposedRequest(session_id=scene.session)).services
    assert [(item.port, item.url) for item in listed] == [(8123, url)]
    gone = pb.UnexposeServiceRequest(session_id=scene.session, port=8123)
    assert scene.stub.UnexposeService(gone).ok
    assert not scene.stub.ListExposed(pb.ListExposedRequest(session_id=scene.session)).services


def egress(scene: Scene) -> None:
    hosts = ["api.example:443"]
    asked = pb.UpdateAllowedHostsRequest(session_id=scene.session, hosts=hosts)
    assert list(scene.stub.UpdateAllowedHosts(asked).hosts) == hosts
    told = scene.stub.GetEgress(pb.GetEgressRequest(session_id=scene.session))
    assert list(told.allowed_hosts) == hosts


def templates(scene: Scene) -> None:
    """All four, and a session that outlives the template it was made from."""
    name = f"rows-{scene.runtime}"
    recipe = pb.Template(
        name=name,
        runtime_class=scene.runtime,
        limits=pb.TemplateLimits(memory=256 << 20),
        env={"A": "template's", "B": "template's"},
        allowed_hosts=["none"],
    )
    applied = scene.stub.ApplyTemplate(pb.ApplyTemplateRequest(template=recipe))
    assert (applied.source, applied.rootfs, applied.error) == ("api", "host", "")
    assert scene.stub.GetTemplate(pb.GetTemplateRequest(name=name)) == applied
    listed = scene.stub.ListTemplates(pb.ListTemplatesRequest()).templates
    assert {"default", name} <= {item.name for item in listed}
    asked = pb.CreateSessionRequest(template=name, env={"B": "client's"})
    made = scene.stub.CreateSession(asked).session_id
    assert scene.stub.DeleteTemplate(pb.DeleteTemplateRequest(name=name)).ok
    failed = serving.failing(lambda: scene.stub.CreateSession(asked))
    assert failed.status is grpc.StatusCode.NOT_FOUND
    found = scene.stub.GetSession(pb.GetSessionRequest(session_id=made))
    assert (found.template, found.runtime_class) == (name, scene.runtime)
    done = scene.stub.Exec(pb.ExecRequest(session_id=made, command='echo "$A, $B"'))
    assert done.stdout == "template's, client's\n"
    scene.stub.DestroySession(pb.DestroySessionRequest(session_id=made))


def run(scene: Scene) -> None:
    with serving.Frames(scene.channel) as frames:
        call = {"op": "exec", "session": {"id": scene.session}, "argv": ["echo", "framed"]}
        frames.ask(1, **call)
        last = frames.until(wire.EXIT)
    assert b"framed\n" in b"".join(frame.body for frame in last)


def contexts(scene: Scene) -> None:
    stub = scene.stub
    asked = pb.CreateContextRequest(session_id=scene.session, cwd="/home/user")
    made = stub.CreateContext(asked, timeout=SECONDS)
    assert (made.language, made.cwd, made.session_id) == ("python", "/home/user", scene.session)
    named: dict[str, Any] = {"session_id": scene.session, "context_id": made.context_id}

    def execute(code: bytes, **fields: Any) -> list[pb.ExecuteCodeResponse]:
        asked = pb.ExecuteCodeRequest(code=code, **{**named, **fields})
        return list(stub.ExecuteCode(asked, timeout=SECONDS))

    assert [part.WhichOneof("event") for part in execute(b"x = 20")] == ["end"]
    printed, shown, end = execute(b"print('out'); x + 1")
    assert printed.stdout == b"out\n"
    assert dict(shown.result.data) == {"text/plain": b"21"}
    assert shown.result.is_main_result
    assert (end.end.exit_code, end.end.execution_count, end.end.status) == (0, 2, "completed")
    (failed,) = execute(b"1 / 0")
    assert (failed.end.error.name, failed.end.exit_code) == ("ZeroDivisionError", 1)
    listed = stub.ListContexts(pb.ListContextsRequest(session_id=scene.session)).contexts
    assert made.context_id in [item.context_id for item in listed]
    idle = stub.InterruptContext(pb.InterruptContextRequest(**named))
    assert (idle.interrupted, idle.stopped) == (False, True)
    assert stub.RestartContext(pb.ContextRequest(**named)).execution_count == 0
    assert execute(b"x")[0].end.error.name == "NameError"
    assert stub.RemoveContext(pb.ContextRequest(**named)).ok
    failed = serving.failing(lambda: execute(b"x"))
    assert (failed.status, failed.code) == (grpc.StatusCode.NOT_FOUND, "context_not_found")
    made_now = execute(b"echo $0", context_id="rows", make_context=True, language="bash")
    assert made_now[0].stdout == b"bash\n"


ROWS: dict[str, Callable[[Scene], None]] = {
    "CreateSession DestroySession": create_and_destroy,
    "Exec": exec_,
    "ExecStream": exec_stream,
    "WriteFile ReadFile ListFiles": files,
    "PipInstall": pip_install,
    "RunSubAgent": run_sub_agent,
    "ConfirmAction ApproveAction": confirm_and_approve,
    "GetSession ListSessions": sessions,
    "PauseSession ResumeSession": pause_and_resume,
    "GetCACert": certificates,
    "Login": login,
    "PollRun GetTranscript": runs,
    "GetEvents": events,
    "GetProcesses": processes,
    "SnapshotPut SnapshotGet SnapshotList": snapshots,
    "CreateTerminal TerminalStream TerminalWrite TerminalResize TerminalForeground "
    "TerminalSignal TerminalDestroy": terminals,
    "ExposeService UnexposeService ListExposed": exposing,
    "UpdateAllowedHosts GetEgress": egress,
    "ListTemplates GetTemplate ApplyTemplate DeleteTemplate": templates,
    "Run": run,
    "CreateContext ListContexts RemoveContext RestartContext InterruptContext "
    "ExecuteCode": contexts,
}


def test_no_call_of_the_interface_is_without_a_row() -> None:
    named = [name for names in ROWS for name in names.split()]
    # Of approvals, the audit trail and secrets, which have tests of their own.
    ours = {"ListApprovals", "GetAudit", "VerifyAudit", "SetSecret", "ListSecrets", "DeleteSecret"}
    assert {method.name for method in SERVICE.methods} == {*named, *ours}
    assert len(named) == len(set(named))


@pytest.mark.parametrize("names", ROWS, ids=lambda names: names.split()[0])
def test_the_calls_work_over_the_real_wire(scene: Scene, names: str) -> None:
    ROWS[names](scene)
