"""The gateway's calls about exposed ports, for local clients and for gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k8e import errors
from k8e.gateway.arguments import text
from k8e.model import Principal

if TYPE_CHECKING:
    from k8e.gateway.exposures import Exposed, Exposures
    from k8e.sessions.service import Sessions

_NO_TENANT = "default"


class ExposureCalls:
    """The part of the gateway that answers for exposed ports."""

    sessions: Sessions
    exposures: Exposures

    async def call_expose(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Expose a port of a session, or of the standing one of a tenant."""
        port, host = _port(call), text(call, "host", optional=True)
        session_id, warning = text(call, "session_id", optional=True), ""
        if not session_id:
            tenant = text(call, "tenant", optional=True) or _NO_TENANT
            session = await self.sessions.standing(principal, {"tenant": tenant})
            session_id, warning = session.session_id, self.sessions.warning(session)
        self.sessions.events.admit()
        found = await self.exposures.expose(principal, session_id, port, host)
        told = _told(found)
        self._note(principal, session_id, "port.exposed", port=port, host=told["host"])
        warnings = [item for item in (warning, found.warning) if item]
        return {**told, "warning": "; ".join(warnings)} if warnings else told

    async def call_unexpose(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        session_id = text(call, "session_id", optional=True)
        if not session_id:
            session_id = self._standing(principal, text(call, "tenant", optional=True))
        port = _port(call)
        self.exposures.unexpose(principal, session_id, port)
        self._note(principal, session_id, "port.unexposed", port=port)
        return {"session_id": session_id}

    def _note(self, principal: Principal, session_id: str, kind: str, **fields: Any) -> None:
        session = self.sessions.get(principal, session_id)
        self.sessions.events.write(session, kind, **fields)

    def _standing(self, principal: Principal, tenant: str) -> str:
        session = self.sessions.auto_now(principal, tenant or _NO_TENANT)
        if session is None:
            raise errors.SessionNotFound(
                f"tenant {tenant or _NO_TENANT!r} has no standing session: not found",
                hint="name the session: k8e sandbox exposed lists ports and their sessions",
            )
        return session.session_id

    async def call_list_exposed(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = self.exposures.listing(principal, text(call, "session_id", optional=True))
        return {"services": [_told(item) for item in found]}


def _port(call: dict[str, Any]) -> int:
    port = call.get("port")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise errors.InvalidRequest("port must be a number from 1 to 65535")
    return port


def _told(item: Exposed) -> dict[str, Any]:
    """What the owner may know; the token is in the URL too."""
    return {
        "session_id": item.exposure.session_id,
        "port": item.exposure.port,
        "host": item.exposure.host,
        "url": item.url,
        "token": item.exposure.token,
        "started_at": item.exposure.started_at,
    }
