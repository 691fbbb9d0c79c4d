"""Exposed ports on the command line."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.gateway.exposed import PATIENCE
from tests.places import NewPlace, Place, eventually

PORT = "8400"


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.read()


def services(place: Place, *arguments: str) -> list[dict[str, Any]]:
    return place.json("sandbox", "exposed", *arguments)["services"]


def test_a_server_is_exposed_listed_and_unexposed(place: Place, session_id: str) -> None:
    told = place.json("sandbox", "expose", PORT, "--session-id", session_id)
    assert set(told) == {"port", "session_id", "url"}
    assert (told["port"], told["session_id"]) == (int(PORT), session_id)
    server = f"echo hello > page; exec python3 -m http.server {PORT} --bind 127.0.0.1"
    run = place.json("sandbox", "run", "--background", "--session-id", session_id, server)
    page = told["url"].replace("/?", "/page?")

    def served() -> bytes:
        try:
            return fetch(page)
        except urllib.error.HTTPError:  # nothing listens yet
            return b""

    assert eventually(served, PATIENCE) == b"hello\n"
    (found,) = services(place, "--session-id", session_id)
    assert abs(found.pop("started_at") - time.time()) < 300
    assert found == {
        "host": "127.0.0.1",
        "port": int(PORT),
        "session_id": session_id,
        "url": told["url"],
    }
    assert (
        place.json("sandbox", "expose", "--port", PORT, K8E_SANDBOX_SESSION_ID=session_id) == told
    )
    ended = place.json("sandbox", "unexpose", PORT, "--session-id", session_id)
    assert ended == {"ok": True, "port": int(PORT), "session_id": session_id}
    assert services(place, "--session-id", session_id) == []
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetch(page)
    place.json("sandbox", "kill", run["run_id"])


def test_without_a_session_the_standing_one_is_used_and_made(new_place: NewPlace) -> None:
    place = new_place(K8E_RUNTIME="container")
    missing = place.error("sandbox", "unexpose", PORT)
    assert "no standing session" in missing
    told = place.json("sandbox", "expose", PORT)
    assert place.json("sandbox", "status")["session_id"] == told["session_id"]
    assert place.json("sandbox", "run", "true")["session_id"] == told["session_id"]
    other = place.json("sandbox", "expose", PORT, "--tenant", "other")
    assert other["session_id"] != told["session_id"]
    assert [item["url"] for item in services(place)] == [told["url"], other["url"]]
    place.json("sandbox", "unexpose", PORT, "--tenant", "other")
    assert [item["url"] for item in services(place)] == [told["url"]]


def test_mistakes_are_explained(place: Place, session_id: str) -> None:
    where = ("--session-id", session_id)
    assert "not exposed" in place.error("sandbox", "unexpose", "1", *where)
    assert "no port is named" in place.error("sandbox", "expose", *where)
    assert "two ports" in place.error("sandbox", "expose", "80", "--port", "81", *where)
    assert "1 to 65535" in place.error("sandbox", "expose", "0", *where)
    assert "invalid int" in place.error("sandbox", "expose", "http", *where)
    assert "loopback" in place.error("sandbox", "expose", "80", "--host", "10.0.0.1", *where)
    assert "not found" in place.error("sandbox", "expose", "80", "--session-id", "nobody-s")
    assert "not found" in place.error("sandbox", "exposed", "--session-id", "nobody-s")


def test_the_url_is_printed_so_that_a_browser_understands_it(place: Place, session_id: str) -> None:
    done = place.cli("sandbox", "expose", PORT, "--session-id", session_id)
    assert b"\\u0026" not in done.stdout, "one parameter, so no ampersand to be escaped"
    assert json.loads(done.stdout)["url"].encode() in done.stdout
    place.json("sandbox", "unexpose", PORT, "--session-id", session_id)
