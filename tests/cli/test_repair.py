"""``k8e gateway repair``, and what commands say before it."""

from __future__ import annotations

from tests.places import NewPlace


def test_a_damaged_database_is_named_and_repaired(new_place: NewPlace) -> None:
    place = new_place()
    place.json("sandbox", "sessions")
    assert "is running already" in place.error("gateway", "repair")
    place.json("gateway", "stop")
    (place.data / "approvals.db").write_bytes(b"nonsense" * 1000)
    told = place.error("sandbox", "sessions", code=2)
    assert "approvals.db is damaged" in told
    assert "k8e gateway repair" in told
    (repaired,) = place.json("gateway", "repair")["repaired"]
    assert (repaired["database"], repaired["rows_saved"]) == ("approvals.db", 0)
    assert place.json("gateway", "repair")["repaired"] == []
    assert place.json("sandbox", "sessions")["sessions"] == []


def test_an_empty_file_of_approvals_does_not_take_the_approver_away(new_place: NewPlace) -> None:
    place = new_place()
    place.json("approver", "init")
    place.json("gateway", "stop")
    for damage in ("empty", "gone"):
        path = place.data / "approvals.db"
        path.write_bytes(b"") if damage == "empty" else path.unlink()
        told = place.error("sandbox", "sessions", code=2)
        assert "approvals.db" in told
        assert "k8e gateway repair" in told
        (repaired,) = place.json("gateway", "repair")["repaired"]
        assert (repaired["database"], repaired["lost"]) == ("approvals.db", "all that was in it")
