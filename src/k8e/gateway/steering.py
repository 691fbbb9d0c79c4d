"""The gateway's calls about sub-agents and pauses, for local clients and for gRPC."""

from __future__ import annotations

from typing import Any

from k8e.gateway.arguments import text
from k8e.model import Principal
from k8e.sessions.service import Sessions


class SteeringCalls:
    """The part of the gateway that makes children of sessions, stops sessions and lets them go."""

    sessions: Sessions

    async def call_run_subagent(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        session = await self.sessions.run_subagent(
            principal,
            text(call, "parent_session_id"),
            text(call, "agent_type", optional=True),
            text(call, "workspace_path", optional=True),
        )
        return {"session": session.to_json()}

    async def call_pause_session(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        await self.sessions.pause(principal, text(call, "session_id"))
        return {}

    async def call_resume_session(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        await self.sessions.resume(principal, text(call, "session_id"))
        return {}
