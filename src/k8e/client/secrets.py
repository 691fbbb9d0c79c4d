"""Secrets: set, list by name and delete. No call returns a value.

A session gets one as a variable: ``create_session(secrets={"TOKEN": "github:value"})``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k8e.client import operations
from k8e.client.operations import Operation
from k8e.client.records import Record


class SecretInfo(Record):
    """A stored secret, without its value."""

    name: str
    key: str
    """A secret has one value, with the key ``value``, or several."""
    tenant_id: str
    """Sessions of this tenant can get it."""
    created_at: float
    """Unix time."""
    updated_at: float


def _info(data: Mapping[str, Any]) -> SecretInfo:
    return SecretInfo(
        name=str(data["name"]),
        key=str(data["key"]),
        tenant_id=str(data["tenant_id"]),
        created_at=float(data["created_at"]),
        updated_at=float(data["updated_at"]),
    )


def store(place: Mapping[str, str], value: str) -> Operation[SecretInfo]:
    call = {"op": "set_secret", **place, "value": value}
    return _info((yield from operations.call(call)))


def listing(tenant: str) -> Operation[list[SecretInfo]]:
    told = yield from operations.call({"op": "list_secrets", "tenant": tenant})
    return [_info(item) for item in told["secrets"]]


def delete(place: Mapping[str, str]) -> Operation[int]:
    return int((yield from operations.call({"op": "delete_secret", **place}))["deleted"])


def place(name: str, key: str, tenant: str) -> dict[str, str]:
    return {"name": name, "key": key, "tenant": tenant}
