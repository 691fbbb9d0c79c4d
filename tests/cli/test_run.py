"""``k8e sandbox run``: what it prints, and the exit codes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from tests.places import COMMAND, NewPlace, Place, eventually, wait_readable

BINARY = b"\0\xff\xfe nul and invalid \xc3("


def run(place: Place, session_id: str, *arguments: str, stdin: bytes = b"", code: int = 0):
    done = place.cli("sandbox", "run", "--session-id", session_id, *arguments, stdin=stdin)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_a_run_prints_one_line_with_sorted_keys_that_is_safe_in_html(
    place: Place, session_id: str
) -> None:
    done = place.cli("sandbox", "run", "--session-id", session_id, "echo '<a> & b'; echo é >&2")
    assert done.stdout.count(b"\n") == 1
    assert b"\\u003ca\\u003e \\u0026 b" in done.stdout
    found = json.loads(done.stdout)
    assert list(found) == sorted(found)
    duration = found.pop("duration_ms")
    assert isinstance(duration, int)
    assert found == {
        "denials": [],
        "exit_code": 0,
        "language": "bash",
        "session_id": session_id,
        "status": "completed",
        "stderr": "é\n",
        "stdout": "<a> & b\n",
        "truncated": False,
    }


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_exit_code_is_the_command_s_own(place: Place, session_id: str, code: int) -> None:
    assert run(place, session_id, f"exit {code}", code=code)["exit_code"] == code


def test_a_command_that_a_signal_ended_exits_with_128_and_its_number(
    place: Place, session_id: str
) -> None:
    assert run(place, session_id, "kill -9 $$", code=137)["exit_code"] == 137


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("bash", "x='a b'\necho \"$x\" '$x' `echo \\\\`", "a b $x \\\n"),
        ("python", "print('''a\n\"b\" $HOME `id` \\\\''')", 'a\n"b" $HOME `id` \\\n'),
        ("node", 'console.log(`a\n"b" ${1 + 1} \'`)', 'a\n"b" 2 \'\n'),
        ("ts", 'const x: string = `it\'s`;\nconsole.log(x, "$x")', "it's $x\n"),
    ],
)
def test_any_quoting_and_several_lines_arrive_unchanged(
    place: Place, session_id: str, language: str, code: str, expected: str
) -> None:
    assert run(place, session_id, "--lang", language, code)["stdout"] == expected


def test_flags_may_come_before_and_after_the_code(place: Place, session_id: str) -> None:
    arguments = ["--lang=python", "import os; print(os.getcwd(), os.environ['A'])", "--cwd", "/tmp"]
    assert run(place, session_id, *arguments, "--env", "A=b=c")["stdout"] == "/tmp b=c\n"


@pytest.mark.parametrize("arguments", [["-"], []])
def test_code_comes_from_stdin(place: Place, session_id: str, arguments: list[str]) -> None:
    assert run(place, session_id, *arguments, stdin=b"echo from stdin")["stdout"] == "from stdin\n"


def test_code_comes_from_a_file(place: Place, session_id: str, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("print('from a file')")
    found = run(place, session_id, "--lang", "python", "--file", str(file))
    assert found["stdout"] == "from a file\n"


def test_code_that_begins_with_a_hyphen_follows_two_of_them(place: Place, session_id: str) -> None:
    found = run(place, session_id, "--lang", "python", "--", "-1; print('negative')")
    assert found["stdout"] == "negative\n"


def test_stdin_is_empty_unless_it_is_passed_on(place: Place, session_id: str) -> None:
    assert run(place, session_id, "wc -c", stdin=b"12345")["stdout"] == "0\n"
    assert run(place, session_id, "-i", "wc -c", stdin=b"12345")["stdout"] == "5\n"


def test_more_stdin_than_the_window_arrives_whole(place: Place, session_id: str) -> None:
    size = 5_000_000
    found = run(place, session_id, "--stdin", "sleep 0.2; wc -c", stdin=b"x" * size)
    assert found["stdout"] == f"{size}\n"


def test_bytes_that_are_not_text_are_replaced_in_json_and_kept_in_raw(
    place: Place, session_id: str
) -> None:
    code = f"import sys; sys.stdout.buffer.write({BINARY!r}); sys.stderr.buffer.write({BINARY!r})"
    found = run(place, session_id, "--lang", "python", code)
    assert found["stdout"] == found["stderr"] == BINARY.decode("utf-8", "replace")
    done = place.cli(
        "sandbox", "run", "--session-id", session_id, "--lang", "python", "--raw", code
    )
    assert done.stdout == done.stderr == BINARY


def test_raw_output_comes_while_the_command_runs(place: Place, session_id: str) -> None:
    code = "echo first; read line; echo second >&2; exit 5"
    flags = ["sandbox", "run", "--session-id", session_id, "--raw", "--stdin"]
    with place.start(*flags, code) as running:
        assert running.stdin
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline() == b"first\n"
        running.stdin.write(b"go on\n")
        running.stdin.close()
        assert running.stderr.read() == b"second\n"
        assert running.wait(10) == 5


def test_output_above_the_limit_is_cut_and_said_to_be(place: Place, session_id: str) -> None:
    found = run(place, session_id, "head -c 2000000 /dev/zero | tr '\\0' x; echo end >&2")
    assert found["truncated"] is True
    assert found["stdout"] == "x" * (1 << 20)
    assert found["stderr"] == "end\n"


@pytest.mark.slow
def test_much_output_leaves_memory_flat(place: Place, session_id: str, runtime: str) -> None:
    size = (256 << 20) if runtime == "container" else (128 << 20)  # gVisor's pipes are slow
    code = f"head -c {size} /dev/zero"
    flags = ["sandbox", "run", "--session-id", session_id, "--timeout", "50", code]
    gateway = place.pid()
    before = _resident(gateway)
    # The kernel holds the command to 100 MiB of address space, Python's own included.
    done = subprocess.run(
        ["bash", "-c", 'ulimit -v 102400; exec "$@"', "-", *COMMAND, *flags],
        env=place.environ,
        capture_output=True,
        timeout=55,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["truncated"] is True
    assert len(found["stdout"]) == 1 << 20
    assert _resident(gateway) - before < 20 << 10, "KiB"


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def test_a_command_above_its_time_is_killed_though_it_ignores_sigterm(
    place: Place, session_id: str
) -> None:
    found = run(
        place,
        session_id,
        "--timeout",
        "0.5",
        "trap '' TERM; echo begun; while :; do sleep 1; done",
        code=137,
    )
    assert found["status"] == "timed_out"
    assert found["stdout"] == "begun\n"


def test_a_command_that_leaves_a_daemon_ends_with_its_own_end(
    place: Place, session_id: str
) -> None:
    found = run(place, session_id, "sleep 30 & echo started; exit 4", code=4)
    assert found["stdout"] == "started\n"


def test_ctrl_c_kills_the_command_and_exits_with_130(place: Place, session_id: str) -> None:
    mark = "777.25"
    code = f"echo begun; exec sleep {mark}"
    flags = ["sandbox", "run", "--session-id", session_id, "--raw", "--timeout", "0"]
    with place.start(*flags, code) as running:
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline() == b"begun\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(10) == 130
        assert running.stderr.read() == b"", "no traceback"

    def gone() -> bool:
        return (
            run(place, session_id, f"pgrep -f '^sleep {mark}' || echo none")["stdout"] == "none\n"
        )

    eventually(gone)


def test_a_closed_pipe_ends_the_run_quietly(place: Place, session_id: str) -> None:
    flags = ["sandbox", "run", "--session-id", session_id, "--raw", "--timeout", "0", "yes"]
    with place.start(*flags) as running:
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline() == b"y\n"
        running.stdout.close()
        assert running.wait(10) == 141
        assert running.stderr.read() == b""


def test_two_mebibytes_of_code_run(place: Place, session_id: str) -> None:
    code = b"x = '''" + b"a" * (2 << 20) + b"'''\nprint(len(x))"
    assert run(place, session_id, "--lang", "python", stdin=code)["stdout"] == "2097152\n"


def test_a_session_s_files_are_there_in_the_next_run(place: Place, session_id: str) -> None:
    run(place, session_id, "echo kept > note")
    assert run(place, session_id, "cat note")["stdout"] == "kept\n"


def test_a_run_without_a_session_uses_the_tenant_s_own_and_writes_it_down(place: Place) -> None:
    first = place.json("sandbox", "run", "--tenant", "t1", "--runtime", "container", "true")
    second = place.json("sandbox", "run", "true", K8E_SANDBOX_TENANT="t1")
    assert first["session_id"] == second["session_id"]
    file = place.home / ".k8e" / "sandbox" / "t1" / "state.json"
    state = json.loads(file.read_text())
    assert state["session_id"] == first["session_id"]
    assert state["tenant_id"] == "t1"
    assert state["phase"] == "active"
    assert state["created_at"].endswith("Z")
    assert file.parent.stat().st_mode & 0o777 == 0o700

    place.json("sandbox", "destroy", first["session_id"])
    assert not file.exists()
    third = place.json("sandbox", "run", "--tenant=t1", "--runtime=container", "true")
    assert third["session_id"] != first["session_id"], "a destroyed session is replaced"
    assert json.loads(file.read_text())["session_id"] == third["session_id"]


def test_no_code_at_a_terminal_is_an_error(place: Place) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "sandbox", "run"],
        env=place.environ,
        stdin=theirs,
        capture_output=True,
        timeout=10,
        check=False,
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 1
    assert "no code" in json.loads(done.stdout)["error"]


def test_the_remote_endpoint_runs_with_the_same_result(place: Place, session_id: str) -> None:
    place.wait_for_grpc()
    found = place.cli(
        "sandbox",
        "run",
        "--session-id",
        session_id,
        "cat; exit 6",
        "-i",
        stdin=b"over gRPC",
        K8E_SANDBOX_ENDPOINT=place.environ["K8E_LISTEN"],
        K8E_SANDBOX_CERT=str(place.data / "tls" / "ca.crt"),
    )
    assert found.returncode == 6, found.stdout
    assert json.loads(found.stdout)["stdout"] == "over gRPC"


def test_a_gateway_that_dies_during_a_run_is_named_with_session_and_command(
    new_place: NewPlace,
) -> None:
    place = new_place()
    flags = ["sandbox", "run", "--runtime", "container", "--raw", "--timeout", "60"]
    code = "echo begun; sleep 0.5; echo survived > /workspace/note; sleep 30"
    with place.start(*flags, code) as running:
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline() == b"begun\n"
        session_id = place.json("sandbox", "sessions")["sessions"][0]["session_id"]
        place.kill_gateway()
        assert running.wait(10) == 2
        told = json.loads(running.stderr.read())
    assert session_id in told["error"]
    assert "goes on" in told["detail"]

    def survived() -> bool:
        done = place.cli("sandbox", "read", "--raw", session_id, "note")
        return done.stdout == b"survived\n"

    eventually(survived)
    found = place.json("sandbox", "run", "echo on")
    assert (found["session_id"], found["stdout"]) == (session_id, "on\n")


def test_wait_readable_tells_the_end_of_a_process() -> None:
    with subprocess.Popen(["true"]) as process:
        assert wait_readable(os.pidfd_open(process.pid))
