"""Who may do what at the gateway: no token, no call; and nobody sees what is another one's."""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.conformance.behaviours import Broken, equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room

SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
SECONDS = 40.0
WRONG = "k8e-" + "0" * 64
REFUSED = ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED")
"""How somebody is refused: at first, and after many others were, from the same address."""
_WORDS: dict[str, Any] = {
    "command": "true",
    "path": "x",
    "action": "x",
    "context_id": "x",
    "port": 8000,
    "packages": ["x"],
    "hosts": ["none"],
}
"""What calls need besides a session, by the names of their fields."""


@contextlib.contextmanager
def _channel(room: Room) -> Generator[grpc.Channel]:
    place = room.scene.place
    place.wait_for_grpc()
    trusted = (place.data / "tls" / "ca.crt").read_bytes()
    with grpc.secure_channel(
        place.environ["K8E_LISTEN"], grpc.ssl_channel_credentials(trusted)
    ) as channel:
        yield channel


@contextlib.contextmanager
def _key(room: Room, *roles: str) -> Generator[str]:
    """A key of somebody else, with these roles."""
    name = f"somebody-{secrets.token_hex(4)}"
    flags = [word for role in roles for word in ("--role", role)]
    made = room.scene.place.json("sandbox", "api-key", "create", name, *flags)
    try:
        yield made["key"]
    finally:
        room.scene.place.json("sandbox", "api-key", "delete", name)


# One chooses an id; the others choose by one among what is the caller's own.
_NAMES_ONE = ("CreateSession", "ListApprovals", "GetAudit")


def _calls(session_id: str) -> Iterator[tuple[str, Any]]:
    """Every call that takes a session, aimed at this one."""
    for method in SERVICE.methods:
        names = method.input_type.fields_by_name
        if method.client_streaming or method.name in _NAMES_ONE:
            continue
        fields = {key: value for key, value in _WORDS.items() if key in names}
        if "code" in names and "command" not in fields:
            fields["code"] = b"1" if names["code"].type == names["code"].TYPE_BYTES else "1"
        for key in ("session_id", "parent_session_id", "run_id"):
            if key in names:
                fields[key] = f"{session_id}.abc" if key == "run_id" else session_id
                yield method.name, getattr(pb, method.input_type.name)(**fields)
                break


def _status(channel: grpc.Channel, name: str, asked: Any, key: str) -> str:
    """The status of a call; OK if it succeeds."""
    stub = pb_grpc.SandboxServiceStub(channel)
    metadata = (("authorization", f"Bearer {key}"),)
    try:
        answer = getattr(stub, name)(asked, metadata=metadata, timeout=SECONDS)
        if SERVICE.methods_by_name[name].server_streaming:
            list(answer)
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code().name
    return "OK"


@in_a_room("control.other-owner")
def other_owner(room: Room) -> None:
    """Another one's session is not found, in every call that takes one, and in no list."""
    with _channel(room) as channel, _key(room) as key:
        stub = pb_grpc.SandboxServiceStub(channel)
        metadata = (("authorization", f"Bearer {key}"),)
        listed = stub.ListSessions(
            pb.ListSessionsRequest(phase="all"), metadata=metadata, timeout=SECONDS
        )
        equal([it.session_id for it in listed.sessions], [], "sessions that a stranger sees")
        calls = list(_calls(room.session_id))
        expect(len(calls) > 20, f"only {len(calls)} calls are known")
        seen = {name: _status(channel, name, asked, key) for name, asked in calls}
        found = {name: code for name, code in seen.items() if code != "NOT_FOUND"}
        equal({n: c for n, c in found.items() if c != "UNIMPLEMENTED"}, {}, "other answers")
        taking = pb.CreateSessionRequest(session_id=room.session_id, runtime_class=room.runtime)
        equal(_status(channel, "CreateSession", taking, key), "ALREADY_EXISTS", "taking its id")
    expect(room.is_alive(), "the session is gone")


@in_a_room("control.wrong-key")
def wrong_key(room: Room) -> None:
    """A wrong key, or one that was deleted, is refused at once, though the caller is local."""
    asked = pb.ListSessionsRequest()
    with _channel(room) as channel:
        for key in (WRONG, "", "x" * 5000, "k8e-", WRONG[:-1]):
            code = _status(channel, "ListSessions", asked, key)
            expect(code in REFUSED, f"{key[:70]!r} is answered by {code}")
        with _key(room) as key:
            equal(_status(channel, "ListSessions", asked, key), "OK", "a right key")
        expect(_status(channel, "ListSessions", asked, key) in REFUSED, "a deleted key is let in")


@in_a_room("control.no-plain-text")
def no_plain_text(room: Room) -> None:
    """The gateway's port speaks TLS only; keys are kept as hashes, and are in no log."""
    place = room.scene.place
    place.wait_for_grpc()
    with grpc.insecure_channel(place.environ["K8E_LISTEN"]) as channel:
        code = _status(channel, "ListSessions", pb.ListSessionsRequest(), WRONG)
        equal(code, "UNAVAILABLE", "a call without TLS")
    with _key(room) as key:
        for file in [path for path in place.folder.rglob("*") if _is_state(path)]:
            expect(key.encode() not in file.read_bytes(), f"{file.name} has the key itself")


def _is_state(path: Path) -> bool:
    return path.is_file() and path.suffix in (".db", ".log", ".json", ".toml", ".db-wal")


@in_a_room("control.roles")
def roles(room: Room) -> None:
    """An agent's key neither manages the gateway nor decides on approvals, its own included."""
    client = room.scene.client
    asked = client.confirm_action(room.session_id, "delete everything", wait=False)
    decision = pb.ApproveActionRequest(approval_id=asked.approval_id, approved=True)
    with _channel(room) as channel, _key(room, "agent") as key:
        code = _status(channel, "ApproveAction", decision, key)
        expect(code in ("PERMISSION_DENIED", "NOT_FOUND"), f"an agent decides: {code}")
    equal(client.get_approval(asked.approval_id).status, "pending", "the approval")
    with _channel(room) as channel, _key(room, "approver") as key:
        equal(_status(channel, "ApproveAction", decision, key), "OK", "an approver's decision")
        asked_run = pb.ExecRequest(session_id=room.session_id, command="true")
        expect(_status(channel, "Exec", asked_run, key) != "OK", "an approver runs programs")


@in_a_room("control.approvals")
def approvals(room: Room) -> None:
    """An approval is for one action of one session, once; the text shown is what was asked."""
    client, action = room.scene.client, "delete \u202e/workspace\x1b[1A"
    asked = client.confirm_action(room.session_id, action, wait=False)
    equal(client.get_approval(asked.approval_id).action, action, "the text that is shown")
    client.approve_action(asked.approval_id)
    with room.beside() as other:
        for session_id, text in ((room.session_id, "anything"), (other.session_id, action)):
            try:
                client.confirm_action(session_id, text, approval_id=asked.approval_id)
            except errors.K8eError:
                continue
            raise Broken(f"a yes to {action!r} was one to {text!r} in {session_id}")
    used = client.confirm_action(room.session_id, action, approval_id=asked.approval_id)
    expect(used.approved, "what was approved is refused")
    try:
        client.confirm_action(room.session_id, action, approval_id=asked.approval_id)
    except errors.Conflict:
        return
    raise Broken("an approval was used twice")


@in_a_room("control.idempotent-create")
def idempotent_create(room: Room) -> None:
    """Creating twice under one request id gives one session only if everything is the same."""
    client, request = room.scene.client, f"once-{secrets.token_hex(6)}"
    first = client.create_session(room.runtime, ["web.test"], request_id=request)
    try:
        again = client.create_session(room.runtime, ["web.test"], request_id=request)
        equal(again, first, "the second session")
        others: list[dict[str, Any]] = [
            {"lifetime": 5.0},
            {"env": {"A": "1"}},
            {"limits": {"memory": "64M"}},
        ]
        for change in others:
            _conflict(room, ["web.test"], request, **change)
        _conflict(room, ["open"], request)
    finally:
        client.destroy_session(first)


def _conflict(room: Room, words: list[str], request: str, **change: Any) -> None:
    try:
        room.scene.client.create_session(room.runtime, words, request_id=request, **change)
    except errors.Conflict:
        return
    raise Broken(f"another session than the one asked for was returned: {words} {change}")


@in_a_room("control.terminal-escapes")
def terminal_escapes(room: Room) -> None:
    """What a sandbox names or says reaches a terminal by no command as an escape sequence."""
    script = (
        "import os\n"
        "for name in ('a\\x1b]0;t\\x07', 'b\\x9b2J', 'c\\u202etxt', 'd\\x7f\\r\\n', 'e\\x85'):\n"
        "    open('/workspace/evil/' + name, 'w').close()"
    )
    client, place = room.scene.client, room.scene.place
    client.exec(room.session_id, ["mkdir", "-p", "/workspace/evil"])
    equal(client.exec(room.session_id, ["python3", "-c", script]).exit_code, 0, "making names")
    run = client.start(room.session_id, ["sh", "-c", "sleep 60 # \x1b[2J \x9b1m \x7f"])
    commands = (
        ("list", room.session_id),
        ("read", room.session_id, "evil/no\x1b[2J\x9b1m"),
        ("ps", room.session_id),
        ("events", room.session_id),
    )
    for command in commands:
        done = place.cli("sandbox", *command)
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        acting = sorted({char for char in text if not char.isprintable()} - set("\n\t"))
        equal(acting, [], f"characters that act on a terminal, by k8e sandbox {command[0]}")
    run.kill()
    client.exec(room.session_id, ["rm", "-rf", "/workspace/evil"])


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
