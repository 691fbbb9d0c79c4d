"""Whatever is asked wrongly gets one line of JSON that says what is wrong and what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.places import NewPlace, Place

NOWHERE = "sess-aaaaaaaaaaaaaaaaaaaa"


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--session-id", NOWHERE, "true"],
        ["get", NOWHERE],
        ["destroy", NOWHERE],
        ["extend", NOWHERE, "--lifetime", "10"],
        ["egress", NOWHERE],
        ["allow-hosts", NOWHERE, "example.org"],
        ["read", NOWHERE, "x"],
        ["write", NOWHERE, "x"],
        ["list", NOWHERE],
    ],
    ids=lambda command: command[0],
)
def test_an_unknown_session_is_not_found(place: Place, command: list[str]) -> None:
    told = place.error("sandbox", *command)
    assert f"session {NOWHERE} not found" in told
    assert "k8e sandbox sessions" in told


@pytest.mark.parametrize("command", [["create"], ["run", "--tenant", "bad-runtime", "true"]])
def test_an_unknown_runtime_is_named_with_those_that_exist(
    place: Place, command: list[str]
) -> None:
    told = place.error("sandbox", *command, "--runtime", "quantum")
    assert "quantum" in told
    assert "gvisor" in told


def test_a_runtime_that_does_not_work_here_never_falls_back(
    new_place: NewPlace, tmp_path: Path
) -> None:
    # Without tools and without PATH there is no runsc.
    place = new_place(K8E_HOME=str(tmp_path))
    told = place.error("sandbox", "create", "--runtime", "gvisor", PATH="/nonexistent")
    assert "runsc" in told


def test_an_unknown_language_is_named_with_those_that_exist(place: Place) -> None:
    told = place.error("sandbox", "run", "--lang", "cobol", "DISPLAY 'HI'")
    assert "cobol" in told
    assert "python" in told


@pytest.mark.parametrize("code", ["", " \n\t"])
def test_empty_code_is_an_error(place: Place, code: str) -> None:
    assert "code is empty" in place.error("sandbox", "run", code)
    assert "code is empty" in place.error("sandbox", "run", stdin=code.encode())


def test_a_hundred_mebibytes_of_code_are_refused_unsent(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    with file.open("wb") as sparse:
        sparse.truncate(100 << 20)
    told = place.error("sandbox", "run", "--lang", "python", "--file", str(file))
    assert str(8 << 20) in told
    assert "k8e sandbox write" in told


def test_code_twice_is_an_error(place: Place) -> None:
    assert "--file" in place.error("sandbox", "run", "true", "--file", "/dev/null")
    assert "unrecognized" in place.error("sandbox", "run", "true", "false")


def test_stdin_cannot_be_code_and_input(place: Place) -> None:
    assert "stdin" in place.error("sandbox", "run", "-i", stdin=b"true")


def test_a_missing_file_of_code_is_named(place: Place) -> None:
    assert "/nonexistent/x.py" in place.error("sandbox", "run", "--file", "/nonexistent/x.py")


def test_a_secret_that_does_not_exist_is_named(place: Place) -> None:
    told = place.error("sandbox", "create", "--secret", "TOKEN=name:key")
    assert "does not exist" in told
    assert "k8e secret set name key" in told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--timeout", "soon", "true"], "--timeout"),
        (["run", "--timeout", "-1", "true"], "timeout"),
        (["run", "--timeout", "nan", "true"], "timeout"),
        (["run", "--env", "novalue", "true"], "--env"),
        (["run", "--lang"], "--lang"),
        (["run", "--unheard-of", "true"], "--unheard-of"),
        (["run", "--tenant", "../etc", "true"], "tenant"),
        (["create", "--memory", "lots"], "memory"),
        (["create", "--memory", "1"], "memory"),
        (["create", "--session-id", "Not A Label"], "session id"),
        (["create", "--label", "x"], "--label"),
        (["extend", NOWHERE], "--lifetime"),
        (["write", NOWHERE, "x", "--mode", "r"], "--mode"),
        (["no-such-command"], "no-such-command"),
    ],
    ids=[f"case-{number}" for number in range(14)],
)
def test_malformed_arguments_are_named(place: Place, arguments: list[str], expected: str) -> None:
    assert expected in place.error("sandbox", *arguments)


def test_file_errors_say_which_file_and_why(place: Place, session_id: str) -> None:
    assert "No such file" in place.error("sandbox", "read", session_id, "nowhere")
    assert "irectory" in place.error("sandbox", "read", session_id, "/tmp")
    assert "irectory" in place.error("sandbox", "write", session_id, "/tmp", stdin=b"x")
    told = place.error("sandbox", "write", session_id, "/etc/passwd", stdin=b"x")
    assert "denied" in told or "Read-only" in told


def test_a_working_folder_that_is_not_there_is_an_error(place: Place, session_id: str) -> None:
    told = place.error("sandbox", "run", "--session-id", session_id, "--cwd", "/nowhere", "true")
    assert "/nowhere" in told


def test_a_full_disk_fails_the_write_and_keeps_the_session(place: Place, runtime: str) -> None:
    flags = ["--runtime", runtime, "--disk", "8M"]
    session_id = place.json("sandbox", "create", *flags)["session_id"]
    try:
        told = place.error("sandbox", "write", session_id, "big", stdin=b"x" * (16 << 20))
        assert "No space left" in told
        listed = place.json("sandbox", "list", session_id)["files"]
        assert [item["path"] for item in listed if item["path"].endswith("big")] == []
        place.json("sandbox", "write", session_id, "small", stdin=b"fits")
        assert place.cli("sandbox", "read", "--raw", session_id, "small").stdout == b"fits"
    finally:
        place.json("sandbox", "destroy", session_id)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("unix:/nonexistent/gateway.sock", "no gateway listens"),
        ("127.0.0.1:9", "127.0.0.1:9"),
    ],
)
def test_an_unreachable_gateway_exits_with_2(place: Place, endpoint: str, expected: str) -> None:
    for command in (["run", "true"], ["sessions"]):
        told = place.error("sandbox", *command, code=2, K8E_SANDBOX_ENDPOINT=endpoint)
        assert expected in told
    assert expected in place.error("sandbox", "--endpoint", endpoint, "sessions", code=2)


def test_an_endpoint_that_is_none_is_an_error(place: Place) -> None:
    told = place.error("sandbox", "sessions", K8E_SANDBOX_ENDPOINT="host:port")
    assert "'host:port' is not an endpoint" in told


def test_errors_of_raw_runs_keep_stdout_clean(place: Place) -> None:
    done = place.cli("sandbox", "run", "--raw", "--session-id", NOWHERE, "true")
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"not found" in done.stderr


def test_a_socket_of_another_user_is_not_spoken_to(new_place: NewPlace) -> None:
    place = new_place()
    place.run_dir.mkdir(mode=0o777)
    place.run_dir.chmod(0o777)
    nobody = 65534
    script = (
        "import os, socket, sys\n"
        f"os.setgid({nobody}); os.setuid({nobody})\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()\n"
        "print('listening', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", script, str(place.socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={},
    ) as impostor:
        assert impostor.stdin
        assert impostor.stdout
        assert impostor.stdout.readline() == b"listening\n"
        assert f"uid {nobody}" in place.error("sandbox", "run", "true", code=2)
        impostor.stdin.close()
    place.socket.unlink()
