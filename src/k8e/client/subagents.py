"""Sub-agents: sandboxes that share the workspace of another one."""

from __future__ import annotations

from k8e.client import operations
from k8e.client.operations import Operation


def start(parent_session_id: str, agent_type: str, workspace_path: str) -> Operation[str]:
    call = {
        "op": "run_subagent",
        "parent_session_id": parent_session_id,
        "agent_type": agent_type,
        "workspace_path": workspace_path,
    }
    return (yield from operations.session(call)).session_id
