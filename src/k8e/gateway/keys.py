"""Operations on API keys, and the client certificates that are issued for them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from k8e import errors
from k8e.auth import keys
from k8e.auth.keys import DAY, E2B_PREFIX, Created, KeyQuota, Keys
from k8e.auth.store import Key
from k8e.gateway import tls
from k8e.gateway.arguments import text
from k8e.gateway.operations import ADMIN, NoRow, WritesRow, operation
from k8e.model import Principal, Role
from k8e.sessions.approvals import Approvals
from k8e.sessions.service import Sessions

CLIENT_DAYS = 90
MAX_CSR = 16 << 10  # bytes
MAX_DEVICE = 64  # characters
MAX_WAITING = 16  # logins; each is a process that takes a tenth of a second


class Issued(NamedTuple):
    """A client certificate, in PEM."""

    certificate: str
    ca: str
    days: int


class KeyCalls:
    """Operations on API keys."""

    def __init__(self, keys: Keys, approvals: Approvals, sessions: Sessions) -> None:
        self._keys = keys
        self._approvals = approvals
        self._sessions = sessions

    @operation(roles=ADMIN, audit=WritesRow("key.created", ("name",), ("roles", "expires_at")))
    async def create_api_key(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        roles: Any = call.get("roles") or []
        if not isinstance(roles, list):
            raise errors.InvalidRequest("roles must be a list")
        names = [str(role) for role in roles]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        if Role.APPROVER in names and await self._approvals.approver.configured():
            # Else an agent with the admin's uid could make itself an approver.
            await self._approvals.approver.check(text(call, "secret", optional=True))
        name, ttl = text(call, "name"), text(call, "ttl", optional=True)
        return _describe_with_secret(await self._keys.create(name, ttl, names, _quota(call)))

    @operation(roles=ADMIN, audit=WritesRow("key.rotated", ("name",)))
    async def rotate_api_key(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Give a key a new secret; the old one is invalid at once."""
        name, ttl = text(call, "name"), text(call, "ttl", optional=True)
        before = self._keys.get(name)
        if before.owner == principal.name:
            raise errors.Denied(
                "a key cannot rotate itself: this call would end with it, and nobody would get the "
                "new secret",
                hint="let another admin do it, or the gateway's own user",
            )
        if Role.APPROVER in before.roles and await self._approvals.approver.configured():
            await self._approvals.approver.check(text(call, "secret", optional=True))
        return _describe_with_secret(await self._keys.rotate(name, ttl))

    @operation(roles=ADMIN, audit=NoRow.READS)
    async def list_api_keys(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = self._keys.listing()
        return {"keys": [{**_describe(key), "certificates": count} for key, count in found]}

    @operation(
        roles=ADMIN, audit=WritesRow("key.deleted", ("name",), needs_room=False, by_handler=True)
    )
    async def delete_api_key(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        gone = await self._keys.delete(text(call, "name"))
        # No caller could use or end what it left: a later key of this name has another owner.
        ended = await self._sessions.evictions.evict(gone.owner, f"key {gone.name} was deleted")
        answer: dict[str, Any] = {"name": gone.name, "ok": True}
        return {**answer, "sessions_ended": ended} if ended else answer


class ClientCertificates:
    """Certificates that clients get for their API keys."""

    def __init__(self, keys: Keys, tls_folder: Path) -> None:
        self._keys = keys
        self._tls_folder = tls_folder
        self._signing = asyncio.Lock()
        self._logins = 0

    def ca_certificate(self) -> str:
        """Our CA's certificate, which is not secret."""
        return (self._tls_folder / tls.CA_CERT).read_text("ascii")

    async def issue(self, principal: Principal, csr: str, device: str) -> Issued:
        """A client certificate for the key behind ``principal``; it never outlives the key."""
        key = self._keys.of_principal(principal)
        if key is None:
            raise errors.Denied(
                "a certificate is issued for an API key, and this call came with none",
                hint="k8e sandbox api-key create NAME makes one; pass it with --apikey-file",
            )
        if not csr or len(csr) > MAX_CSR or not csr.isascii():
            raise errors.InvalidRequest(f"a CSR is PEM text of at most {MAX_CSR} bytes")
        if len(device) > MAX_DEVICE or not device.isprintable():
            raise errors.InvalidRequest(
                f"a device name has at most {MAX_DEVICE} printable characters"
            )
        if self._logins >= MAX_WAITING:
            raise errors.LimitExceeded("too many are logging in at once", hint="try again")
        self._logins += 1
        try:
            async with self._signing:
                return await self._issue(key, csr, device)
        finally:
            self._logins -= 1

    async def _issue(self, key: Key, csr: str, device: str) -> Issued:
        ends = time.time() + CLIENT_DAYS * DAY
        ends = min(ends, key.expires_at) if key.expires_at else ends
        asked = {"csr": csr, "name": key.name, "not_after": ends}
        folder = str(self._tls_folder)
        told = json.loads(
            await tls.make_in_child("signer", folder, given=json.dumps(asked).encode())
        )
        if "refused" in told:
            raise errors.InvalidRequest(f"the CSR is refused: {told['refused']}")
        if not key.valid(time.time()) or self._keys.of_principal(keys.principal(key)) != key:
            raise errors.Denied(f"key {key.name} was deleted or replaced meanwhile")
        await self._keys.issued(told["serial"], key, device, ends)
        days = int((ends - time.time() + 60) // DAY)
        return Issued(told["certificate"], self.ca_certificate(), days)


def _quota(call: dict[str, Any]) -> KeyQuota:
    sessions, rate = call.get("max_sessions") or 0, call.get("rate") or 0
    if type(sessions) is not int or type(rate) not in (int, float):
        raise errors.InvalidRequest("max_sessions and rate must be numbers")
    return KeyQuota(sessions, float(rate))


def _describe_with_secret(made: Created) -> dict[str, Any]:
    """A key with its secret, for the answer to its creation alone."""
    return {**_describe(made.key), "key": made.secret, "e2b_key": E2B_PREFIX + made.secret}


def _describe(key: Key) -> dict[str, Any]:
    days = round((key.expires_at - key.created_at) / DAY, 2) if key.expires_at else 0
    return {
        "name": key.name,
        "created_at": int(key.created_at),
        "expires_at": int(key.expires_at),
        "ttl_days": int(days) if days == int(days) else days,
        "roles": sorted(key.roles),
        **({"max_sessions": key.max_sessions} if key.max_sessions else {}),
        **({"rate": key.rate} if key.rate else {}),
    }
