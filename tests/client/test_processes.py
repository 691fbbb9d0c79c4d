"""Programs that the SDK talks to while they run, over each transport and on each runtime."""

from __future__ import annotations

import asyncio
import io
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import pytest

from k8e import AsyncSandboxClient, Exit, SandboxClient, Stderr, Stdout, errors
from k8e.client import exchange
from tests.places import NewPlace, eventually

MIB = 1 << 20
PATIENCE = 40
MUCH = bytes(range(256)) * (10 * MIB // 256)


def test_a_program_is_written_to_and_read_from_in_turns(
    client: SandboxClient, session_id: str
) -> None:
    command = ["sh", "-c", "while read a; do echo got $a; done; echo end >&2; exit 7"]
    with client.open(session_id, command, env={"A": "b"}, cwd="/tmp") as process:
        for word in ("one", "two"):
            process.write(f"{word}\n")
            assert process.read_until("\n") == f"got {word}\n".encode()
        process.close_stdin()
        events = list(process)
        assert events[0] == Stderr(b"end\n", 16)
        assert isinstance(events[1], Exit)
        assert (events[1].exit_code, events[1].exec_id) == (7, process.exec_id)
        assert list(process) == []
        result = process.wait()
        assert (result.exit_code, result.stdout, process.wait()) == (7, "", result)


def test_all_is_written_before_anything_is_read(client: SandboxClient, session_id: str) -> None:
    with client.open(session_id, ["cat"]) as process:
        process.write(MUCH)
        process.close_stdin()
        assert process.read() == MUCH
        assert process.wait().exit_code == 0


def test_one_thread_writes_while_another_reads(client: SandboxClient, session_id: str) -> None:
    with client.open(session_id, ["cat"]) as process:

        def write() -> None:
            for at in range(0, len(MUCH), MIB):
                process.write(MUCH[at : at + MIB])
            process.close_stdin()

        writer = threading.Thread(target=write)
        writer.start()
        got = b"".join(event.data for event in process if isinstance(event, Stdout))
        writer.join(PATIENCE)
        assert got == MUCH


def test_writes_of_many_threads_stay_whole(client: SandboxClient, session_id: str) -> None:
    with client.open(session_id, ["cat"]) as process:
        lines = [bytes([65 + number]) * 300_000 + b"\n" for number in range(4)]
        writers = [threading.Thread(target=process.write, args=(line,)) for line in lines]
        for writer in writers:
            writer.start()
        got = sorted(process.read_until(b"\n") for _ in lines)
        for writer in writers:
            writer.join(PATIENCE)
        assert got == lines


def test_what_is_not_read_slows_the_program_down(client: SandboxClient, session_id: str) -> None:
    script = "import os\nfor n in range(64): os.write(1, bytes(1 << 18)); os.write(2, b'%d ' % n)"
    with client.open(session_id, ["python3", "-c", script], stdin=False) as process:
        assert process.read(5) == bytes(5)
        assert [item.status for item in client.execs(session_id) if item.exec_id == process.exec_id]
        rest = process.wait()
        assert len(rest.stdout_bytes) == 16 * MIB - 5
        assert rest.stderr.split() == [str(number) for number in range(64)]


def test_output_that_is_kept_while_writing_is_bounded(
    client: SandboxClient, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST_KEPT", 3 * MIB)
    with client.open(session_id, ["cat"]) as process:
        with pytest.raises(errors.LimitExceeded, match="wait to be read"):
            process.write(MUCH)
        assert process.read(100) == MUCH[:100]  # nothing is lost


def test_leaving_the_block_ends_the_program_and_all_that_it_started(
    client: SandboxClient, session_id: str
) -> None:
    with client.open(session_id, "sleep 287 & yes") as process:
        assert process.read_until(b"y\n")
    assert process.wait().status == "killed"
    eventually(lambda: not {item.comm for item in client.processes(session_id)} & {"sleep", "yes"})
    with pytest.raises(BrokenPipeError):
        process.write("x")
    process.kill()
    process.close()


def test_a_program_that_ended_is_told_to_whoever_goes_on(
    client: SandboxClient, session_id: str
) -> None:
    with client.open(session_id, "printf 'some text'; exit 3") as process:
        with pytest.raises(EOFError, match="nothing like it"):
            process.read_until("nothing like it")
        assert process.read_until("me t") == b"some t"
        assert (process.read(2), process.read(100), process.read(100)) == (b"ex", b"t", b"")
        assert process.wait().exit_code == 3
    with pytest.raises(FileNotFoundError):
        client.open(session_id, ["/no/such/program"])
    with pytest.raises(errors.SessionNotFound):
        client.open("nobody", ["true"])
    with client.open(session_id, ["cat"], stdin=False) as process:
        assert process.read() == b""
        with pytest.raises(ValueError, match="stdin"):
            process.write("x")


def test_signals_and_time_outs_end_a_program(client: SandboxClient, session_id: str) -> None:
    with client.open(session_id, ["sleep", "300"]) as process:
        process.signal(signal.SIGINT)
        assert process.wait().exit_code == 130
        assert str(process.exec_id) in repr(process)
    with client.open(session_id, ["sleep", "300"], 0.5) as process:
        assert process.wait().status == "timed_out"


def test_a_terminal_is_a_shell_that_is_typed_to(client: SandboxClient, session_id: str) -> None:
    env = {"PS1": "ready> ", "TERM": "dumb"}
    with client.terminal(session_id, ["bash", "--norc"], 30, 100, env=env) as shell:
        shell.read_until("ready> ")
        shell.write("stty size; echo $$\n")
        assert shell.read_until("30 100\r\n")
        number = int(shell.read_until("\r\n"))
        shell.read_until("ready> ")
        eventually(lambda: shell.foreground().input_waiting)
        assert shell.foreground().process_group_id == number
        shell.resize(40, 120)
        shell.write("stty size; sh -c 'echo be$((1))gun; exec sleep 300'\n")
        shell.read_until("40 120\r\n")
        shell.read_until("be1gun\r\n")
        shell.signal(signal.SIGINT, foreground=True)
        shell.read_until("ready> ")
        shell.close_stdin()
        assert shell.wait().status == "completed"
    with client.terminal(session_id) as shell:
        shell.write("echo ${BASH:+ba}sh; exit 4\n")
        shell.read_until("bash\r\n")
        assert shell.wait().exit_code == 4


def test_a_gateway_that_goes_away_is_told_and_the_program_ends_with_the_block(
    new_place: NewPlace, runtime: str
) -> None:
    place = new_place()
    session_id = place.json("sandbox", "create", "--runtime", runtime)["session_id"]
    with SandboxClient(place.endpoint) as client:
        with client.open(session_id, ["cat"]) as process:
            process.write("before\n")
            assert process.read_until("\n") == b"before\n"
            place.kill_gateway()
            with pytest.raises(errors.GatewayUnreachable, match=process.exec_id):
                process.read_until("\n")
            place.json("sandbox", "list", session_id)  # starts a gateway
            assert client.get_run(process.run_id).poll().status == "running"
        assert client.get_run(process.run_id).wait().status == "killed"
        with pytest.raises(errors.GatewayUnreachable):
            process.wait()


def test_the_end_of_a_session_ends_whoever_reads_and_writes(
    client: SandboxClient, runtime: str
) -> None:
    session_id = client.create_session(runtime)
    with client.open(session_id, ["cat"]) as process:
        failures: list[str] = []

        def read() -> None:
            try:
                process.read()
            except errors.SandboxDied as error:
                failures.append(str(error))

        reader = threading.Thread(target=read)
        reader.start()
        client.destroy_session(session_id)
        reader.join(PATIENCE)
        assert failures == ["destroyed by its owner"]
        with pytest.raises(errors.SandboxDied):
            process.write("x")


def test_many_may_close_at_once(client: SandboxClient, session_id: str) -> None:
    process = client.open(session_id, ["yes"])
    closers = [threading.Thread(target=process.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(PATIENCE)
    assert process.wait().status == "killed"


def test_a_client_that_dies_takes_its_program_with_it(
    client: SandboxClient, endpoint: str, session_id: str
) -> None:
    other = SandboxClient(endpoint)
    process = other.open(session_id, ["sleep", "283"])
    connection = process._driver._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    connection.close()  # as the end of a process would
    assert client.get_run(process.run_id).wait().status == "killed"


# Stdin of commands that are not talked to.


def numbers() -> Iterator[str | bytes]:
    for number in range(1000):
        yield f"{number}\n" if number % 2 else b"%d\n" % number


def test_everything_that_has_bytes_can_be_stdin(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"bin\xff\0")
    (tmp_path / "text").write_text("tëxt")
    with (tmp_path / "file").open("rb") as binary, (tmp_path / "text").open() as text:
        for stdin, wanted in (
            ("tëxt", "tëxt".encode()),
            (b"\0\xff", b"\0\xff"),
            (bytearray(b"ab"), b"ab"),
            (memoryview(b"cd"), b"cd"),
            (binary, b"bin\xff\0"),
            (text, "tëxt".encode()),
            (io.BytesIO(b"io"), b"io"),
            (["a", b"b"], b"ab"),
            (numbers(), b"".join(b"%d\n" % number for number in range(1000))),
            ("", b""),
        ):
            assert client.exec(session_id, ["cat"], stdin=stdin).stdout_bytes == wanted
    result = client.exec(session_id, ["cat"], stdin=MUCH, output_limit=0)
    assert result.stdout_bytes == MUCH
    assert client.exec(session_id, ["head", "-c", "1"], stdin=MUCH).exit_code == 0


# The asynchronous client.


@pytest.fixture
async def aclient(endpoint: str) -> AsyncGenerator[AsyncSandboxClient]:
    async with asyncio.timeout(PATIENCE), AsyncSandboxClient(endpoint) as client:
        yield client


@pytest.mark.anyio
async def test_tasks_write_and_read_at_once(aclient: AsyncSandboxClient, session_id: str) -> None:
    async with await aclient.open(session_id, ["cat"]) as process:

        async def write() -> None:
            for at in range(0, len(MUCH), MIB):
                await process.write(MUCH[at : at + MIB])
            await process.close_stdin()

        writing = asyncio.create_task(write())
        got = [event.data async for event in process if isinstance(event, Stdout)]
        await writing
        assert b"".join(got) == MUCH
        assert (await process.wait()).exit_code == 0


@pytest.mark.anyio
async def test_one_task_writes_all_and_then_reads_all(
    aclient: AsyncSandboxClient, session_id: str
) -> None:
    async with await aclient.open(session_id, ["cat"]) as process:
        await process.write(MUCH)
        await process.close_stdin()
        assert await process.read() == MUCH


@pytest.mark.anyio
async def test_a_cancelled_read_loses_nothing(aclient: AsyncSandboxClient, session_id: str) -> None:
    async with await aclient.open(session_id, ["cat"]) as process:
        for number in range(20):
            waiting = asyncio.create_task(process.read_until(b"never"))
            await process.write(f"line {number}\n")
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        got = [await process.read_until(b"\n") for _ in range(20)]
        assert got == [f"line {number}\n".encode() for number in range(20)]


@pytest.mark.anyio
async def test_a_cancelled_write_leaves_the_connection_whole(
    aclient: AsyncSandboxClient, session_id: str
) -> None:
    async with await aclient.open(session_id, "cat > /dev/null; echo end; exit 5") as process:
        for _ in range(5):
            writing = asyncio.create_task(process.write(MUCH))
            await asyncio.sleep(0.01)
            writing.cancel()
            await asyncio.wait({writing})
        await process.close_stdin()
        assert await process.read() == b"end\n"
        assert (await process.wait()).exit_code == 5


@pytest.mark.anyio
async def test_a_cancelled_block_ends_its_program(
    aclient: AsyncSandboxClient, session_id: str
) -> None:
    begun = asyncio.Event()

    async def hold() -> None:
        async with await aclient.open(session_id, ["sleep", "277"]) as process:
            names.append(process.run_id)
            begun.set()
            await process.wait()

    names: list[str] = []
    task = asyncio.create_task(hold())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await aclient.get_run(names[0]).wait()).status == "killed"


@pytest.mark.anyio
async def test_the_asynchronous_client_has_terminals(
    aclient: AsyncSandboxClient, session_id: str
) -> None:
    async with await aclient.terminal(session_id, rows=33, columns=44) as shell:
        await shell.write("stty size\n")
        await shell.read_until("33 44\r\n")
        await shell.resize(55, 66)
        # A shell that is typed to ignores SIGTERM, so another program has to be there.
        await shell.write("stty size; exec sh -c 'echo be$((1))gun; exec sleep 300'\n")
        await shell.read_until("55 66\r\n")
        await shell.read_until("be1gun\r\n")
        assert (await shell.foreground()).process_group_id > 0
        await shell.signal(signal.SIGTERM)
        assert (await shell.wait()).exit_code == 143
        await shell.kill()


async def words() -> AsyncIterator[str | bytes]:
    for word in ("a", b"b", "c"):
        await asyncio.sleep(0)
        yield word


@pytest.mark.anyio
async def test_asynchronous_iterators_can_be_stdin_too(
    aclient: AsyncSandboxClient, session_id: str
) -> None:
    for stdin in (words(), iter(["a", "bc"]), io.BytesIO(b"abc"), "abc"):
        assert (await aclient.exec(session_id, ["cat"], stdin=stdin)).stdout == "abc"


def test_a_wait_in_another_thread_does_not_hinder_the_end(
    client: SandboxClient, session_id: str
) -> None:
    process = client.open(session_id, ["sleep", "271"])
    results: list[str] = []
    waiting = threading.Thread(target=lambda: results.append(process.wait().status))
    waiting.start()
    began = time.monotonic()
    process.close()
    waiting.join(PATIENCE)
    assert results == ["killed"]
    assert time.monotonic() - began < PATIENCE
