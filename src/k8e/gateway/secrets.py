"""The gateway's calls about secrets of users, for local clients and for gRPC."""

from __future__ import annotations

from typing import Any

from k8e.gateway.arguments import text
from k8e.model import DEFAULT_TENANT, SOLE_KEY, Principal
from k8e.sessions.service import Sessions


class SecretCalls:
    """The part of the gateway that takes secrets. None of its answers has a value in it."""

    sessions: Sessions

    async def call_set_secret(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        tenant, name, key = _place(call)
        value = text(call, "value")
        made = await self.sessions.secrets.set(principal.name, tenant, name, key or SOLE_KEY, value)
        # Its key may have been deleted while this waited: nobody would ever remove the secret.
        self.sessions.evictions.check_owner(principal.name)
        return made.to_json()

    async def call_list_secrets(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = self.sessions.secrets.listing(principal.name, text(call, "tenant", optional=True))
        return {"secrets": [item.to_json() for item in found]}

    async def call_delete_secret(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        return {"deleted": self.sessions.secrets.delete(principal.name, *_place(call))}


def _place(call: dict[str, Any]) -> tuple[str, str, str]:
    tenant = text(call, "tenant", optional=True) or DEFAULT_TENANT
    return tenant, text(call, "name"), text(call, "key", optional=True)
