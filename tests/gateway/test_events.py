"""Whatever is done to a session leaves an event, also where another part of the gateway does it."""

from __future__ import annotations

import pytest

from k8e import SandboxClient
from tests.places import NewPlace


@pytest.mark.timeout(90)
def test_pauses_sub_agents_snapshots_and_ports_are_told(new_place: NewPlace) -> None:
    place = new_place()
    made = place.json("sandbox", "create", "--runtime", "container")["session_id"]
    place.json("sandbox", "pause", made)
    place.json("sandbox", "pause", made)
    place.json("sandbox", "resume", made)
    child = place.json("sandbox", "subagent", made)["session_id"]
    place.json("sandbox", "snapshot", "save", made, "kept")
    place.json("sandbox", "expose", "8000", "--session-id", made)
    place.json("sandbox", "unexpose", "8000", "--session-id", made)
    restored = place.json("sandbox", "snapshot", "restore", "kept", "--runtime", "container")
    with SandboxClient(place.endpoint) as client:
        told = [event for event in client.events(made) if not event.kind.startswith("exec.")]
        of_child = client.events(child)[0]
        of_restored = client.events(restored["session_id"])[0]
    assert [event.kind for event in told] == [
        "session.created",
        "session.paused",
        "session.resumed",
        "subagent.started",
        "snapshot.saved",
        "port.exposed",
        "port.unexposed",
    ]
    assert told[3].fields == {"child_id": child}
    assert told[4].fields["name"] == "kept"
    assert told[5].fields == {"port": 8000, "host": "127.0.0.1"}
    assert of_child.fields["parent_id"] == made
    assert of_restored.fields["snapshot"] == "kept"
