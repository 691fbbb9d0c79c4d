"""The SDK against a real gateway, over each transport and on each runtime."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k8e import Exit, SandboxClient, Stderr, Stdout, errors, sandbox_session
from tests.places import NewPlace, Place, eventually, wait_readable

MIB = 1 << 20


# Commands.


def test_a_command_gives_output_exit_code_and_facts(client: SandboxClient, session_id: str) -> None:
    found = client.exec(session_id, "echo out; printf 'err\\377' >&2; exit 7")
    assert (found.stdout, found.stderr, found.exit_code) == ("out\n", "err\ufffd", 7)
    assert found.stderr_bytes == b"err\xff"
    assert (found.status, found.truncated, found.session_id) == ("completed", False, session_id)
    assert found.duration_ms >= 0


def test_a_list_is_started_without_a_shell(client: SandboxClient, session_id: str) -> None:
    assert client.exec(session_id, ["echo", "$HOME;", "a  b"]).stdout == "$HOME; a  b\n"


def test_too_many_arguments_are_refused_and_the_client_goes_on(
    client: SandboxClient, session_id: str
) -> None:
    with pytest.raises(errors.LimitExceeded, match="arguments; the limit is"):
        client.exec(session_id, ["true", *["x"] * 70_000])
    many = client.exec(session_id, ["sh", "-c", "echo $#", *["x"] * 60_000])
    assert many.stdout == "59999\n"


def test_a_command_gets_environment_folder_and_input(
    client: SandboxClient, session_id: str
) -> None:
    found = client.exec(session_id, "echo $A; pwd; cat", env={"A": "ä"}, cwd="/tmp", stdin="typed")
    assert found.stdout == "ä\n/tmp\ntyped"


@pytest.mark.parametrize("kind", ["bytes", "file", "iterable"])
def test_input_of_any_kind_and_size_arrives_while_output_flows(
    client: SandboxClient, session_id: str, kind: str
) -> None:
    data = os.urandom(MIB) * 4
    source = {
        "bytes": data,
        "file": io.BytesIO(data),
        "iterable": (data[at : at + 100_000] for at in range(0, len(data), 100_000)),
    }[kind]
    found = client.exec(session_id, ["cat"], stdin=source, output_limit=0)
    assert found.stdout_bytes == data


def test_a_command_that_does_not_read_its_input_ends_all_the_same(
    client: SandboxClient, session_id: str
) -> None:
    assert client.exec(session_id, "exit 3", stdin=b"x" * 4 * MIB).exit_code == 3


def test_a_command_above_its_time_is_killed(client: SandboxClient, session_id: str) -> None:
    found = client.exec(session_id, "echo begun; sleep 60", timeout=0.3)
    assert (found.status, found.stdout) == ("timed_out", "begun\n")


def test_events_come_as_they_happen(client: SandboxClient, session_id: str) -> None:
    go_on = threading.Event()

    def typed() -> Iterator[bytes]:
        yield b"first\n"
        assert go_on.wait(10)
        yield b"second\n"

    # Input and output share one thread, so the first line is echoed only once more input is due.
    events = client.exec_events(session_id, "read a; echo $a; echo no >&2; exit 2", stdin="one\n")
    found = list(events)
    assert isinstance(found[-1], Exit)
    assert found[-1].exit_code == 2
    assert {type(event) for event in found[:-1]} == {Stdout, Stderr}
    assert b"".join(event.data for event in found if isinstance(event, Stdout)) == b"one\n"
    numbers = [event.seq for event in found if not isinstance(event, Exit)]
    assert numbers == sorted(numbers)
    go_on.set()
    assert client.exec(session_id, "cat", stdin=typed()).stdout == "first\nsecond\n"


def test_a_stream_is_text_whose_characters_are_never_torn(
    client: SandboxClient, session_id: str
) -> None:
    command = "printf 'h\\303'; sleep 0.2; printf '\\251llo\\377'; echo hidden >&2"
    pieces = list(client.exec_stream(session_id, command))
    assert "".join(pieces) == "héllo\ufffd"
    assert pieces[0] == "h", "what is complete is not held back"


def test_leaving_a_stream_kills_the_command(client: SandboxClient, session_id: str) -> None:
    for text in client.exec_stream(session_id, "echo begun; exec sleep 60"):
        assert text == "begun\n"
        break

    def killed() -> bool:
        return [item.status for item in client.execs(session_id)][-1] == "killed"

    eventually(killed)


def test_reading_slowly_slows_the_command_and_loses_nothing(
    client: SandboxClient, session_id: str
) -> None:
    size = 0
    pause = threading.Event()
    for event in client.exec_events(session_id, "head -c 6000000 /dev/zero"):
        if isinstance(event, Stdout):
            size += len(event.data)
            pause.wait(0.005)
    assert size == 6_000_000


def test_collected_output_is_bounded(client: SandboxClient, session_id: str) -> None:
    found = client.exec(session_id, "head -c 3000000 /dev/zero", output_limit=100)
    assert (len(found.stdout_bytes), found.truncated, found.exit_code) == (100, True, 0)


def test_the_same_exec_id_is_the_same_command(client: SandboxClient, session_id: str) -> None:
    name = f"once-{time.time_ns()}"
    command = "echo $RANDOM$RANDOM$RANDOM"
    first = client.exec(session_id, ["bash", "-c", command], exec_id=name)
    second = client.exec(session_id, ["bash", "-c", command], exec_id=name)
    assert first.stdout == second.stdout


def test_a_running_command_can_be_killed_from_elsewhere(
    client: SandboxClient, session_id: str
) -> None:
    name = f"kill-{time.time_ns()}"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.exec, session_id, "sleep 60", exec_id=name)
        eventually(lambda: name in {item.exec_id for item in client.execs(session_id)})
        client.kill(session_id, name)
        assert running.result(10).status == "killed"


def test_ctrl_c_in_a_program_kills_its_command(place: Place, session_id: str) -> None:
    name = f"interrupted-{time.time_ns()}"
    script = (
        "from k8e import SandboxClient\n"
        f"SandboxClient({place.endpoint!r}).exec({session_id!r}, 'sleep 60', exec_id={name!r})\n"
    )
    with SandboxClient(place.endpoint) as client:

        def status() -> str:
            found = {item.exec_id: item.status for item in client.execs(session_id)}
            return found.get(name, "")

        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, env=place.environ, stderr=subprocess.DEVNULL) as running:
            eventually(lambda: status() == "running")
            running.send_signal(signal.SIGINT)
            assert running.wait(10) != 0
        eventually(lambda: status() == "killed")


def test_many_threads_share_a_client(client: SandboxClient, session_id: str) -> None:
    with ThreadPoolExecutor(12) as pool:
        commands = [f"echo {n}" for n in range(40)]
        found = pool.map(client.exec, [session_id] * 40, commands)
        assert [result.stdout for result in found] == [f"{n}\n" for n in range(40)]


def test_a_client_can_do_more_than_a_thousand_things(
    client: SandboxClient, session_id: str
) -> None:
    for _ in range(1200):
        client.stat(session_id, "/workspace")


# Files.


def test_a_large_file_is_copied_there_and_back_in_constant_memory(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    import tracemalloc

    source, target = tmp_path / "source", tmp_path / "target"
    data = os.urandom(MIB)
    with source.open("wb") as file:
        for _ in range(100):
            file.write(data)
    tracemalloc.start()
    try:
        assert client.upload(session_id, source, "large").bytes == 100 * MIB
        assert client.download(session_id, "large", target).bytes == 100 * MIB
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
        client.remove(session_id, "large")
    with target.open("rb") as file:
        assert all(file.read(MIB) == data for _ in range(100))
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    "content",
    ["text ü", b"bytes\0\xff", bytearray(b"array"), memoryview(b"view"), b"", [b"a", "b", b"c"]],
    ids=["text", "bytes", "array", "view", "empty", "list"],
)
def test_any_content_can_be_written(
    client: SandboxClient, session_id: str, content: str | bytes | list[str | bytes]
) -> None:
    expected = b"abc" if isinstance(content, list) else content
    expected = expected.encode() if isinstance(expected, str) else bytes(expected)
    assert client.write_file(session_id, "any/content", content) == len(expected)
    assert client.read_bytes(session_id, "any/content") == expected


def test_a_file_can_be_appended_to_and_read_in_part(client: SandboxClient, session_id: str) -> None:
    client.write_file(session_id, "part", "0123")
    client.write_file(session_id, "part", "4567", append=True)
    assert client.read_file(session_id, "part") == "01234567"
    assert client.read_bytes(session_id, "part", offset=2, length=3) == b"234"


def test_files_are_described_listed_renamed_and_removed(
    client: SandboxClient, session_id: str
) -> None:
    client.mkdir(session_id, "tree/deep")
    client.write_file(session_id, "tree/deep/leaf", "x", mode=0o755)
    found = client.stat(session_id, "tree/deep/leaf")
    assert (found.type, found.size, found.mode) == ("file", 1, 0o755)
    assert abs(found.modified - time.time()) < 60
    client.exec(session_id, "ln -s leaf tree/deep/link")
    assert client.stat(session_id, "tree/deep/link").target == "leaf"
    assert client.stat(session_id, "tree/deep/link", follow=True).type == "file"

    client.rename(session_id, "tree/deep/leaf", "tree/moved")
    below = client.list_files(session_id, path="tree")
    assert {entry.path for entry in below} == {"/workspace/tree/moved", "/workspace/tree/deep/link"}
    everything = client.list_files(session_id, path="tree", directories=True, depth=1)
    assert [entry.type for entry in everything] == ["dir", "file"]
    with pytest.raises(OSError, match="not empty"):
        client.remove(session_id, "tree")
    client.remove(session_id, "tree", recursive=True)
    with pytest.raises(FileNotFoundError):
        client.stat(session_id, "tree")


def test_a_long_listing_arrives_whole(client: SandboxClient, session_id: str) -> None:
    client.exec(session_id, "mkdir -p many && cd many && seq 12000 | xargs touch", timeout=60)
    assert len(client.list_files(session_id, path="many")) == 12_000


def test_file_errors_are_python_s_own(client: SandboxClient, session_id: str) -> None:
    with pytest.raises(FileNotFoundError):
        client.read_file(session_id, "nowhere")
    with pytest.raises(IsADirectoryError):
        client.read_file(session_id, "/tmp")
    with pytest.raises(OSError, match=r"denied|Read-only"):
        client.write_file(session_id, "/etc/passwd", "x")
    with pytest.raises(FileExistsError):
        client.mkdir(session_id, "/tmp", exist_ok=False)


def test_a_source_that_fails_leaves_no_file(client: SandboxClient, session_id: str) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x" * MIB
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        client.write_file(session_id, "failing/file", failing())
    eventually(lambda: client.list_files(session_id, path="failing") == [])


def test_a_download_that_fails_leaves_no_file(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        client.download(session_id, "nowhere", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


# Sessions.


def test_a_session_is_made_described_extended_and_destroyed(
    client: SandboxClient, runtime: str
) -> None:
    session_id = client.create_session(
        runtime,
        tenant_id="sdk",
        env={"GREETING": "hello"},
        labels={"a": "b"},
        limits={"memory": "128M", "cpus": 1},
        lifetime=100,
    )
    info = client.get_session(session_id)
    assert (info.tenant_id, info.runtime, info.phase) == ("sdk", runtime, "active")
    assert (info.labels, info.limits["memory"]) == ({"a": "b"}, 128 * MIB)
    assert client.exec(session_id, "echo $GREETING").stdout == "hello\n"
    assert client.extend_session(session_id, 5000).expires_at > info.expires_at
    assert session_id in {item.session_id for item in client.list_sessions("sdk")}
    client.destroy_session(session_id)
    with pytest.raises(errors.SessionNotFound, match="not found"):
        client.exec(session_id, "true")
    assert session_id in {item.session_id for item in client.list_sessions("sdk", ended=True)}


def test_creating_twice_with_one_request_id_is_creating_once(client: SandboxClient) -> None:
    request = f"request-{time.time_ns()}"
    first = client.create_session("container", request_id=request)
    assert client.create_session("container", request_id=request) == first
    with pytest.raises(errors.Conflict):
        client.create_session("container", request_id=request, lifetime=5)
    client.destroy_session(first)


def test_a_session_of_a_with_block_ends_with_it(endpoint: str) -> None:
    with sandbox_session("container", endpoint=endpoint) as (client, session_id):
        assert client.exec(session_id, "echo in").stdout == "in\n"
    with SandboxClient(endpoint) as client:
        assert client.get_session(session_id).phase == "ended"


def test_run_makes_one_session_that_ends_with_the_client(endpoint: str) -> None:
    with SandboxClient(endpoint) as client, SandboxClient(endpoint) as other:
        with ThreadPoolExecutor(4) as pool:
            codes = [f"print({n})" for n in range(4)]
            found = list(pool.map(client.run, codes, ["python"] * 4))
        assert [result.stdout for result in found] == [f"{n}\n" for n in range(4)]
        (session_id,) = {result.session_id for result in found}
        assert other.run("true").session_id != session_id
        client.close()
        assert other.get_session(session_id).phase == "ended"


def test_run_makes_a_new_session_when_its_own_is_gone(client: SandboxClient) -> None:
    first = client.run("echo one").session_id
    client.destroy_session(first)
    second = client.run("echo two")
    assert second.stdout == "two\n"
    assert second.session_id != first


def test_the_session_of_a_tenant_outlives_the_client(endpoint: str, place: Place) -> None:
    tenant = "standing"
    with SandboxClient(endpoint, tenant) as client:
        first = client.run("echo kept > note").session_id
    with SandboxClient(endpoint, tenant_id=tenant) as client:
        found = client.run("cat note")
        assert (found.session_id, found.stdout) == (first, "kept\n")
        assert client.run("true", session_id=first).session_id == first
        client.destroy_session(first)


# Refusals.


def test_bad_input_is_refused_with_a_reason(client: SandboxClient, session_id: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="empty"):
        client.run("", session_id=session_id)
    with pytest.raises(errors.InvalidRequest, match="empty"):
        client.exec(session_id, "")
    with pytest.raises(errors.InvalidRequest, match="argv"):
        client.exec(session_id, [])
    with pytest.raises(errors.InvalidRequest, match="cobol"):
        client.run("x", "cobol", session_id=session_id)
    with pytest.raises(errors.LimitExceeded, match="limit"):
        client.run("x" * (9 * MIB), session_id=session_id)
    with pytest.raises(errors.InvalidRequest, match="empty"):
        client.exec("", "true")
    with pytest.raises(errors.K8eError, match="quantum"):
        client.create_session("quantum")
    with pytest.raises(errors.InvalidRequest, match="memory"):
        client.create_session(limits={"memory": "lots"})
    with pytest.raises(errors.InvalidRequest, match="timeout"):
        client.exec(session_id, "true", timeout=-1)
    with pytest.raises(FileNotFoundError):
        client.exec(session_id, ["/no/such/program"])


def test_a_session_destroyed_during_a_command_says_so(client: SandboxClient, runtime: str) -> None:
    session_id = client.create_session(runtime)
    events = client.exec_events(session_id, "echo begun; sleep 60")
    assert isinstance(next(events), Stdout)
    client.destroy_session(session_id)
    with pytest.raises(errors.SandboxDied, match="destroyed"):
        list(events)


def test_a_gateway_that_dies_during_a_command_is_told_and_nothing_runs_twice(
    new_place: NewPlace,
) -> None:
    place = new_place()
    session_id = place.json("sandbox", "create", "--runtime", "container")["session_id"]
    with SandboxClient(place.endpoint) as client:
        process = os.pidfd_open(client.status()["pid"])
        command = "echo ran >> runs; echo begun; sleep 0.5; echo ended >> runs"
        events = client.exec_events(session_id, command, exec_id="long")
        assert isinstance(next(events), Stdout)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        with pytest.raises(errors.ProgramLost, match=f"long ran in session {session_id}") as lost:
            list(events)
        assert f"get_run('{session_id}.long')" in lost.value.hint
        assert wait_readable(process)
        os.close(process)
        with pytest.raises(errors.NoGateway, match="no gateway listens"):
            client.status()
        place.json("gateway", "--background")
        eventually(lambda: client.read_file(session_id, "runs") == "ran\nended\n")


def test_a_forked_child_has_connections_of_its_own(place: Place, session_id: str) -> None:
    script = (
        "import os\n"
        "from k8e import SandboxClient\n"
        f"client, session = SandboxClient({place.endpoint!r}), {session_id!r}\n"
        "client.exec(session, 'true')\n"
        "child = os.fork()\n"
        "for n in range(30): client.exec(session, f'echo {n}').stdout == f'{n}\\n' or os._exit(1)\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=place.environ, timeout=50, check=False
    )
    assert done.returncode == 0
