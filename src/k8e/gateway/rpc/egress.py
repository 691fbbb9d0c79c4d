"""Egress as protobuf messages: the policy of a session, and its denials."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.rpc.errors import as_text

MAX_JSON = 4000  # characters of denials in metadata, of which clients take 8 KiB in all


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
    """Denials from an EXIT, which a hostile guest may have forged."""
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


def denials_as_json(found: Iterable[pb.EgressDenial]) -> str:
    """Denials for metadata, which is plain ASCII: as many as there is room for, in order."""
    kept: list[str] = []
    room = MAX_JSON
    for item in found:
        fields = {
            "name": item.name,
            "address": item.address,
            "port": item.port,
            "protocol": item.protocol,
            "rule": item.rule,
            "count": item.count,
        }
        text = json.dumps(fields, separators=(",", ":"))
        room -= len(text) + 1
        if room < 0:
            break
        kept.append(text)
    return f"[{','.join(kept)}]"
