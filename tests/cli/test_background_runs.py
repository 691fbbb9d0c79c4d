"""``k8e sandbox run --background``, poll, log, kill and ps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.places import Place, eventually


def start(place: Place, session_id: str, *arguments: str, **environ: Any) -> str:
    told = place.json(
        *["sandbox", "run", "--background", "--session-id", session_id, *arguments], **environ
    )
    assert list(told) == ["run_id", "session_id", "status"]
    assert (told["session_id"], told["status"]) == (session_id, "started")
    return told["run_id"]


def test_a_background_run_is_polled_until_it_ends(place: Place, session_id: str) -> None:
    code = "import os; print(os.environ['A']); raise SystemExit(5)"
    run_id = start(place, session_id, "--lang", "python", "--env", "A=b c", code)
    found = eventually(
        lambda: (told := place.json("sandbox", "poll", run_id))["exit_code"] is not None and told
    )
    assert found.pop("duration_ms") >= 0
    assert found == {
        "exit_code": 5,
        "run_id": run_id,
        "session_id": session_id,
        "status": "completed",
        "stderr": "",
        "stdout": "b c\n",
        "truncated": False,
    }


def test_a_log_is_bytes_and_following_it_ends_with_the_exit_code(
    place: Place, session_id: str
) -> None:
    run_id = start(place, session_id, r"printf 'a\377\000b'; printf 'e\200' >&2; sleep 0.3; exit 3")
    done = place.cli("sandbox", "log", "--follow", run_id)
    assert (done.stdout, done.stderr, done.returncode) == (b"a\xff\0b", b"e\x80", 3)
    done = place.cli("sandbox", "log", run_id, "--offset", "2")
    assert (done.stdout, done.returncode) == (b"\0b", 0)


def test_the_log_of_a_session_has_its_foreground_runs_too(place: Place, session_id: str) -> None:
    said = len(place.cli("sandbox", "log", session_id).stdout)
    said += len(place.cli("sandbox", "log", session_id).stderr)
    place.cli("sandbox", "run", "--session-id", session_id, "echo one; echo two >&2")
    run_id = start(place, session_id, "sleep 0.3; echo three; exit 3")
    done = place.cli("sandbox", "log", "--follow", "--offset", str(said), session_id)
    assert (done.stdout, done.stderr, done.returncode) == (b"one\nthree\n", b"two\n", 3)
    assert place.cli("sandbox", "log", run_id).stdout == b"three\n"


def test_a_log_of_a_running_program_ends_where_it_is(place: Place, session_id: str) -> None:
    run_id = start(place, session_id, "echo begun; sleep 300")
    eventually(lambda: place.cli("sandbox", "log", run_id).stdout == b"begun\n")

    def sleeping() -> dict[str, Any] | None:
        listed = place.json("sandbox", "ps", session_id)
        return listed if "sleep" in {item["comm"] for item in listed["processes"]} else None

    listed = eventually(sleeping)  # what the shell says comes before it starts another program
    runs = {item["run_id"]: item for item in listed["runs"]}
    assert (runs[run_id]["status"], runs[run_id]["background"]) == ("running", True)

    assert place.json("sandbox", "kill", run_id) == {"ok": True, "run_id": run_id}
    done = place.cli("sandbox", "log", "-f", run_id)
    assert (done.stdout, done.returncode) == (b"begun\n", 143)


def test_a_signal_of_one_s_choice_can_be_sent(place: Place, session_id: str) -> None:
    code = "trap 'echo caught; exit 8' USR1; echo ready; while :; do sleep 0.05; done"
    run_id = start(place, session_id, code)
    eventually(lambda: place.cli("sandbox", "log", run_id).stdout == b"ready\n")
    place.json("sandbox", "kill", "--signal", "10", run_id)
    done = place.cli("sandbox", "log", "--follow", run_id)
    assert (done.stdout, done.returncode) == (b"ready\ncaught\n", 8)


def test_a_time_out_holds_in_the_background_and_none_is_the_default(
    place: Place, session_id: str
) -> None:
    run_id = start(place, session_id, "--timeout", "0.3", "sleep 300")
    assert place.cli("sandbox", "log", "--follow", run_id).returncode == 143
    assert place.json("sandbox", "poll", run_id)["status"] == "timed_out"


def test_the_standing_session_is_used_and_noted(place: Place, runtime: str) -> None:
    tenant = f"background-{runtime}"
    flags = ["--background", "--tenant", tenant, "--runtime", runtime]
    told = place.json("sandbox", "run", *flags, stdin=b"echo from stdin")
    assert place.cli("sandbox", "log", "-f", told["run_id"]).stdout == b"from stdin\n"
    status = place.json("sandbox", "status", "--tenant", tenant)
    assert status["session_id"] == told["session_id"]
    place.json("sandbox", "destroy", told["session_id"])


def test_over_grpc_it_is_the_same(place: Place, session_id: str) -> None:
    place.wait_for_grpc()
    remote: dict[str, Any] = {
        "K8E_SANDBOX_ENDPOINT": place.environ["K8E_LISTEN"],
        "K8E_SANDBOX_CERT": str(place.data / "tls" / "ca.crt"),
    }
    run_id = start(place, session_id, "echo far; exit 2", **remote)
    done = place.cli("sandbox", "log", "--follow", run_id, **remote)
    assert (done.stdout, done.returncode) == (b"far\n", 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["poll", "nonsense"], "not the id of a run"),
        (["log", "nobody.x"], "not found"),
        (["kill", "nobody.x"], "not found"),
        (["run", "--background", "-i", "true"], "exclude each other"),
        (["run", "--background", "--lang", "cobol", "x"], "unknown language"),
    ],
)
def test_mistakes_are_told(place: Place, arguments: list[str], expected: str) -> None:
    assert expected in place.error("sandbox", *arguments)


def test_a_run_that_is_not_there_is_told_with_what_to_do(place: Place, session_id: str) -> None:
    assert "k8e sandbox ps" in place.error("sandbox", "poll", f"{session_id}.unknown")
