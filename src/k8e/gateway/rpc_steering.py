"""Sub-agents and pauses in K8E's words. A method here has the name of its RPC."""

from __future__ import annotations

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.steering import SteeringCalls
from k8e.model import Principal


class SteeringRpcs:
    """The RPCs that make children of sessions, stop sessions and let them go on."""

    def __init__(self, calls: SteeringCalls) -> None:
        self._steering = calls

    async def RunSubAgent(
        self, principal: Principal, request: pb.RunSubAgentRequest
    ) -> pb.RunSubAgentResponse:
        call = {
            "parent_session_id": request.parent_session_id,
            "agent_type": request.agent_type,
            "workspace_path": request.workspace_path,
        }
        told = await self._steering.call_run_subagent(principal, call)
        return pb.RunSubAgentResponse(session_id=told["session"]["session_id"])

    async def PauseSession(
        self, principal: Principal, request: pb.PauseSessionRequest
    ) -> pb.PauseSessionResponse:
        await self._steering.call_pause_session(principal, {"session_id": request.session_id})
        return pb.PauseSessionResponse(ok=True)

    async def ResumeSession(
        self, principal: Principal, request: pb.ResumeSessionRequest
    ) -> pb.ResumeSessionResponse:
        await self._steering.call_resume_session(principal, {"session_id": request.session_id})
        return pb.ResumeSessionResponse(ok=True)
