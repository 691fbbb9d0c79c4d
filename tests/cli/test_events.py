"""``k8e sandbox events``: lines for programs, a table for people."""

from __future__ import annotations

import json
import os
import pty
import subprocess

from k8e import Event
from k8e.cli import audit
from tests.places import COMMAND, Place


def test_events_are_lines_of_json(place: Place, runtime: str) -> None:
    session_id = place.json("sandbox", "create", "--runtime", runtime)["session_id"]
    place.json("sandbox", "run", "--session-id", session_id, "echo hello")
    place.json("sandbox", "write", session_id, "<a&b>", stdin=b"x")
    done = place.cli("sandbox", "events", session_id)
    assert (done.returncode, done.stderr) == (0, b"")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [item["kind"] for item in found] == [
        "session.created",
        "exec.started",
        "exec.finished",
        "file.written",
    ]
    assert all(list(item)[:4] == ["at", "seq", "kind", "session_id"] for item in found)
    assert found[-1]["path"] == "<a&b>"
    assert not {b"<", b">", b"&"} & {bytes([char]) for char in done.stdout}, "safe inside HTML"
    done = place.cli("sandbox", "events", session_id, "--limit", "1")
    assert [json.loads(line)["seq"] for line in done.stdout.splitlines()] == [4]
    place.json("sandbox", "destroy", session_id)
    assert b"session.ended" in place.cli("sandbox", "events", session_id).stdout


def test_on_a_terminal_they_are_a_table(place: Place, session_id: str) -> None:
    place.cli("sandbox", "write", session_id, "evil\x1b[2J", stdin=b"x")

    def printed(*flags: str) -> bytes:
        ours, theirs = pty.openpty()
        command = [*COMMAND, "sandbox", "events", session_id, "--limit", "1", *flags]
        subprocess.run(command, env=place.environ, stdout=theirs, timeout=30, check=True)
        os.close(theirs)
        data = os.read(ours, 100_000)
        os.close(ours)
        return data

    shown = printed()
    assert b"older events are not shown" in shown
    assert b"file.written  path=evil\\x1b[2J  size=1" in shown
    assert b"\x1b" not in shown
    assert json.loads(printed("--json"))["kind"] == "file.written"


def test_the_table_spells_out_what_a_terminal_would_act_on() -> None:
    found = [
        Event(0.0, 1, "session.created", "s", {"allowed_hosts": ["a\x1b", "\u202eb"], "x": None}),
        Event(1.0, 2, "x.y", "s", {}),
    ]
    first, second = audit.events_table(found)
    assert first.endswith("""session.created  allowed_hosts=["a\\\\u001b", "\\u202eb"]  x=null""")
    assert second.endswith("  x.y")
    assert list(audit.events_table([])) == []


def test_mistakes_are_told(place: Place, session_id: str) -> None:
    assert "not found" in place.error("sandbox", "events", "nobody-s")
    assert "limit" in place.error("sandbox", "events", session_id, "--limit", "-1")
    assert "limit" in place.error("sandbox", "events", session_id, "--limit", "many")
