"""K8E's terminals, against real sandboxes on every runtime."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Generator
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.conformance.lab.ports import free_port
from tests.gateway.serving import failing
from tests.gateway.test_rpc import Status, ended, run
from tests.places import NewPlace, Place, eventually

Stub = pb_grpc.SandboxServiceStub
Signal = pb.TerminalSignal
PATIENCE = 30
QUIET = {"PS1": "ready> ", "TERM": "dumb"}
SHELL = ("bash", "--norc", "-i")
RAW = "import tty; tty.setraw(0)"


class Terminal:
    """One terminal, and what its newest stream has said."""

    def __init__(self, stub: Stub, session: str, *argv: str, **fields: Any) -> None:
        self.stub = stub
        request = pb.CreateTerminalRequest(session_id=session, argv=argv, **fields)
        made = stub.CreateTerminal(request, timeout=PATIENCE)
        self.id, self.pid = made.terminal_id, made.pid
        self.seen = b""
        self.stream = self.follow()

    def follow(self) -> Any:
        return self.stub.TerminalStream(
            pb.TerminalStreamRequest(terminal_id=self.id), timeout=PATIENCE
        )

    def until(self, text: bytes) -> bytes:
        """Read until ``text`` comes; what came up to there."""
        while text not in self.seen:
            frame = next(self.stream)
            assert frame.WhichOneof("frame") == "data", (frame, self.seen)
            self.seen += frame.data
        before, _, self.seen = self.seen.partition(text)
        return before

    def rest(self) -> tuple[bytes, pb.TerminalExit]:
        """Everything up to the exit, which must be the last frame."""
        for frame in self.stream:
            if frame.WhichOneof("frame") == "exit":
                assert list(self.stream) == []
                return self.seen, frame.exit
            self.seen += frame.data
        raise AssertionError("the stream ended without an exit")

    def write(self, data: bytes) -> None:
        request = pb.TerminalWriteRequest(terminal_id=self.id, data=data)
        assert self.stub.TerminalWrite(request, timeout=PATIENCE).ok

    def foreground(self) -> pb.TerminalForegroundResponse:
        request = pb.TerminalForegroundRequest(terminal_id=self.id)
        return self.stub.TerminalForeground(request, timeout=PATIENCE)

    def signal(self, signal: Any) -> int:
        request = pb.TerminalSignalRequest(terminal_id=self.id, signal=signal)
        return self.stub.TerminalSignal(request, timeout=PATIENCE).process_group_id

    def destroy(self, grace_ms: int = 0) -> None:
        request = pb.TerminalDestroyRequest(terminal_id=self.id, grace_ms=grace_ms)
        assert self.stub.TerminalDestroy(request, timeout=PATIENCE).ok


@contextlib.contextmanager
def terminal(stub: Stub, session: str, *argv: str, **fields: Any) -> Generator[Terminal]:
    made = Terminal(stub, session, *argv, **fields)
    try:
        yield made
    finally:
        with contextlib.suppress(grpc.RpcError):
            made.destroy(1)


def test_a_shell_on_a_terminal_is_typed_to_and_ends(stub: Stub, session: str) -> None:
    with terminal(stub, session, *SHELL, env=QUIET) as shell:
        assert shell.id.startswith(f"{session}.")
        shell.until(b"ready> ")
        shell.write(b"echo pid is $$, here is $PWD; stty size; test -t 0 && exit 5\n")
        shell.until(f"pid is {shell.pid}, here is /workspace\r\n".encode())
        shell.until(b"24 80\r\n")
        _, end = shell.rest()
        assert (end.exit_code, end.signal) == (5, "")


def test_without_a_program_it_is_bash_with_folder_environment_and_size(
    stub: Stub, session: str
) -> None:
    env = {**QUIET, "COLOUR": "teal"}
    with terminal(stub, session, workdir="/tmp", rows=31, cols=117, env=env) as shell:
        shell.write(b"echo ${BASH:+bash} $COLOUR $PWD; stty size; exit\n")
        shell.until(b"bash teal /tmp\r\n31 117\r\n")
        assert shell.rest()[1].exit_code == 0


def test_a_new_size_is_told_to_the_program(stub: Stub, session: str) -> None:
    script = "trap 'stty size' WINCH; echo begun; while :; do sleep 0.05; done"
    with terminal(stub, session, "bash", "-c", script) as program:
        program.until(b"begun")
        request = pb.TerminalResizeRequest(terminal_id=program.id, rows=50, cols=132)
        assert stub.TerminalResize(request, timeout=PATIENCE).ok
        program.until(b"50 132")
        request.rows = 0
        assert failing(lambda: stub.TerminalResize(request)).status is Status.INVALID_ARGUMENT


def test_every_stream_begins_with_what_was_kept_and_sees_the_same(stub: Stub, session: str) -> None:
    with terminal(
        stub, session, "sh", "-c", "echo one; read line; echo got $line; exit 3"
    ) as first:
        first.until(b"one\r\n")
        seen: list[bytes] = []

        def follow() -> None:
            frames = list(first.follow())
            seen.append(
                b"".join(frame.data for frame in frames) + b"%d" % frames[-1].exit.exit_code
            )

        readers = [threading.Thread(target=follow) for _ in range(3)]
        for reader in readers:
            reader.start()
        first.write(b"two\n")
        assert first.rest()[1].exit_code == 3
        for reader in readers:
            reader.join(PATIENCE)
        assert seen == [b"one\r\ntwo\r\ngot two\r\n3"] * 3
        follow()  # also long after its end
        assert seen[3] == seen[0]


def test_writes_are_bytes_and_keep_their_order(stub: Stub, session: str) -> None:
    wanted = bytes(range(256)) * 40
    script = (
        f"{RAW}; import os, hashlib; os.write(1, b'raw.'); data = b''\n"
        f"while len(data) < {len(wanted)}: data += os.read(0, 65536)\n"
        "print(hashlib.sha256(data).hexdigest())"
    )
    with terminal(stub, session, "python3", "-c", script) as program:
        program.until(b"raw.")
        for at in range(0, len(wanted), 100):
            program.write(wanted[at : at + 100])
        program.until(hashlib.sha256(wanted).hexdigest().encode())


def test_a_program_that_nobody_reads_goes_on(stub: Stub, session: str) -> None:
    script = "head -c 3000000 /dev/zero | tr '\\0' x; echo; touch went-on; read line"
    with terminal(stub, session, "sh", "-c", script) as program:
        program.stream.cancel()
        assert run(stub, session, "until test -e went-on; do sleep 0.05; done").exit_code == 0
        program.stream = program.follow()
        program.write(b"\n")
        kept, end = program.rest()
        assert (len(kept) < 600_000, end.exit_code) == (True, 0)


def test_input_that_is_never_read_is_bounded(stub: Stub, session: str) -> None:
    with terminal(stub, session, "sh", "-c", "stty raw -echo; echo raw; exec sleep 300") as asleep:
        asleep.until(b"raw")
        too_much = pb.TerminalWriteRequest(terminal_id=asleep.id, data=bytes((1 << 20) + 1))
        failed = failing(lambda: stub.TerminalWrite(too_much))
        assert failed.status is Status.RESOURCE_EXHAUSTED
        much = pb.TerminalWriteRequest(terminal_id=asleep.id, data=bytes(400_000))

        def fill() -> None:
            for _ in range(4):
                stub.TerminalWrite(much, timeout=PATIENCE)

        failed = failing(fill)
        assert failed.status is Status.RESOURCE_EXHAUSTED
        assert "does not read" in failed.details
        asleep.destroy()


# Who is in front.


def test_a_shell_that_waits_for_a_command_is_in_front(stub: Stub, session: str) -> None:
    with terminal(stub, session, *SHELL, env=QUIET) as shell:
        shell.until(b"ready> ")
        eventually(lambda: shell.foreground().input_waiting)
        assert shell.foreground().process_group_id == shell.pid
        shell.write(b"sh -c 'echo begun; exec sleep 300'\n")
        shell.until(b"begun\r\n")
        assert shell.foreground().process_group_id != shell.pid


def test_what_computes_waits_for_no_input(stub: Stub, session: str) -> None:
    with terminal(stub, session, "sh", "-c", "echo begun; while :; do :; done") as busy:
        busy.until(b"begun")
        eventually(lambda: busy.foreground().process_group_id == busy.pid)
        assert not busy.foreground().input_waiting


def test_input_that_was_not_read_yet_is_not_waited_for(stub: Stub, session: str) -> None:
    with terminal(stub, session, "sh", "-c", "echo begun; exec sleep 300") as asleep:
        asleep.until(b"begun")
        eventually(lambda: asleep.foreground().input_waiting)
        asleep.write(b"unread\n")
        assert not asleep.foreground().input_waiting


def in_front(stub: Stub, session: str, shell: Terminal, command: str) -> None:
    """Have a shell run a command in front of an older job, and wait until it does."""
    shell.until(b"ready> ")
    shell.write(b"sleep 299 &\n")
    shell.until(b"ready> ")
    shell.write(command.encode() + b"\n")
    shell.until(b"beg\r\n")


@pytest.mark.parametrize("name", ["INT", "TERM", "KILL", "HUP"])
def test_a_signal_reaches_what_is_in_front_and_not_the_shell_nor_its_other_jobs(
    stub: Stub, session: str, name: str
) -> None:
    with terminal(stub, session, *SHELL, env=QUIET) as shell:
        in_front(stub, session, shell, "sh -c 'printf be; echo g; exec sleep 301'")
        shell.signal(Signal.Value(f"TERMINAL_SIGNAL_{name}"))
        shell.until(b"ready> ")
        shell.write(b"echo status $?; jobs\n")
        number = {"INT": 130, "TERM": 143, "KILL": 137, "HUP": 129}[name]
        shell.until(f"status {number}\r\n".encode())
        shell.until(b"Running")


def test_what_is_in_front_can_be_stopped(stub: Stub, session: str) -> None:
    with terminal(stub, session, *SHELL, env=QUIET) as shell:
        in_front(stub, session, shell, "sh -c 'printf be; echo g; exec sleep 301'")
        shell.signal(pb.TERMINAL_SIGNAL_TSTP)
        shell.until(b"Stopped")


def test_a_signal_answers_with_the_group_that_programs_know(stub: Stub, session: str) -> None:
    script = "trap 'echo told; exit 6' TERM; echo $$; while :; do sleep 0.05; done"
    with terminal(stub, session, "sh", "-c", script) as program:
        number = int(program.until(b"\r\n"))
        assert number == program.pid
        assert program.foreground().process_group_id == number
        assert program.signal(pb.TERMINAL_SIGNAL_TERM) == number
        program.until(b"told")
        assert program.rest()[1].exit_code == 6


def test_no_signal_is_no_request(stub: Stub, session: str) -> None:
    with terminal(stub, session, "sleep", "300") as asleep:
        for wrong in (0, 9):
            failed = failing(functools.partial(asleep.signal, wrong))
            assert failed.status is Status.INVALID_ARGUMENT


# Their end.


def test_a_signal_that_ends_a_program_is_named(stub: Stub, session: str) -> None:
    with terminal(stub, session, "sleep", "300") as asleep:
        asleep.signal(pb.TERMINAL_SIGNAL_KILL)
        _, end = asleep.rest()
        assert (end.exit_code, end.signal) == (137, "SIGKILL")
        assert asleep.foreground().process_group_id == -1
        assert asleep.signal(pb.TERMINAL_SIGNAL_INT) == -1
        request = pb.TerminalWriteRequest(terminal_id=asleep.id, data=b"x")
        failed = failing(lambda: stub.TerminalWrite(request))
        assert (failed.status, failed.details) == (
            Status.FAILED_PRECONDITION,
            "the program has ended",
        )


def test_destroying_asks_first_and_kills_then_and_forgets(stub: Stub, session: str) -> None:
    polite = Terminal(
        stub, session, "sh", "-c", "trap '' TERM; trap 'echo bye; exit 9' HUP; echo up; read x"
    )
    polite.until(b"up")
    polite.destroy(20_000)
    kept, end = polite.rest()
    assert (b"bye" in kept, end.exit_code) == (True, 9)
    stubborn = Terminal(
        stub, session, "sh", "-c", "trap '' HUP TERM; echo $$ > stubborn; echo up; sleep 300"
    )
    stubborn.until(b"up")
    stubborn.destroy(100)
    assert stubborn.rest()[1].signal == "SIGKILL"
    assert ended(stub, session, "stubborn")
    for gone in (polite, stubborn):
        failed = failing(gone.destroy)
        assert failed.status is Status.NOT_FOUND
        assert "not found" in failed.details


def test_what_a_terminal_s_program_left_behind_is_killed_too(stub: Stub, session: str) -> None:
    script = "(trap '' HUP TERM; echo $BASHPID > left; sleep 300) & echo up; read x"
    program = Terminal(stub, session, "bash", "-c", script)
    program.until(b"up")
    eventually(lambda: run(stub, session, "cat left").stdout)
    program.destroy(50)
    assert ended(stub, session, "left")


def test_a_terminal_whose_program_has_ended_can_be_destroyed(stub: Stub, session: str) -> None:
    over = Terminal(stub, session, "true")
    over.rest()
    over.destroy()
    assert failing(over.foreground).status is Status.NOT_FOUND


def test_terminals_that_are_not_there_are_not_found(stub: Stub, session: str) -> None:
    run_id = run(stub, session, "sleep 2", background=True).run_id  # no terminal
    for name in ("", "nonsense", f"{session}.none", "nobody.none", run_id):
        calls: list[Any] = [
            lambda name=name: list(stub.TerminalStream(pb.TerminalStreamRequest(terminal_id=name))),
            lambda name=name: stub.TerminalWrite(
                pb.TerminalWriteRequest(terminal_id=name, data=b"x")
            ),
            lambda name=name: stub.TerminalResize(
                pb.TerminalResizeRequest(terminal_id=name, rows=1, cols=1)
            ),
            lambda name=name: stub.TerminalForeground(
                pb.TerminalForegroundRequest(terminal_id=name)
            ),
            lambda name=name: stub.TerminalSignal(
                pb.TerminalSignalRequest(terminal_id=name, signal=pb.TERMINAL_SIGNAL_INT)
            ),
            lambda name=name: stub.TerminalDestroy(pb.TerminalDestroyRequest(terminal_id=name)),
        ]
        for call in calls:
            failed = failing(call)
            assert (failed.status, "not found" in failed.details) == (Status.NOT_FOUND, True), name


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": -1},
        {"cols": 1 << 16},
        {"argv": ["/no/such/program"]},
        {"workdir": "/no/such/folder"},
        {"env": {"A=B": "c"}},
        {"argv": ["a\0b"]},
    ],
)
def test_a_terminal_that_cannot_be_is_refused(
    stub: Stub, session: str, fields: dict[str, Any]
) -> None:
    request = pb.CreateTerminalRequest(session_id=session, **fields)
    assert failing(lambda: stub.CreateTerminal(request)).status is Status.INVALID_ARGUMENT
    grace = pb.TerminalDestroyRequest(terminal_id=f"{session}.x", grace_ms=-1)
    assert failing(lambda: stub.TerminalDestroy(grace)).status is Status.INVALID_ARGUMENT


def connect(place: Place) -> grpc.Channel:
    place.json("gateway", "--background")
    place.wait_for_grpc()
    certificate = (place.data / "tls" / "ca.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials(certificate)
    return grpc.secure_channel(place.environ["K8E_LISTEN"], credentials)


def test_a_terminal_outlives_the_gateway(new_place: NewPlace, runtime: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    place = new_place(K8E_LISTEN=f"127.0.0.1:{free_port()}")
    session = place.json("sandbox", "create", "--runtime", runtime)["session_id"]
    with connect(place) as channel:
        shell = Terminal(pb_grpc.SandboxServiceStub(channel), session, *SHELL, env=QUIET)
        shell.until(b"ready> ")
        shell.write(b"mark=$((40 + 2))\n")
        shell.until(b"ready> ")
    place.kill_gateway()
    with connect(place) as channel:
        shell.stub = pb_grpc.SandboxServiceStub(channel)
        shell.stream, shell.seen = shell.follow(), b""
        shell.until(b"mark=")
        shell.write(b"echo mark is $mark\n")
        shell.until(b"mark is 42\r\n")
        assert shell.foreground().process_group_id == shell.pid
        shell.destroy()


def test_commands_work_however_many_terminals_were_destroyed(stub: Stub, session: str) -> None:
    for _ in range(2):
        terminal = Terminal(stub, session, "cat")
        gone = pb.TerminalDestroyRequest(terminal_id=terminal.id)
        assert stub.TerminalDestroy(gone, timeout=PATIENCE).ok
    # More than the guest remembers, so that it forgets what the terminals were.
    for number in range(70):
        assert run(stub, session, f"echo {number}").stdout == f"{number}\n"
