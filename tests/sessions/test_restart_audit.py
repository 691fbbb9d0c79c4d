"""A gateway is killed, and its audit trail has everything that anybody was told."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.sessions.gateways import Client, Gateways, eventually

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(120),
]


def rows(client: Client, session_id: str) -> list[dict[str, Any]]:
    told = client.call("audit", session_id=session_id, limit=5000)
    return [json.loads(line) for line in told["rows"]]


def test_nothing_that_was_answered_is_lost_when_the_gateway_is_killed(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime)
    answered = 0
    for number in range(4):
        for _ in range(5):
            assert client.shell(session_id, f"echo {number}") == f"{number}\n"
            answered += 1
        client = gateways.restart()  # killed right after its last answer

        def complete(client: Client = client, answered: int = answered) -> bool:
            # By id: what was noted in one place only when the gateway died is noted again.
            found = {
                (row["action"], row["detail"].get("exec_id")) for row in rows(client, session_id)
            }
            began, ended = (
                {i for a, i in found if a == f"exec.{w}"} for w in ("started", "finished")
            )
            assert len(began) == answered
            return began == ended

        eventually(complete, "the end of the last run, which its guest tells")
    client.call("destroy_session", session_id=session_id)
    gateways.kill()
    client = gateways.start()
    assert rows(client, session_id)[-1]["action"] == "session.ended"
    told = client.call("verify_audit")
    assert (told["ok"], told["problems"]) == (True, [])


def test_a_run_that_ends_without_a_gateway_has_its_end_written_down(
    gateways: Gateways, client: Client
) -> None:
    session_id = client.create(runtime="container")
    argv = ["/bin/sh", "-c", "until test -e go; do sleep 0.02; done; exit 6"]
    call = {"op": "exec", "session": {"id": session_id}, "argv": argv, "background": True}
    client.receive(client.open(call))
    client = gateways.restart()
    client.shell(session_id, "touch go")

    def ended() -> dict[str, Any] | None:
        found = [row for row in rows(client, session_id) if row["action"] == "exec.finished"]
        return next((row for row in found if row["detail"].get("exit_code") == 6), None)

    row = eventually(ended, "the end of the run")
    assert (row["principal"], row["via"]) == ("local", "gateway")
    client.call("destroy_session", session_id=session_id)
