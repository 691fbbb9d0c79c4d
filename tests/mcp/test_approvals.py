"""A person decides, in the client's dialog or outside of it, and the agent cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types as types
import pytest

from tests.mcp import connecting
from tests.mcp.conftest import Connect
from tests.mcp.connecting import refused, told
from tests.places import NewPlace, Place

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
ASK = "sandbox_confirm_action"


class Person:
    """Answers the client's dialogs."""

    def __init__(self, action: Any, **content: Any) -> None:
        self.asked: list[str] = []
        self._answer = types.ElicitResult(action=action, content=content or None)

    async def __call__(self, context: Any, params: Any) -> types.ElicitResult:
        self.asked.append(params.message)
        return self._answer


async def session(client: Any) -> dict[str, str]:
    made = told(await client.call_tool("sandbox_create_session"))
    return {"session_id": made["session_id"]}


async def test_dialog_decides_where_approvals_are_advisory(connect: Connect) -> None:
    yes = Person("accept", approve=True, reason="go on")
    async with connect(elicitation_callback=yes) as client:
        action = {"action": "drop the table", **await session(client)}
        found = told(await client.call_tool(ASK, action))
    assert (found["approved"], found["advisory"], found["reason"]) == (True, True, "go on")
    assert yes.asked == ["The agent asks for leave: drop the table"]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Person("accept", approve=False), "rejected"),
        (Person("decline"), "rejected"),
        (Person("cancel"), "pending"),
    ],
    ids=["no", "decline", "cancel"],
)
@pytest.mark.parametrize("way", ["http", "stdio-modern"], indirect=True)
async def test_anything_but_a_yes_is_no_yes(connect: Connect, answer: Person, status: str) -> None:
    async with connect(elicitation_callback=answer) as client:
        found = told(await client.call_tool(ASK, {"action": "x", **await session(client)}))
    assert (found["approved"], found["status"]) == (False, status)


async def test_without_a_dialog_the_command_decides(connect: Connect, place: Place) -> None:
    async with connect() as client:
        action = {"action": "drop", **await session(client)}
        asked = told(await client.call_tool(ASK, action))
        assert (asked["approved"], asked["status"]) == (False, "pending")
        lines = asked["note"].splitlines()
        yes = f"k8e sandbox approve {asked['approval_id']} --endpoint {place.endpoint}"
        assert yes in lines
        assert f"{yes} --reject" in lines
        again = {**action, "approval_id": asked["approval_id"]}
        early = told(await client.call_tool(ASK, {**again, "timeout": 1}))
        assert early["status"] == "pending"
        waiting = asyncio.create_task(client.call_tool(ASK, again))
        await asyncio.to_thread(_approve, place, asked["approval_id"])
        assert told(await waiting)["approved"]
        assert "used already" in refused(await client.call_tool(ASK, again))
        other = {**again, "action": "something else"}
        assert "another session or action" in refused(await client.call_tool(ASK, other))


def _approve(place: Place, approval_id: str, secret: str = "") -> None:
    done = place.cli("sandbox", "approve", approval_id, K8E_APPROVER_SECRET=secret)
    assert done.returncode == 0, (done.stdout, done.stderr)


@pytest.mark.parametrize("way", ["http", "stdio-modern"], indirect=True)
async def test_hosts_need_a_person_and_only_once(connect: Connect, place: Place) -> None:
    async with connect() as client:
        add = {"add": ["api.example.org"], **await session(client)}
        asked = told(await client.call_tool("sandbox_allow_hosts", add))
        assert (asked["approved"], asked["hosts"]) == (False, ["none"])
        await asyncio.to_thread(_approve, place, asked["approval_id"])
        again = {**add, "approval_id": asked["approval_id"]}
        other = {**again, "add": ["evil.example.org"]}
        assert "another" in refused(await client.call_tool("sandbox_allow_hosts", other))
        found = told(await client.call_tool("sandbox_allow_hosts", again))
        assert (found["approved"], found["hosts"]) == (True, ["api.example.org"])
        found = told(await client.call_tool("sandbox_allow_hosts", add))
        assert "approval_id" not in found, "what is allowed already needs nobody"
        take = {"remove": ["api.example.org"], "session_id": add["session_id"]}
        assert told(await client.call_tool("sandbox_allow_hosts", take))["hosts"] == ["none"]


@pytest.mark.parametrize("way", ["http"], indirect=True)
async def test_new_session_is_no_way_around_asking_for_hosts(connect: Connect) -> None:
    async with connect() as client:
        hosts = {"allowed_hosts": ["open"]}
        made = told(await client.call_tool("sandbox_create_session", hosts))
        assert made["allowed_hosts"] == ["none"]
        assert made["approval_id"] in made["note"]


async def test_with_an_approver_no_dialog_can_say_yes(new_place: NewPlace) -> None:
    place = new_place()
    secret = place.json("approver", "init")["secret"]
    yes = Person("accept", approve=True)
    async with connecting.over_stdio(place, elicitation_callback=yes) as client:
        action = {"action": "drop", "timeout": 2}
        found = told(await client.call_tool(ASK, action))
        assert (found["approved"], found["status"]) == (False, "pending")
        assert f"k8e sandbox approve {found['approval_id']}" in yes.asked[0]
        waiting = asyncio.create_task(
            client.call_tool(ASK, {"action": "drop", "approval_id": found["approval_id"]})
        )
        await asyncio.to_thread(_approve, place, found["approval_id"], secret)
        found = told(await waiting)
        assert (found["approved"], found["advisory"]) == (True, False)
    no = Person("decline")
    async with connecting.over_stdio(place, elicitation_callback=no) as client:
        found = told(await client.call_tool(ASK, {"action": "drop"}))
        assert (found["approved"], found["status"]) == (False, "declined")


async def test_hosts_of_the_default_need_nobody_however_they_are_written(
    new_place: NewPlace,
) -> None:
    place = new_place(K8E_ALLOWED_HOSTS="a.example:443,80 *.b.example c.example:443")
    async with connecting.over_stdio(place) as client:
        asked = ["a.example", "x.b.example:8080", "c.example:443,8443"]
        made = told(await client.call_tool("sandbox_create_session", {"allowed_hosts": asked}))
        free = ["a.example:80", "a.example:443", "x.b.example:8080", "c.example:443"]
        assert made["allowed_hosts"] == free
        assert "c.example:8443: that waits for a person" in made["note"]
        asked = ["A.Example.:443", "*.y.b.example"]
        made = told(await client.call_tool("sandbox_create_session", {"allowed_hosts": asked}))
        assert "approval_id" not in made
        add = {"session_id": made["session_id"], "add": ["a.example:443"]}
        found = told(await client.call_tool("sandbox_allow_hosts", add))
        assert (found["approved"], "approval_id" in found) == (True, False)


async def test_what_the_server_was_started_with_needs_nobody(place: Place) -> None:
    flags = ("--allowed-hosts", "a.example,*.b.example")
    async with connecting.over_stdio(place, *flags) as client:
        hosts = {"allowed_hosts": ["a.example", "x.b.example:443"]}
        made = told(await client.call_tool("sandbox_create_session", hosts))
        assert made["allowed_hosts"] == hosts["allowed_hosts"]
        assert "approval_id" not in made
