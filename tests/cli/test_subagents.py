"""Sub-agents and pauses on the command line."""

from __future__ import annotations

import pytest

from tests.places import NewPlace, Place


@pytest.fixture
def parent(place: Place, runtime: str) -> str:
    return str(place.json("sandbox", "create", "--runtime", runtime)["session_id"])


def test_a_subagent_shares_the_workspace_and_is_shown_with_its_parent(
    place: Place, parent: str
) -> None:
    place.json("sandbox", "write", parent, "file", stdin=b"from the parent")
    told = place.json("sandbox", "subagent", parent)
    child = told["session_id"]
    assert told == {"session_id": child}
    assert child.startswith("sub-")
    assert place.json("sandbox", "read", child, "file")["content"] == "from the parent"
    assert place.json("sandbox", "get", child)["parent_id"] == parent
    assert place.json("sandbox", "get", parent)["parent_id"] == ""
    listed = place.json("sandbox", "sessions")["sessions"]
    assert [item["parent_id"] for item in listed if item["session_id"] == child] == [parent]
    assert "cannot have sub-agents" in place.error("sandbox", "subagent", child)
    assert place.json("sandbox", "destroy", parent) == {"ok": True}
    assert "not found" in place.error("sandbox", "run", "--session-id", child, "true")


def test_a_subagent_can_have_a_type_and_a_folder(place: Place, parent: str) -> None:
    flags = ("--agent-type", "tester", "--workspace-path", "/workspace/tests")
    child = place.json("sandbox", "subagent", *flags, parent)["session_id"]
    assert place.json("sandbox", "get", child)["labels"] == {"agent_type": "tester"}
    assert place.cli("sandbox", "run", "--raw", "--session-id", child, "pwd").stdout == (
        b"/workspace/tests\n"
    )
    told = place.error("sandbox", "subagent", parent, "--workspace-path", "/etc")
    assert "not a folder of the workspace" in told
    place.json("sandbox", "destroy", parent)


def test_subagents_of_nothing_are_not_found(place: Place) -> None:
    assert "session nothing not found" in place.error("sandbox", "subagent", "nothing")


def test_a_session_is_paused_and_resumed(place: Place, parent: str) -> None:
    for _ in range(2):
        assert place.json("sandbox", "pause", parent) == {"ok": True}
    assert place.json("sandbox", "get", parent)["phase"] == "paused"
    told = place.error("sandbox", "run", "--session-id", parent, "true")
    assert told == f"session {parent} is paused | k8e sandbox resume {parent}"
    for _ in range(2):
        assert place.json("sandbox", "resume", parent) == {"ok": True}
    assert place.json("sandbox", "run", "--session-id", parent, "echo hi")["stdout"] == "hi\n"
    place.json("sandbox", "destroy", parent)
    for command in ("pause", "resume"):
        assert "not found" in place.error("sandbox", command, parent)


def test_a_run_without_session_says_that_the_standing_one_is_paused(
    new_place: NewPlace, runtime: str
) -> None:
    place = new_place(K8E_RUNTIME=runtime)
    found = place.json("sandbox", "run", "echo hi")["session_id"]
    place.json("sandbox", "pause", found)
    assert place.json("sandbox", "status")["session_id"] == found
    told = place.error("sandbox", "run", "true")
    assert told == f"session {found} is paused | k8e sandbox resume {found}"
    raw = place.cli("sandbox", "run", "--raw", "true")
    assert (raw.returncode, raw.stdout) == (1, b"")
    assert b"k8e sandbox resume" in raw.stderr
    place.json("sandbox", "resume", found)
    assert place.json("sandbox", "run", "echo hi")["session_id"] == found


def test_the_number_of_subagents_is_a_setting(new_place: NewPlace, runtime: str) -> None:
    place = new_place(K8E_MAX_CHILDREN="2", K8E_RUNTIME=runtime)
    parent = place.json("sandbox", "create")["session_id"]
    for _ in range(2):
        place.json("sandbox", "subagent", parent)
    assert "K8E_MAX_CHILDREN" in place.error("sandbox", "subagent", parent)
