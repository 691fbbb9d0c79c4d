"""Secrets in the SDK: set, list by name and delete. Both clients' methods, side by side.

No call gives a value back. A session gets one as a variable:
``create_session(secrets={"TOKEN": "github:value"})``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from k8e.client import operations
from k8e.client.operations import Operation
from k8e.client.records import Record

T = TypeVar("T")


class SecretInfo(Record):
    """A secret that the gateway keeps, without its value."""

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


def _set(place: Mapping[str, str], value: str) -> Operation[SecretInfo]:
    call = {"op": "set_secret", **place, "value": value}
    return _info((yield from operations.call(call)))


def _list(tenant: str) -> Operation[list[SecretInfo]]:
    told = yield from operations.call({"op": "list_secrets", "tenant": tenant})
    return [_info(item) for item in told["secrets"]]


def _delete(place: Mapping[str, str]) -> Operation[int]:
    return int((yield from operations.call({"op": "delete_secret", **place}))["deleted"])


def _place(name: str, key: str, tenant: str) -> dict[str, str]:
    return {"name": name, "key": key, "tenant": tenant}


class Secrets:
    """Methods of the blocking client."""

    tenant_id: str

    def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    def set_secret(
        self, name: str, value: str, *, key: str = "", tenant_id: str = ""
    ) -> SecretInfo:
        """Keep a secret, in the place of the one of before; nothing ever shows its value again.

        Args:
            name: what sessions ask for.
            value: text of at most 16 KiB.
            key: for a secret with several values; without it, ``value``.
            tenant_id: whose sessions can get it; the client's own tenant by default.
        """
        return self._call(_set(_place(name, key, tenant_id or self.tenant_id), value))

    def list_secrets(self, tenant_id: str = "") -> list[SecretInfo]:
        """The names of the caller's secrets, of all its tenants or of one."""
        return self._call(_list(tenant_id))

    def delete_secret(self, name: str, *, key: str = "", tenant_id: str = "") -> int:
        """Remove a secret, or one value of it; how many values are gone.

        Sessions that have it as a variable keep it until they end.
        """
        return self._call(_delete(_place(name, key, tenant_id or self.tenant_id)))


class AsyncSecrets:
    """The same, of the asynchronous client."""

    tenant_id: str

    async def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    async def set_secret(
        self, name: str, value: str, *, key: str = "", tenant_id: str = ""
    ) -> SecretInfo:
        return await self._call(_set(_place(name, key, tenant_id or self.tenant_id), value))

    async def list_secrets(self, tenant_id: str = "") -> list[SecretInfo]:
        return await self._call(_list(tenant_id))

    async def delete_secret(self, name: str, *, key: str = "", tenant_id: str = "") -> int:
        return await self._call(_delete(_place(name, key, tenant_id or self.tenant_id)))
