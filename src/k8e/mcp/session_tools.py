"""Tools for sessions, sub-agents, snapshots and exposed ports."""

from __future__ import annotations

from typing import Any

from k8e import errors
from k8e.client.exposures import Exposed
from k8e.client.requests import SessionOptions
from k8e.client.snapshots import Snapshot
from k8e.mcp import approval_tools
from k8e.mcp.calls import Reply, ToolCall


async def status(call: ToolCall) -> Reply:
    fields: dict[str, Any] = {"available": True, "session_id": call.desk.own}
    if call.desk.tenant:
        fields["tenant_id"] = call.desk.tenant
    try:
        fields["version"] = str((await call.client.status()).get("version", ""))
    except (errors.GatewayUnreachable, errors.Denied) as error:
        fields |= {"available": False, "error": f"{error.message}; {error.hint}"}
    return Reply(fields)


async def create_session(call: ToolCall) -> Reply:
    options: SessionOptions = {
        "session_id": call.get("session_id"),
        "env": call.get("env", {}),
        "template": call.get("template"),
        "lifetime": call.get("lifetime", 0),
    }
    made = await call.desk.made(
        call.client.create_session(
            call.get("runtime_class"), None, call.get("tenant_id"), **options
        )
    )
    fields: dict[str, Any] = {"session_id": made, "pod_ip": ""}
    asked: list[str] | None = call.get("allowed_hosts", None)
    if asked is None:
        fields["allowed_hosts"] = (await call.client.get_session(made)).allowed_hosts
        return Reply(fields)
    try:
        return Reply({**fields, **await approval_tools.create_with(call, made, asked)})
    except BaseException:
        call.desk.forget(made)
        await call.client.destroy_session(made)
        raise


async def destroy_session(call: ToolCall) -> Reply:
    session_id = await call.desk.find(call.session_id)
    await call.client.destroy_session(session_id)
    call.desk.forget(session_id)
    return Reply({"ok": True})


async def list_sessions(call: ToolCall) -> Reply:
    found = [
        {
            "session_id": item.session_id,
            "phase": item.phase,
            "runtime": item.runtime,
            "own": item.session_id == call.desk.own,
        }
        for item in await call.desk.listing()
    ]
    return Reply({"sessions": found})


async def run_subagent(call: ToolCall) -> Reply:
    async def work(session_id: str) -> str:
        return await call.desk.made(
            call.client.run_subagent(session_id, call.get("agent_type"), call.get("workspace_path"))
        )

    return Reply({"session_id": await call.desk.within(call.get("parent_session_id"), work)})


# Snapshots.


async def snapshot_save(call: ToolCall) -> Reply:
    async def work(session_id: str) -> Snapshot:
        return await call.client.save_snapshot(session_id, call["name"], replace=call["replace"])

    return Reply(_snapshot(await call.desk.within(call.session_id, work)))


async def snapshot_list(call: ToolCall) -> Reply:
    found = await call.client.list_snapshots()
    return Reply(
        {"snapshots": [{**_snapshot(item), "created_at": int(item.created_at)} for item in found]}
    )


async def snapshot_restore(call: ToolCall) -> Reply:
    made = await call.desk.made(call.client.restore_snapshot(call["name"]))
    return Reply({"session_id": made})


async def snapshot_delete(call: ToolCall) -> Reply:
    await call.client.delete_snapshot(call["name"])
    return Reply({"ok": True})


def _snapshot(found: Snapshot) -> dict[str, Any]:
    return {
        "name": found.name,
        "file_count": found.file_count,
        "size_bytes": found.size_bytes,
    }


# Exposed ports.


async def expose(call: ToolCall) -> Reply:
    async def work(session_id: str) -> Exposed:
        return await call.client.expose(session_id, call["port"], call["host"])

    found = await call.desk.within(call.session_id, work)
    return Reply({"url": found.url, "port": found.port, "session_id": found.session_id})


async def unexpose(call: ToolCall) -> Reply:
    async def work(session_id: str) -> None:
        await call.client.unexpose(session_id, call["port"])

    await call.desk.within(call.session_id, work)
    return Reply({"ok": True})
