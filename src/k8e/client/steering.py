"""Sub-agents and pauses in the SDK. Both clients' methods, side by side."""

from __future__ import annotations

from typing import Any, TypeVar

from k8e.client import operations
from k8e.client.operations import Operation

T = TypeVar("T")


def _subagent(parent_session_id: str, agent_type: str, workspace_path: str) -> Operation[str]:
    call = {
        "op": "run_subagent",
        "parent_session_id": parent_session_id,
        "agent_type": agent_type,
        "workspace_path": workspace_path,
    }
    return (yield from operations.session(call)).session_id


def _turn(op: str, session_id: str) -> Operation[dict[str, Any]]:
    return operations.call({"op": op, "session_id": session_id})


class Steering:
    """Methods of the blocking client."""

    def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    def run_subagent(
        self, parent_session_id: str, agent_type: str = "", workspace_path: str = ""
    ) -> str:
        """Make a session for a sub-agent; its id.

        It is a sandbox of its own, with the parent's limits, variables and allowed hosts, and it
        shares the parent's ``/workspace``. It ends with its parent at the latest.

        Args:
            parent_session_id: whose workspace it shares; not a sub-agent itself.
            agent_type: kept as its label ``agent_type``.
            workspace_path: the folder in which its commands start, ``/workspace`` or below; it is
                made if it is missing.
        """
        return self._call(_subagent(parent_session_id, agent_type, workspace_path))

    def pause_session(self, session_id: str) -> None:
        """Stop everything in a session, and in its sub-agents, until it is resumed.

        Until then, whatever is begun in it raises :class:`k8e.errors.SessionPaused`.
        """
        self._call(_turn("pause_session", session_id))

    def resume_session(self, session_id: str) -> None:
        """Let a session, and its sub-agents, go on where they stopped."""
        self._call(_turn("resume_session", session_id))


class AsyncSteering:
    """The same, of the asynchronous client."""

    async def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    async def run_subagent(
        self, parent_session_id: str, agent_type: str = "", workspace_path: str = ""
    ) -> str:
        return await self._call(_subagent(parent_session_id, agent_type, workspace_path))

    async def pause_session(self, session_id: str) -> None:
        await self._call(_turn("pause_session", session_id))

    async def resume_session(self, session_id: str) -> None:
        await self._call(_turn("resume_session", session_id))
