"""K8E's calls about background runs, against real sandboxes on every runtime."""

from __future__ import annotations

import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.serving import failing
from tests.gateway.test_rpc import Status, ended, run
from tests.places import eventually

Stub = pb_grpc.SandboxServiceStub


def poll(stub: Stub, run_id: str) -> pb.PollRunResponse:
    return stub.PollRun(pb.PollRunRequest(run_id=run_id), timeout=20)


def transcript(stub: Stub, name: str, offset: int = 0, limit: int = 0) -> pb.GetTranscriptResponse:
    request = pb.GetTranscriptRequest(session_id=name, offset=offset, limit=limit)
    return stub.GetTranscript(request, timeout=20)


def test_a_background_run_answers_at_once_and_is_polled_to_its_end(
    stub: Stub, session: str
) -> None:
    run(stub, session, "rm -f go; mkfifo go")
    command = "echo begun; echo err >&2; cat go; exit 3"
    begun = run(stub, session, command, background=True)
    assert (begun.session_id, begun.status) == (session, "started")
    assert begun.run_id.startswith(f"{session}.")
    eventually(lambda: poll(stub, begun.run_id).stderr)
    found = poll(stub, begun.run_id)
    assert (found.status, found.stdout, found.run_id) == ("running", "begun\n", begun.run_id)
    assert not transcript(stub, begun.run_id).eof

    run(stub, session, "echo finally > go")
    eventually(lambda: poll(stub, begun.run_id).status != "running")
    found = poll(stub, begun.run_id)
    assert (found.status, found.exit_code, found.truncated) == ("completed", 3, False)
    assert (found.stdout, found.stderr) == ("begun\nfinally\n", "err\n")


def test_a_background_run_above_its_time_is_killed(stub: Stub, session: str) -> None:
    begun = run(stub, session, "echo $$ > ran-out; sleep 300", background=True, timeout=1)
    eventually(lambda: poll(stub, begun.run_id).status == "timed_out")
    assert ended(stub, session, "ran-out")


def test_a_transcript_is_read_in_pieces_whose_characters_are_whole(
    stub: Stub, session: str
) -> None:
    begun = run(stub, session, "printf 'aéé'; printf '€' >&2", background=True)
    eventually(lambda: poll(stub, begun.run_id).status == "completed")
    pieces: list[str] = []
    offset, eof = 0, False
    while not eof:
        found = transcript(stub, begun.run_id, offset, 4)
        assert (found.offset, found.truncated_before) == (offset, False)
        pieces.append(found.output)
        offset, eof = found.next_offset, found.eof
    assert "".join(pieces) == "aéé€"
    assert offset == 8
    assert transcript(stub, begun.run_id, 1000).eof


def test_the_transcript_of_a_session_has_all_its_runs(stub: Stub, session: str) -> None:
    before = transcript(stub, session).next_offset
    run(stub, session, "echo one; exit 4")
    run(stub, session, "echo two >&2")
    begun = run(stub, session, "echo three", background=True)
    eventually(lambda: poll(stub, begun.run_id).status == "completed")
    found = transcript(stub, session, before)
    assert (found.output, found.offset, found.eof) == ("one\ntwo\nthree\n", before, True)
    piece = transcript(stub, session, before + 4, 4)
    assert (piece.output, piece.next_offset, piece.eof) == ("two\n", before + 8, False)

    run(stub, session, "rm -f go; mkfifo go")
    begun = run(stub, session, "echo begun; cat go", background=True)
    eventually(lambda: transcript(stub, session, found.next_offset).output == "begun\n")
    assert not transcript(stub, session).eof, "a program runs"
    run(stub, session, "echo done > go")
    eventually(lambda: transcript(stub, session).eof)
    assert transcript(stub, session, found.next_offset).output == "begun\ndone\n"


def test_a_session_in_which_nothing_ran_has_an_empty_transcript(stub: Stub) -> None:
    made = stub.CreateSession(pb.CreateSessionRequest(runtime_class="container"), timeout=50)
    found = transcript(stub, made.session_id)
    stub.DestroySession(pb.DestroySessionRequest(session_id=made.session_id), timeout=50)
    assert (found.output, found.next_offset, found.eof) == ("", 0, True)


def test_of_much_output_the_newest_is_kept_and_the_loss_is_told(stub: Stub, session: str) -> None:
    command = "head -c 3000000 /dev/zero | tr '\\0' x; echo end"
    begun = run(stub, session, command, background=True)
    eventually(lambda: poll(stub, begun.run_id).status == "completed")
    found = poll(stub, begun.run_id)
    assert found.truncated
    assert found.stdout.endswith("xend\n")
    assert 256 << 10 < len(found.stdout) <= 1 << 20
    piece = transcript(stub, begun.run_id)
    assert piece.truncated_before
    assert piece.offset + len(found.stdout) == 3_000_004


def test_processes_are_listed_with_name_and_state(stub: Stub, session: str) -> None:
    begun = run(stub, session, "exec sleep 300", background=True)
    request = pb.GetProcessesRequest(session_id=session)

    def sleeping() -> list[int]:
        found = stub.GetProcesses(request, timeout=20).processes
        return [item.pid for item in found if (item.comm, item.state) == ("sleep", "S")]

    pids = eventually(sleeping)
    assert run(stub, session, f"kill {' '.join(map(str, pids))}").exit_code == 0
    eventually(lambda: poll(stub, begun.run_id).exit_code == 143)


def test_runs_that_are_not_there(stub: Stub, session: str) -> None:
    unknown = ("sess-1790000000-bg-1790000001", "no-dot", ".x", "x.", "nobody.x")
    for run_id in (f"{session}.nothing", session, *unknown):
        assert poll(stub, run_id).status == "not_found"
    assert failing(lambda: poll(stub, "")).status is Status.INVALID_ARGUMENT
    assert failing(lambda: transcript(stub, session, -1)).status is Status.INVALID_ARGUMENT
    assert failing(lambda: transcript(stub, f"{session}.x")).status is Status.NOT_FOUND


@pytest.mark.parametrize("fields", [{"workdir": "/nowhere"}, {"timeout": -1}])
def test_a_background_run_that_cannot_start_is_refused(
    stub: Stub, session: str, fields: dict[str, object]
) -> None:
    failed = failing(lambda: run(stub, session, "true", background=True, **fields))
    assert failed.status is Status.INVALID_ARGUMENT
