"""Egress in K8E's words: what a session may reach, and what it was refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.rpc_errors import as_text


def hosts(asked: Iterable[str]) -> list[str]:
    """The words of a policy; K8E's CLI makes an empty one of an empty flag."""
    return [word for word in asked if word.strip()]


def egress(told: dict[str, Any]) -> pb.GetEgressResponse:
    return pb.GetEgressResponse(
        session_id=told["session_id"],
        allowed_hosts=told["allowed_hosts"],
        rules=told["rules"],
        network=told["network"],
        reason=told.get("reason", ""),
        denied=told["denied"],
        denials=denials(told["denials"]),
    )


def denials(told: Any) -> list[pb.EgressDenial]:
    """Denials as they stand in an EXIT, which a hostile guest may have had a hand in."""
    try:
        return [
            pb.EgressDenial(
                name=as_text(item["name"]),
                address=as_text(item["address"]),
                port=item["port"],
                protocol=as_text(item["protocol"]),
                rule=as_text(item["rule"]),
                count=item["count"],
                at=int(item.get("at", 0)),
            )
            for item in told or ()
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None
