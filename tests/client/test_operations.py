"""Operations without any input or output: frames in, frames out."""

from __future__ import annotations

from typing import Any

import pytest

from k8e import errors
from k8e.client import endpoints, operations, requests
from k8e.client.operations import PULL, RECEIVE, Send
from k8e.client.results import Chunk, Denial, Stdout
from k8e.guest import wire

RESULT = (wire.RESULT, wire.pack({"session_id": "s", "id": "e", "pid": 2}))
EXIT = (
    wire.EXIT,
    wire.pack(
        {"code": 0, "status": "completed", "signal": 0, "duration_ms": 1, "truncated": False}
    ),
)


class Script:
    """A driver that plays a gateway's frames and an upload, and notes everything."""

    def __init__(self, *frames: Any, source: list[bytes] | None = None) -> None:
        self.frames = list(frames)
        self.source = list(source or [])
        self.sent: list[tuple[int, bytes]] = []
        self.events: list[Any] = []

    def play(self, operation: operations.Operation[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                if isinstance(answer, Exception):
                    step = operation.throw(answer)
                else:
                    step = operation.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = None
            if isinstance(step, Send):
                self.sent.append((step.kind, bytes(step.body)))
            elif step is RECEIVE:
                answer = self.frames.pop(0)
            elif step is PULL:
                answer = self.source.pop(0) if self.source else b""
            else:
                self.events.append(step)


def output(size: int, seq: int = 0) -> tuple[int, bytes]:
    return wire.OUT, wire.SEQ.pack(seq) + b"x" * size


def credit(count: int) -> tuple[int, bytes]:
    return wire.CREDIT, wire.CREDIT_BODY.pack(count)


def test_credit_is_granted_in_large_steps_for_what_was_consumed() -> None:
    frames = [output(100_000, at * 100_000) for at in range(6)]
    script = Script(RESULT, *frames, EXIT)
    script.play(operations.exec_events({"op": "exec"}))
    granted = [wire.CREDIT_BODY.unpack(body)[0] for _, body in script.sent[1:]]
    assert granted == [300_000, 300_000]
    assert [type(event) for event in script.events[:-1]] == [Stdout] * 6


def test_output_is_collected_by_stream() -> None:
    error = (wire.ERR, wire.SEQ.pack(3) + b"no")
    script = Script(RESULT, output(3), error, EXIT)
    found = script.play(operations.exec_result({"op": "exec"}))
    assert (found.stdout, found.stderr, found.session_id, found.exec_id) == ("xxx", "no", "s", "e")
    assert script.events == []


def test_what_was_refused_meanwhile_is_part_of_the_result() -> None:
    refused = {
        "name": "evil.example",
        "address": "",
        "port": 443,
        "protocol": "tcp",
        "rule": "not in the allow-list",
        "count": 2,
        "later": "a newer gateway tells more",
    }
    end = wire.unpack_dict(EXIT[1]) | {"denials": [refused]}
    script = Script(RESULT, (wire.EXIT, wire.pack(end)))
    found = script.play(operations.exec_result({"op": "exec"}))
    expected = Denial("evil.example", "", 443, "tcp", "not in the allow-list", 2)
    assert found.denials == [expected]
    assert Script(RESULT, EXIT).play(operations.exec_result({"op": "exec"})).denials == []


@pytest.mark.parametrize(("hosts", "sent"), [(None, {}), ([], {"allowed_hosts": []})])
def test_no_allowed_hosts_and_none_at_all_are_different(
    hosts: list[str] | None, sent: dict[str, Any]
) -> None:
    assert requests.create_call("", hosts, "", {}) == {"op": "create_session", "spec": sent}


def test_a_text_in_the_place_of_a_list_of_hosts_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"not the text 'example\.org'"):
        requests.create_call("", "example.org", "", {})
    with pytest.raises(errors.InvalidRequest, match=r"not the text 'example\.org'"):
        requests.allow_call("s", "example.org")


def test_uploads_never_send_more_than_there_is_credit_for() -> None:
    pieces = [b"a" * wire.CHUNK] * 6
    done = (wire.RESULT, wire.pack({"path": "p", "size": 1}))
    script = Script(RESULT, credit(wire.CHUNK), credit(wire.CHUNK), done, source=pieces)
    operation = operations.write({"op": "write"})
    frames_left = len(script.frames)
    assert script.play(operation) == {"path": "p", "size": 1}
    kinds = [kind for kind, _ in script.sent]
    assert kinds == [wire.CALL, *[wire.DATA] * 6, wire.END]
    assert frames_left == 4


def test_an_upload_waits_for_credit_before_it_goes_on() -> None:
    script = Script(RESULT, source=[b"a" * wire.CHUNK] * 9)
    with pytest.raises(IndexError):  # it wants to receive, and there is nothing
        script.play(operations.write({"op": "write"}))
    assert sum(len(body) for kind, body in script.sent if kind == wire.DATA) == wire.WINDOW


def test_stdin_is_sent_after_the_command_began_and_then_ended() -> None:
    script = Script(RESULT, credit(2), EXIT, source=[b"in"])
    script.play(operations.exec_events({"op": "exec", "stdin": True}))
    assert script.sent[1:] == [(wire.STDIN, b"in"), (wire.STDIN_END, b"")]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ENOENT", FileNotFoundError),
        ("EISDIR", IsADirectoryError),
        ("session_not_found", errors.SessionNotFound),
        ("something_new", errors.K8eError),
    ],
)
def test_errors_become_exceptions_wherever_they_come(code: str, kind: type[Exception]) -> None:
    failure = (wire.ERROR, wire.pack({"code": code, "message": "why", "hint": ""}))
    for before in ([], [RESULT], [RESULT, output(3)]):
        with pytest.raises(kind, match="why"):
            Script(*before, failure).play(operations.exec_result({"op": "exec"}))
    with pytest.raises(kind, match="why"):
        Script(RESULT, failure, source=[b"x"]).play(operations.write({"op": "write"}))


def test_a_lost_gateway_is_reported_with_session_and_command() -> None:
    lost = errors.GatewayUnreachable("the gateway closed the connection")
    for operation in (operations.exec_events, operations.exec_result):
        with pytest.raises(errors.GatewayUnreachable, match="command e ran in session s") as told:
            Script(RESULT, output(3), lost).play(operation({"op": "exec"}))
        assert "goes on" in told.value.hint


def test_a_file_is_emitted_in_chunks() -> None:
    stat = {"path": "p", "type": "file", "size": 2, "mode": 0, "modified_ns": 0, "session_id": "s"}
    script = Script(
        (wire.RESULT, wire.pack(stat)), (wire.DATA, b"a"), (wire.DATA, b"b"), (wire.END, b"")
    )
    assert script.play(operations.read({"op": "read"})).size == 2
    assert script.events == [Chunk(b"a"), Chunk(b"b")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("512M", 512 << 20), ("1.5GiB", 3 << 29), ("2kb", 2048), ("100", 100), (7, 7)],
)
def test_sizes_have_units(value: str | int, expected: int) -> None:
    assert requests.parse_limit("memory", value) == expected


def test_cpus_are_fractions() -> None:
    assert requests.parse_limit("cpus", "0.5") == 0.5


def test_content_is_cut_into_frames() -> None:
    data = bytes(range(256)) * 4096
    for content in (data, bytearray(data), memoryview(data), [data[:10], data[10:]]):
        pieces = list(requests.chunks(content))
        assert all(len(piece) <= wire.CHUNK for piece in pieces)
        assert b"".join(pieces) == data
    with pytest.raises(TypeError):
        list(requests.chunks([1, 2]))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", endpoints.Endpoint()),
        ("gateway.example:1234", endpoints.Endpoint(target="gateway.example:1234")),
        ("https://gateway.example", endpoints.Endpoint(target="gateway.example:50051")),
        ("[::1]", endpoints.Endpoint(target="[::1]:50051")),
        ("[::1]:9", endpoints.Endpoint(target="[::1]:9")),
        ("unix:/run/x.sock", endpoints.Endpoint(socket="/run/x.sock")),
        ("unix:///run/x.sock", endpoints.Endpoint(socket="/run/x.sock")),
    ],
)
def test_endpoints_have_several_spellings(
    text: str, expected: endpoints.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("K8E_SANDBOX_APIKEY", raising=False)
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", text)
    assert endpoints.resolve(None) == expected
    assert endpoints.resolve("given:1").target == "given:1"
