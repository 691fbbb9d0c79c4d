"""What tests of egress expect, whichever client they use."""

from __future__ import annotations

from k8e import Denial, Egress
from tests.gateway.worlds import NOWHERE


def check_refusal(refused: list[Denial]) -> None:
    (found,) = refused
    assert (found.name, found.address, found.port) == ("", NOWHERE, 443)
    assert (found.protocol, found.count) == ("tcp", 1)
    assert "allow-list" in found.rule


def check_policies(found: Egress, session_id: str) -> None:
    assert found.session_id == session_id
    assert found.allowed_hosts == ["A.example", "*.b.example:443"]
    assert found.rules == ["a.example", "*.b.example:443"]
    assert (found.network, found.reason) == (True, "")
