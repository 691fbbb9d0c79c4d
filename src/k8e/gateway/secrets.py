"""Operations on the secrets of users."""

from __future__ import annotations

from typing import Any

from k8e.gateway.arguments import text
from k8e.gateway.operations import AGENT, NoRow, WritesRow, operation
from k8e.model import DEFAULT_TENANT, SOLE_KEY, Principal
from k8e.sessions.service import Sessions


class SecretCalls:
    """Operations on secrets. No answer contains the value of one."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @operation(roles=AGENT, audit=WritesRow("secret.set", ("tenant", "name", "key")))
    async def set_secret(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        tenant, name, key = _place(call)
        value = text(call, "value")
        made = await self._sessions.secrets.set(
            principal.name, tenant, name, key or SOLE_KEY, value
        )
        # The caller's key may have been deleted meanwhile; then nothing would remove the secret.
        self._sessions.evictions.check_owner(principal.name)
        return made.to_json()

    @operation(roles=AGENT, audit=NoRow.READS)
    async def list_secrets(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = self._sessions.secrets.listing(principal.name, text(call, "tenant", optional=True))
        return {"secrets": [item.to_json() for item in found]}

    @operation(roles=AGENT, audit=WritesRow("secret.deleted", ("tenant", "name", "key")))
    async def delete_secret(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"deleted": self._sessions.secrets.delete(principal.name, *_place(call))}


def _place(call: dict[str, Any]) -> tuple[str, str, str]:
    tenant = text(call, "tenant", optional=True) or DEFAULT_TENANT
    return tenant, text(call, "name"), text(call, "key", optional=True)
