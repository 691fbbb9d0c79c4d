"""K8E's calls against real sandboxes, on every runtime."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.serving import failing

Stub = pb_grpc.SandboxServiceStub
Status = grpc.StatusCode
MIB = 1 << 20
LONG = "sleep 300"
# Ends when the program whose pid is in the file is gone.
GONE = 'for i in $(seq 200); do kill -0 "$(cat %s)" 2>/dev/null || exit 0; sleep 0.05; done; exit 1'


def run(stub: Stub, session: str, command: str, **fields: Any) -> pb.ExecResponse:
    request = pb.ExecRequest(session_id=session, command=command)
    for name, value in fields.items():
        setattr(request, name, value)
    return stub.Exec(request, timeout=50)


def ended(stub: Stub, session: str, pid_file: str) -> bool:
    return run(stub, session, GONE % pid_file).exit_code == 0


# Commands.


def test_exec_answers_with_code_streams_and_everything_k8e_promises(
    stub: Stub, session: str
) -> None:
    done = run(stub, session, "echo out; echo err >&2; exit 3", language="bash")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3)
    assert (done.status, done.session_id, done.language) == ("completed", session, "bash")
    assert not done.truncated
    assert not done.stdout_bytes
    assert not done.run_id
    assert 0 <= done.duration_ms < 20_000


def test_exec_sees_the_session_environment_and_starts_in_the_workspace(
    stub: Stub, session: str
) -> None:
    assert run(stub, session, 'pwd; echo "$GREETING"').stdout == "/workspace\nhello you\n"
    assert run(stub, session, "pwd", workdir="/tmp").stdout == "/tmp\n"


def test_a_signal_becomes_128_plus_its_number(stub: Stub, session: str) -> None:
    assert run(stub, session, "kill -9 $$").exit_code == 137


def test_output_that_is_not_text_arrives_unchanged_in_bytes(stub: Stub, session: str) -> None:
    done = run(stub, session, r"printf 'a\377\000b'; printf '\200' >&2")
    assert done.stdout == "a\ufffd\0b"
    assert done.stdout_bytes == b"a\xff\0b"
    assert done.stderr_bytes == b"\x80"


def test_output_above_one_mebibyte_per_stream_is_cut_and_marked(stub: Stub, session: str) -> None:
    command = "head -c 3000000 /dev/zero | tr '\\0' o; head -c 2000000 /dev/zero | tr '\\0' e >&2"
    done = run(stub, session, command)
    assert (len(done.stdout), len(done.stderr)) == (MIB, MIB)
    assert done.truncated
    assert (done.exit_code, done.status) == (0, "completed")


def test_a_timeout_kills_the_program(stub: Stub, session: str) -> None:
    done = run(stub, session, f"echo $$ > timed; echo begun; {LONG}", timeout=1)
    assert (done.status, done.exit_code, done.stdout) == ("timed_out", 143, "begun\n")
    assert ended(stub, session, "timed")


def test_a_client_that_cancels_kills_the_program(stub: Stub, session: str) -> None:
    run(stub, session, "rm -f hello; mkfifo hello")
    request = pb.ExecRequest(
        session_id=session, command=f"echo $$ > cancelled; echo > hello; {LONG}", timeout=600
    )
    call = stub.Exec.future(request)
    assert run(stub, session, "cat hello").exit_code == 0
    call.cancel()
    assert ended(stub, session, "cancelled")


def test_a_deadline_of_the_client_kills_the_program(stub: Stub, session: str) -> None:
    request = pb.ExecRequest(session_id=session, command=f"echo $$ > late; {LONG}", timeout=600)
    assert failing(lambda: stub.Exec(request, timeout=1.5)).status is Status.DEADLINE_EXCEEDED
    assert ended(stub, session, "late")


def test_code_is_data_for_its_interpreter(stub: Stub, session: str) -> None:
    code = b"import sys\nfor q in ('$HOME', \"it's\", '`id`', '\\\\'):\n    print(q)\nsys.exit(4)\n"
    done = run(stub, session, "", code=code, language="python")
    assert done.stdout == "$HOME\nit's\n`id`\n\\\n"
    assert (done.exit_code, done.language) == (4, "python")


def test_a_language_beside_a_command_is_only_a_label(stub: Stub, session: str) -> None:
    done = run(stub, session, "python3 -c 'print(6*7)'", language="python")
    assert (done.stdout, done.language) == ("42\n", "python")


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"command": " "}, Status.INVALID_ARGUMENT, "the command is empty"),
        ({"command": "true", "timeout": -1}, Status.INVALID_ARGUMENT, "timeout"),
        ({"code": b"1", "language": "cobol"}, Status.INVALID_ARGUMENT, "unknown language"),
        ({"command": "true", "workdir": "/nowhere"}, Status.INVALID_ARGUMENT, "cannot start"),
        ({"command": "a\0b"}, Status.INVALID_ARGUMENT, "NUL"),
    ],
)
def test_what_cannot_run_is_refused(
    stub: Stub, session: str, fields: dict[str, Any], status: grpc.StatusCode, text: str
) -> None:
    failed = failing(lambda: run(stub, session, **{"command": "", **fields}))
    assert failed.status is status
    assert text in failed.details


# Streams.


def test_a_stream_brings_output_while_the_program_runs(stub: Stub, session: str) -> None:
    run(stub, session, "rm -f go; mkfifo go")
    command = "echo first; cat go; echo last >&2; exit 7"
    call = stub.ExecStream(pb.ExecRequest(session_id=session, command=command), timeout=50)
    assert next(call).chunk == "first\n"
    run(stub, session, "echo second > go")
    assert "".join(answer.chunk for answer in call) == "second\nlast\n"
    metadata = {key: value for key, value in call.trailing_metadata() or ()}  # noqa: C416 - typed
    assert metadata["k8e-exit-code"] == "7"
    assert metadata["k8e-status"] == "completed"


def test_a_character_cut_in_two_is_put_together(stub: Stub, session: str) -> None:
    command = r"printf '\303'; sleep 0.1; echo x >&2; sleep 0.1; printf '\251'; printf '\342'"
    answers = stub.ExecStream(pb.ExecRequest(session_id=session, command=command), timeout=50)
    assert "".join(answer.chunk for answer in answers) == "x\né\ufffd"


def test_a_long_stream_is_complete(stub: Stub, session: str) -> None:
    command = "head -c 20000000 /dev/zero | tr '\\0' x; echo end"
    request = pb.ExecRequest(session_id=session, command=command, timeout=50)
    text = "".join(answer.chunk for answer in stub.ExecStream(request, timeout=50))
    assert len(text) == 20_000_004
    assert text.endswith("xend\n")


def test_a_reader_that_leaves_kills_the_program(stub: Stub, session: str) -> None:
    request = pb.ExecRequest(session_id=session, command="echo $$ > left; yes", timeout=600)
    call = stub.ExecStream(request)
    next(call)
    call.cancel()
    assert ended(stub, session, "left")


def test_calls_on_one_session_do_not_wait_for_each_other(stub: Stub, session: str) -> None:
    run(stub, session, "rm -f meet; mkfifo meet")
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.append(run(stub, session, "cat meet").stdout), daemon=True
    )
    waiting.start()
    assert run(stub, session, "echo met > meet").exit_code == 0
    waiting.join(20)
    assert found == ["met\n"]


# Files.


def write(stub: Stub, session: str, path: str, content: str, **fields: Any) -> bool:
    request = pb.WriteFileRequest(session_id=session, path=path, content=content)
    for name, value in fields.items():
        setattr(request, name, value)
    return stub.WriteFile(request, timeout=50).ok


def read(stub: Stub, session: str, path: str) -> pb.ReadFileResponse:
    return stub.ReadFile(pb.ReadFileRequest(session_id=session, path=path), timeout=50)


def test_what_is_written_is_read(stub: Stub, session: str) -> None:
    assert write(stub, session, "/workspace/new/folder/ä b&c.txt", "häll\0o\n")
    answer = read(stub, session, "new/folder/ä b&c.txt")
    assert (answer.content, answer.content_bytes) == ("häll\0o\n", b"")
    assert write(stub, session, "new/folder/ä b&c.txt", "", mode="w")
    assert read(stub, session, "new/folder/ä b&c.txt").content == ""


def test_mode_a_appends(stub: Stub, session: str) -> None:
    for part in ("one\n", "two\n"):
        assert write(stub, session, "grown", part, mode="a")
    assert read(stub, session, "grown").content == "one\ntwo\n"


def test_bytes_survive_in_both_directions(stub: Stub, session: str) -> None:
    data = bytes(range(256)) * 9000
    assert write(stub, session, "raw", "", content_bytes=data)
    answer = read(stub, session, "raw")
    assert answer.content_bytes == data
    assert answer.content == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("missing", Status.NOT_FOUND, "ENOENT"),
        ("closed", Status.PERMISSION_DENIED, "EACCES"),
        ("/workspace", Status.FAILED_PRECONDITION, "EISDIR"),
        ("/etc/passwd/x", Status.FAILED_PRECONDITION, "ENOTDIR"),
        ("", Status.INVALID_ARGUMENT, "EINVAL"),
        ("x" * 300, Status.INVALID_ARGUMENT, "ENAMETOOLONG"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    stub: Stub, session: str, path: str, status: grpc.StatusCode, code: str
) -> None:
    run(stub, session, "echo secret > closed; chmod 000 closed")
    failed = failing(lambda: read(stub, session, path))
    assert (failed.status, failed.code) == (status, code)
    assert not path or path in failed.details


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/usr/bin/new", Status.PERMISSION_DENIED),
        ("/workspace", Status.FAILED_PRECONDITION),
    ],
)
def test_a_file_that_cannot_be_written_is_an_error(
    stub: Stub, session: str, path: str, status: grpc.StatusCode
) -> None:
    assert failing(lambda: write(stub, session, path, "text")).status is status


def test_a_file_too_large_for_one_answer_says_what_to_do(stub: Stub, session: str) -> None:
    run(stub, session, "truncate -s 65M sparse")
    failed = failing(lambda: read(stub, session, "sparse"))
    assert failed.status is Status.RESOURCE_EXHAUSTED
    assert "go through Run" in failed.details


def test_a_file_that_fits_but_not_with_its_text_is_refused_clearly(
    stub: Stub, session: str
) -> None:
    run(stub, session, "head -c 30M /dev/zero | tr '\\0' '\\377' > wide")
    failed = failing(lambda: read(stub, session, "wide"))
    assert (failed.status, failed.code) == (Status.RESOURCE_EXHAUSTED, "limit_exceeded")
    run(stub, session, "rm -f wide sparse")


def test_files_are_listed_with_type_size_and_time(stub: Stub, session: str) -> None:
    command = (
        "mkdir -p tree/deep/er; echo abc > tree/deep/er/old; touch -d @1000 tree/deep/er/old; "
        "echo > tree/new; ln -s new tree/link; printf x > \"$(printf 'tree/\\377')\""
    )
    run(stub, session, command)

    def listing(since: int) -> dict[str, pb.FileEntry]:
        request = pb.ListFilesRequest(session_id=session, since=since)
        return {
            item.path.removeprefix("/workspace/tree/"): item
            for item in stub.ListFiles(request, timeout=50).files
            if item.path.startswith("/workspace/tree/")
        }

    files = listing(0)
    assert sorted(files) == ["deep/er/old", "link", "new", "\ufffd"]
    old = files["deep/er/old"]
    assert (old.type, old.size, old.modified) == ("file", 4, 1000)
    assert files["link"].type == "symlink"
    assert sorted(listing(2000)) == ["link", "new", "\ufffd"]


def test_a_listing_since_nonsense_is_refused(stub: Stub, session: str) -> None:
    request = pb.ListFilesRequest(session_id=session, since=-1)
    assert failing(lambda: stub.ListFiles(request, timeout=50)).status is Status.INVALID_ARGUMENT
