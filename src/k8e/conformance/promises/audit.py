"""The audit trail: everything that happened, in order, and no secret."""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
from pathlib import Path
from typing import Any

import grpc

from k8e._generated import sandbox_pb2 as pb
from k8e.conformance.behaviour import equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room
from k8e.conformance.promises import callers

_STATE = (".db", ".db-wal", ".json", ".jsonl", ".log", ".toml", ".yaml")


@in_a_room("control.no-plain-text")
def no_plain_text(room: Room) -> None:
    """The gateway's port speaks TLS only; keys are kept as hashes, and are in no log or record."""
    place = room.scene.place
    place.wait_for_grpc()
    asked = pb.ListSessionsRequest()
    with grpc.insecure_channel(place.environ["K8E_LISTEN"]) as channel:
        equal(
            callers.call_status(channel, "ListSessions", asked, "x"), "UNAVAILABLE", "without TLS"
        )
    with callers.open_channel(room) as there, callers.new_key(room) as key:
        # A call that is allowed, one that is refused, and one with a mistake.
        equal(callers.call_status(there, "ListSessions", asked, key), "OK", "the key")
        callers.call_status(there, "VerifyAudit", pb.VerifyAuditRequest(), key)
        callers.call_status(there, "ListSessions", asked, key[:-1])
        files = [path for path in place.folder.rglob("*") if _is_state(path)]
        expect({".db", ".jsonl", ".log"} <= {path.suffix for path in files}, f"only {files}")
        secret = key.encode()[8:-8]  # also where its ends were cut off
        found = [
            str(file.relative_to(place.folder)) for file in files if secret in file.read_bytes()
        ]
        equal(found, [], "files that have the key itself")


def _is_state(path: Path) -> bool:
    return path.is_file() and path.suffix in _STATE


@in_a_room("control.events")
def events(room: Room) -> None:
    """What happened in a session is recorded in order, survives a crash, and holds no secret."""
    client, word = room.scene.client, f"word-{secrets.token_hex(8)}"
    client.exec(room.session_id, ["true"], env={"TOKEN": word})
    before = [_plain(item) for item in client.events(room.session_id)]
    expect(before, "nothing was recorded")
    room.scene.place.kill_gateway()
    room.scene.restart()
    after = [_plain(item) for item in room.scene.client.events(room.session_id)]
    equal(after[: len(before)], before, "what was recorded before the crash")
    expect(word not in json.dumps(after), "a variable's value is in the record")
    database = room.scene.place.data / "sessions.db"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        dump = "\n".join(connection.iterdump())
    expect(word not in dump, "a variable's value is in the database")


def _plain(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__match_args__}


@in_a_room("control.audit")
def audit(room: Room) -> None:
    """The audit trail has who did what, in order, without secrets; a crash takes nothing away."""
    word = f"word-{secrets.token_hex(8)}"
    _leave_rows(room, word)
    place, client = room.scene.place, room.scene.client
    before = client.audit(session_id=room.session_id, limit=1000)
    head = client.verify_audit()
    place.kill_gateway()
    room.scene.restart()
    client = room.scene.client
    told = client.verify_audit(head["head"])
    equal((told["ok"], told["problems"]), (True, []), "the trail after a crash")
    expect(told["rows"] > head["rows"], "the new gateway wrote nothing down")
    after = client.audit(session_id=room.session_id, limit=1000)
    equal(after[: len(before)], before, "rows from before the crash")
    rows = [json.loads(line) for line in _lines(place.data)]
    numbers = [row["seq"] for row in rows]
    equal(numbers, list(range(numbers[0], numbers[0] + len(rows))), "numbers of the rows")
    actions = [row.action for row in after]
    wanted = ["exec.started", "exec.finished", "file.written", "exec.started", "exec.finished"]
    equal(actions[-len(wanted) - 1 : -1], wanted, "what was done, in order")
    equal((actions[-1], after[-1].outcome), ("call.refused", "denied"), "what a stranger tried")
    text = "\n".join(_lines(place.data))
    expect(word not in text, "code, a variable, a file's content or input is in the trail")
    code = next(row.detail for row in reversed(after) if row.detail.get("language") == "python")
    expect({"sha256", "size"} <= set(code), f"of code there is {sorted(code)}")


def _leave_rows(room: Room, word: str) -> None:
    """Actions that the trail must have: code, a file, a command, and a stranger's attempt."""
    client, session_id = room.scene.client, room.session_id
    client.run(f"print({word!r})", "python", session_id=session_id)
    client.write_file(session_id, "kept", word)
    client.exec(session_id, ["cat"], stdin=word.encode(), env={"TOKEN": word})
    with callers.open_channel(room) as there, callers.new_key(room) as key:
        asked = pb.ReadFileRequest(session_id=session_id, path=word)
        equal(callers.call_status(there, "ReadFile", asked, key), "NOT_FOUND", "another one's file")


def _lines(data: Path) -> list[str]:
    """All rows, from their files."""
    files = sorted((data / "audit").glob("*.jsonl"))
    return [line for file in files for line in file.read_text("utf-8").splitlines()]
