"""``k8e audit``: a table for people, lines for programs, and an exit code for checks."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from typing import Any

import pytest

from k8e import SandboxClient, errors
from k8e.cli import audit
from k8e.client import audit as client_audit
from tests.places import NewPlace, Place

PATIENCE = 30.0


@pytest.fixture
def shop(place: Place) -> Iterator[str]:
    session_id = place.json("sandbox", "create", "--runtime", "container")["session_id"]
    place.cli("sandbox", "run", "--session-id", session_id, "exit 3")
    yield session_id
    place.json("sandbox", "destroy", session_id)


def lines(place: Place, *arguments: str) -> list[dict[str, Any]]:
    done = place.cli("audit", *arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_people_get_a_table_and_programs_get_lines(place: Place, shop: str) -> None:
    done = place.cli("audit", "--session", shop)
    created, started, finished = done.stdout.decode().splitlines()
    assert "session.created" in created
    assert "local (socket, uid 0, pid " in started
    assert "exit_code=3" in finished
    found = lines(place, "--session", shop, "--json")
    assert [row["action"] for row in found] == ["session.created", "exec.started", "exec.finished"]
    assert lines(place, "--session", shop, "--json", "--limit", "1") == found[-1:]
    assert lines(place, "export", "--session", shop, "--action", "exec.*") == found[1:]
    assert lines(place, "--session", shop, "export") == found
    assert lines(place, "--session", shop, "--since", "1h", "--json") == found
    assert lines(place, "--session", shop, "--until", "1h", "--json") == []


def test_only_refusals_can_be_asked_for(place: Place, shop: str) -> None:
    place.error("sandbox", "destroy", "sess-asked-for-once")
    assert lines(place, "--session", shop, "--denied", "--json") == []
    (row,) = lines(place, "--session", "sess-asked-for-once", "--denied", "--json")
    assert row["detail"]["call"] == "destroy_session"
    assert b"DENIED  call.refused" in place.cli("audit", "--session", "sess-asked-for-once").stdout


def test_follow_goes_on_with_rows_as_they_come(place: Place, shop: str) -> None:
    following = place.start("audit", "--session", shop, "--follow", "--json", "--limit", "1")
    assert following.stdout is not None
    try:
        assert b"exec.finished" in _line(following.stdout.fileno())
        place.cli("sandbox", "run", "--session-id", shop, "exit 5")
        assert b"exec.started" in _line(following.stdout.fileno())
    finally:
        following.terminate()
        following.communicate(timeout=PATIENCE)


def _line(fd: int) -> bytes:
    said = b""
    while not said.endswith(b"\n"):
        assert select.select([fd], [], [], PATIENCE)[0], "no row came"
        said += os.read(fd, 1)
    return said


def test_a_trail_that_was_tampered_with_fails_the_check(new_place: NewPlace) -> None:
    place = new_place()
    place.json("sandbox", "api-key", "create", "one")
    told = place.json("audit", "verify")
    assert told["ok"]
    assert place.json("audit", "verify", "--expect", told["head"])["ok"]
    (path,) = (place.data / "audit").glob("*.jsonl")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes().replace(b'"name":"one"', b'"name":"two"'))
    done = place.cli("audit", "verify")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"] == ["row 2 is not what its hash says"]


def test_the_sdk_has_rows_with_names(place: Place, shop: str) -> None:
    with SandboxClient(place.endpoint) as client:
        row = client.audit(session_id=shop, action="exec.finished")[0]
        assert (row.principal, row.owner, row.detail["exit_code"]) == ("local", "local", 3)
        assert client.verify_audit()["ok"]


@pytest.mark.parametrize(
    ("text", "moment"),
    [("", 0), ("90", 90), ("1m", 940), ("2d", 1), ("1970-01-01T00:10+00:00", 600)],
)
def test_times_are_ages_dates_or_numbers(text: str, moment: float) -> None:
    assert audit.moment(text, now=1000) == moment


@pytest.mark.parametrize("text", ["soon", "1x", "1970-13-01", "-5"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        audit.moment(text, now=1000)


def test_nothing_in_a_row_acts_on_the_terminal() -> None:
    row = {
        "seq": 1,
        "at": 0,
        "action": "file.read",
        "outcome": "allowed",
        "via": "key",
        "principal": "key:a",
        "peer": "",
        "session": "\x1b[2J",
        "hash": "",
        "detail": {"path": "\x1b[2J\u202e"},
    }
    (line,) = audit.audit_table(iter([client_audit.parse(json.dumps(row))]))
    assert line.isprintable()
