"""Who may do what at the gateway: no token, no call; and nobody sees what is another one's."""

from __future__ import annotations

import http.client
import secrets
from typing import Any

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.conformance import calling
from k8e.conformance.behaviours import Broken, equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room
from k8e.gateway import roles as gateway_roles
from k8e.model import Role

WRONG = "k8e-" + "0" * 64
REFUSED = ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED")
"""How somebody is refused: at first, and after many others were, from the same address."""
NO_TOKEN = (401, 429)
"""The same by HTTP."""
_ADMIN = frozenset({Role.ADMIN})


@in_a_room("control.wrong-key")
def wrong_key(room: Room) -> None:
    """A wrong key, or one that was deleted, is refused at once, though the caller is local."""
    asked = pb.ListSessionsRequest()
    with calling.channel(room) as channel:
        for key in (WRONG, "", "x" * 5000, "k8e-", WRONG[:-1]):
            code = calling.status(channel, "ListSessions", asked, key)
            expect(code in REFUSED, f"{key[:70]!r} is answered by {code}")
        with calling.key(room) as key:
            equal(calling.status(channel, "ListSessions", asked, key), "OK", "a right key")
        code = calling.status(channel, "ListSessions", asked, key)
        expect(code in REFUSED, f"a deleted key is answered by {code}")


@in_a_room("control.http")
def http_endpoint(room: Room) -> None:
    """The gateway's HTTP endpoint answers nobody without a token, nor foreign pages and names."""
    address = str(room.scene.place.json("status")["http"])
    host, _, port = address.removeprefix("http://").partition(":")

    def ask(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(host, int(port), timeout=calling.SECONDS)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET", path, headers=given)
            return connection.getresponse().status
        finally:
            connection.close()

    with calling.key(room) as key:
        for path in ("/healthz", "/metrics", "/mcp", "/", "/nothing"):
            expect(ask(path) in NO_TOKEN, f"{path} is answered without a token")
            code = ask(path, Authorization=f"Bearer {WRONG}")
            expect(code in NO_TOKEN, f"{path} with a wrong key is answered by {code}")
        good = {"Authorization": f"Bearer {key}"}
        equal(ask("/healthz", **good), 200, "a right key")
        equal(ask("/metrics", **good), 403, "metrics for an agent")
        equal(ask("/healthz", Host="rebound.example", **good), 421, "a rebound name")
        for name, value in (("Origin", "https://evil.example"), ("Sec-Fetch-Site", "cross-site")):
            equal(ask("/healthz", **{name: value}, **good), 403, f"a page with {name}: {value}")
    expect(ask("/healthz", **good) in NO_TOKEN, "a deleted key is let in")


@in_a_room("control.roles")
def roles(room: Room) -> None:
    """An agent's key neither manages the gateway nor decides on approvals, its own included."""
    client = room.scene.client
    asked = client.confirm_action(room.session_id, "delete everything", wait=False)
    decision = pb.ApproveActionRequest(approval_id=asked.approval_id, approved=True)
    with calling.channel(room) as channel, calling.key(room, "agent") as key:
        code = calling.status(channel, "ApproveAction", decision, key)
        expect(code in ("PERMISSION_DENIED", "NOT_FOUND"), f"an agent decides: {code}")
        _no_management(channel, key)
    equal(client.get_approval(asked.approval_id).status, "pending", "the approval")
    with calling.channel(room) as channel, calling.key(room, "approver") as key:
        equal(calling.status(channel, "ApproveAction", decision, key), "OK", "an approver's word")
        asked_run = pb.ExecRequest(session_id=room.session_id, command="true")
        expect(calling.status(channel, "Exec", asked_run, key) != "OK", "an approver runs programs")
        _no_management(channel, key)
    expect(room.is_alive(), "the gateway or the session is gone")


def _no_management(channel: grpc.Channel, key: str) -> None:
    """Every call and operation that only an admin may use is denied to this key."""
    methods = [name for name, needed in gateway_roles.RPCS.items() if needed == _ADMIN]
    expect(len(methods) >= 3, f"only {methods} are calls of admins")
    for name in methods:
        asked = getattr(pb, calling.SERVICE.methods_by_name[name].input_type.name)()
        equal(calling.status(channel, name, asked, key), "PERMISSION_DENIED", f"{name} by an agent")
    known = gateway_roles.OPERATIONS.items()
    operations = [name for name, needed in known if needed == _ADMIN]
    expect({"create_api_key", "stop", "pull_image"} <= set(operations), f"admins' are {operations}")
    for name in operations:
        code = calling.operation(channel, {"op": name, "name": "x", "roles": ["admin"]}, key)
        equal(code, errors.Denied.code, f"{name} by one who is no admin")


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
