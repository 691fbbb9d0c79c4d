"""Where errors are printed: for programs, for people, and where nobody reads any more."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from typing import IO, Any

import pytest

from k8e.cli import gateway, parser
from tests.places import COMMAND, PATIENCE, Place

NOWHERE = "sess-aaaaaaaaaaaaaaaaaaaa"
CLOSED_PIPE = 141


def run(
    place: Place, *arguments: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=place.environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        timeout=PATIENCE,
        check=False,
    )


def closed_pipe() -> IO[bytes]:
    """The end of a pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "wb")


def test_an_error_reaches_a_person_whose_shell_keeps_stdout(place: Place) -> None:
    line = 'id=$("$@"); code=$?; printf %s "$id"; exit $code'
    command = ["sh", "-c", line, "sh", *COMMAND, "sandbox", "create", "--runtime", "quantum"]
    done = subprocess.run(
        command, env=place.environ, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    assert "quantum" in json.loads(done.stdout)["error"]
    error, hint = done.stderr.decode().splitlines()
    assert error.startswith("k8e: error: ")
    assert "quantum" in error
    assert "gvisor" in hint


def test_an_error_is_told_once_where_both_streams_are_one(place: Place) -> None:
    done = run(place, "sandbox", "get", NOWHERE, stderr=subprocess.STDOUT)
    assert set(json.loads(done.stdout)) == {"detail", "error"}


def test_what_an_error_quotes_does_not_act_on_a_terminal(place: Place) -> None:
    done = run(place, "sandbox", "get", "a\x1b[2J\nk8e: error: b")
    assert len(done.stderr.splitlines()) == 2
    assert b"\x1b" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["write", NOWHERE, "x"],
        ["write"],
        ["destroy", NOWHERE],
        ["destroy"],
        ["approve", "approval-nobody-asked"],
        ["approve", "--no-such-flag", "x"],
        ["kill", f"{NOWHERE}.abc"],
        ["pause", NOWHERE],
        ["snapshot", "delete", "no-such-snapshot"],
    ],
    ids=" ".join,
)
def test_a_command_that_answers_ok_says_that_it_is_not(place: Place, command: list[str]) -> None:
    done = run(place, "sandbox", *command)
    told = json.loads(done.stdout)
    assert (done.returncode, set(told), told["ok"]) == (1, {"detail", "error", "ok"}, False)


@pytest.mark.parametrize(
    "command",
    [
        ["read", "--raw", NOWHERE, "x"],
        ["read", NOWHERE, "--raw"],
        ["run", "--raw", "--session-id", NOWHERE, "true"],
        ["run", "--raw", "--file", "/no/such/file"],
        ["run", "--raw", "--lang", "cobol", "true"],
        ["run", "--raw", "--background", "true"],
        ["run", "--raw", "--context", "c", "--session-id", NOWHERE, "true"],
        ["run", "--raw", "--no-such-flag", "true"],
    ],
    ids=" ".join,
)
def test_raw_output_has_no_error_in_it(place: Place, command: list[str]) -> None:
    done = run(place, "sandbox", *command)
    assert (done.returncode, done.stdout) == (1, b"")
    assert set(json.loads(done.stderr)) == {"detail", "error"}


def test_a_missing_file_read_raw_is_an_error_on_stderr(place: Place, session_id: str) -> None:
    done = run(place, "sandbox", "read", "--raw", session_id, "no-such-file")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "No such file" in json.loads(done.stderr)["error"]


SAYING = [
    ["sandbox", "get", NOWHERE],
    ["sandbox", "sessions"],
    ["sandbox", "status"],
    ["sandbox", "run", "echo hello"],
    ["sandbox", "run", "--raw", "echo hello"],
    ["sandbox", "run", "--lang", "cobol", "x"],
    ["sandbox", "run", "--context", "pipes", "--lang", "python", "1 + 1"],
    ["sandbox", "read", "--raw", NOWHERE, "x"],
    ["sandbox", "approve", "approval-nobody-asked"],
    ["sandbox", "no-such-command"],
    ["sandbox", "catalog"],
    ["sandbox", "--help"],
    ["sandbox", "events"],
    ["sandbox-install-skill", "nobody"],
    ["audit", "list"],
    ["completion", "bash"],
    ["gateway", "metrics"],
    ["template", "list"],
    ["doctor"],
    ["status"],
    ["version"],
    ["--help"],
    [],
]


@pytest.mark.parametrize("command", SAYING, ids=" ".join)
def test_a_reader_who_leaves_gets_no_traceback(place: Place, command: list[str]) -> None:
    with closed_pipe() as nobody:
        done = run(place, *command, stdout=nobody)
    assert done.returncode in (1, CLOSED_PIPE), done
    for word in (b"Traceback", b"Exception", b"Broken"):
        assert word not in done.stderr
    if done.returncode == CLOSED_PIPE:
        assert done.stderr == b""
    else:
        assert done.stderr.startswith((b"k8e: error: ", b"{"))


@pytest.mark.parametrize("command", [SAYING[0], SAYING[1], SAYING[3]], ids=" ".join)
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", ">/dev/full"])
def test_closed_and_full_streams_give_no_traceback(
    place: Place, command: list[str], closed: str
) -> None:
    line = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, *command]
    done = subprocess.run(
        line, env=place.environ, capture_output=True, timeout=PATIENCE, check=False
    )
    assert b"Traceback" not in done.stderr + done.stdout
    assert b"Exception" not in done.stderr
    if command == SAYING[0]:
        assert done.returncode == 1
        if "2>" not in closed:
            assert b"not found" in done.stderr


def test_a_pipe_that_breaks_in_a_sandbox_is_an_error_and_not_ours(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(gateway, "version", broken)
    assert parser.main(["version"]) == 1
    assert json.loads(capfd.readouterr().out)["error"] == "Broken pipe"
