"""Whatever a guest that was taken over answers, each operation of the gateway ends, and in words.

Each input is one call, and all that the guest says to it. Afterwards the next call is served, by
this session or, where the guest broke the protocol, by another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.fuzz.gateways import PATIENCE, Gateway, Impostor, quiet
from tests.fuzz.running import fuzz
from tests.fuzz.values import ANYTHING, fields

Said = list[tuple[int, bytes]]
SECONDS = 10.0
CALLS: dict[str, Callable[[str], Any]] = {
    "ListFiles": lambda it: pb.ListFilesRequest(session_id=it),
    "ReadFile": lambda it: pb.ReadFileRequest(session_id=it, path="x"),
    "WriteFile": lambda it: pb.WriteFileRequest(session_id=it, path="x", content="x"),
    "GetProcesses": lambda it: pb.GetProcessesRequest(session_id=it),
    "GetTranscript": lambda it: pb.GetTranscriptRequest(session_id=it),
    "PollRun": lambda it: pb.PollRunRequest(run_id=f"{it}.abc"),
    "Exec": lambda it: pb.ExecRequest(session_id=it, command="true", timeout=2),
    "ExecStream": lambda it: pb.ExecRequest(session_id=it, command="true", timeout=2),
    "PipInstall": lambda it: pb.PipInstallRequest(session_id=it, packages=["x"]),
    "CreateContext": lambda it: pb.CreateContextRequest(session_id=it),
    "ListContexts": lambda it: pb.ListContextsRequest(session_id=it),
    "RestartContext": lambda it: pb.ContextRequest(session_id=it, context_id="x"),
    "RemoveContext": lambda it: pb.ContextRequest(session_id=it, context_id="x"),
    "ExecuteCode": lambda it: pb.ExecuteCodeRequest(session_id=it, code=b"1", context_id="x"),
    "CreateTerminal": lambda it: pb.CreateTerminalRequest(session_id=it),
    "TerminalStream": lambda it: pb.TerminalStreamRequest(terminal_id=f"{it}.abc"),
    "TerminalForeground": lambda it: pb.TerminalForegroundRequest(terminal_id=f"{it}.abc"),
    "TerminalDestroy": lambda it: pb.TerminalDestroyRequest(terminal_id=f"{it}.abc"),
}
"""Operations that a guest answers, each as a client asks for it."""
OPERATIONS: dict[str, dict[str, Any]] = {
    "snapshot": {"op": "save_snapshot", "name": "taken", "replace": True},
    "expose": {"op": "expose", "port": 8000},
    "change": {"op": "update_allowed_hosts", "hosts": ["none"]},
}
"""What the gateway does of its own with a session, and asks its guest for."""
NAMES = (
    "id name path type size mode mtime mtime_ns target entries pid ppid argv command cpu memory "
    "user processes execs contexts language state cwd code status stdout truncated seq tty rows "
    "process_group_id input_waiting started ended execution_count limits denials warm data error"
).split()
KINDS = [wire.RESULT, wire.ERROR, wire.OUT, wire.ERR, wire.EXIT, wire.DATA, wire.END, wire.SHOW]
# Ends that answer an operation, sent last so that none has to be waited for.
LAST = ((wire.ERROR, wire.pack({"code": "invalid_request", "message": "enough"})),)


def _packed(value: Any) -> bytes:
    try:
        return wire.pack(value)
    except (UnicodeEncodeError, OverflowError):
        return b"N"


_VALUES = fields(NAMES, ANYTHING | st.lists(fields(NAMES), max_size=3))
_BODIES = (
    _VALUES.map(_packed)
    | st.lists(_VALUES, max_size=3).map(_packed)
    | st.binary(max_size=30)
    | st.tuples(st.sampled_from([0, 1, 1 << 40]).map(wire.SEQ.pack), st.binary(max_size=30)).map(
        b"".join
    )
)
SAID = st.lists(st.tuples(st.sampled_from(KINDS), _BODIES), max_size=5)


class Taken:
    """A session whose guest says what it is told to, whoever asks for what."""

    def __init__(self, gateway: Gateway) -> None:
        self.session_id = gateway.create()
        self._impostor = Impostor(gateway, self.session_id)
        self._said: Said = []
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def says(self, said: Said) -> None:
        self._said = said

    def _answer(self) -> None:
        splitter = wire.Splitter(wire.MAX_REQUEST)
        connection = self._impostor.socket
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                for kind, channel, body in splitter.feed(data):
                    if kind != wire.CALL:
                        continue
                    if wire.unpack_dict(body)["op"] == "ping":
                        self._impostor.result(channel)
                        continue
                    for what, told in (*self._said, *LAST):
                        self._impostor.send(what, channel, told)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._impostor.socket.shutdown(2)
        self._thread.join(PATIENCE)
        self._impostor.socket.close()


class Guests:
    """One taken guest after the other: a breach ends a session."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._taken: Taken | None = None

    def saying(self, said: Said) -> str:
        """A session that is there, and whose guest will say this."""
        if self._taken is not None:
            with self._gateway.connect() as caller:
                told = caller.call(op="get_session", session_id=self._taken.session_id)
            if told["session"]["phase"] == "ended":
                self.close()
        if self._taken is None:
            self._taken = Taken(self._gateway)
        self._taken.says(said)
        return self._taken.session_id

    def close(self) -> None:
        if self._taken is not None:
            self._taken.close()
            with self._gateway.connect() as caller:  # which may be gone by now
                caller.begin(op="destroy_session", session_id=self._taken.session_id)
                caller.until(wire.RESULT, wire.ERROR)
            self._taken = None


@pytest.fixture(scope="module")
def guests(gateway: Gateway) -> Generator[Guests]:
    found = Guests(gateway)
    yield found
    found.close()


@pytest.fixture(scope="module")
def stub(gateway: Gateway) -> Generator[pb_grpc.SandboxServiceStub]:
    with gateway.channel() as channel:
        yield pb_grpc.SandboxServiceStub(channel)


def test_every_operation_ends_whatever_its_guest_answers(
    gateway: Gateway, neighbour: str, guests: Guests, stub: pb_grpc.SandboxServiceStub
) -> None:
    streams = ("ExecStream", "ExecuteCode", "TerminalStream")

    def ask(name: str, said: Said) -> None:
        session_id = guests.saying(said)
        try:
            answer = getattr(stub, name)(CALLS[name](session_id), timeout=SECONDS)
            if name in streams:
                list(answer)
        except grpc.RpcError as error:
            failed: Any = error
            code = failed.code().name
            assert code not in ("DEADLINE_EXCEEDED", "UNKNOWN"), (name, failed.details())

    @fuzz(80)
    @given(st.sampled_from(sorted(CALLS)), SAID)
    @example("ListFiles", [(wire.RESULT, wire.pack({})), (wire.DATA, wire.pack([{"name": 7}]))])
    @example("GetProcesses", [(wire.RESULT, wire.pack({"processes": [None, {"pid": 1 << 62}]}))])
    def fuzzed(name: str, said: Said) -> None:
        ask(name, said)

    for name in CALLS:  # so that all is loaded and connected that ever will be
        ask(name, [])
    guests.close()
    with quiet(gateway, neighbour):
        fuzzed()
        guests.close()


def test_what_the_gateway_does_with_a_session_ends_whatever_its_guest_answers(
    gateway: Gateway, neighbour: str, guests: Guests
) -> None:
    def ask(name: str, said: Said) -> None:
        session_id = guests.saying(said)
        with gateway.connect() as caller:
            caller.begin(**OPERATIONS[name], session_id=session_id)
            caller.until(wire.RESULT, wire.ERROR)

    @fuzz(40)
    @given(st.sampled_from(sorted(OPERATIONS)), SAID)
    def fuzzed(name: str, said: Said) -> None:
        ask(name, said)

    for name in OPERATIONS:
        ask(name, [])
    guests.close()
    with quiet(gateway, neighbour):
        fuzzed()
        guests.close()


def test_nothing_of_all_this_was_a_surprise(gateway: Gateway) -> None:
    assert gateway.complaints() == []
