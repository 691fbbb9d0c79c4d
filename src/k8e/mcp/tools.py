"""From the name of a tool to what it does, and from what goes wrong to words for a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from k8e import errors
from k8e.mcp import allowing, checking, filing, keeping, running
from k8e.mcp.calls import Asker, Call, InputNeeded, Reply, Teller, clean, said
from k8e.mcp.desks import Desk, take_note

log = logging.getLogger(__name__)

Handler = Callable[[Call], Awaitable[Reply]]

HANDLERS: dict[str, Handler] = {
    "sandbox_run": running.run,
    "sandbox_status": keeping.status,
    "sandbox_create_session": keeping.create_session,
    "sandbox_destroy_session": keeping.destroy_session,
    "sandbox_exec": running.exec_,
    "sandbox_exec_stream": running.exec_stream,
    "sandbox_write_file": filing.write_file,
    "sandbox_read_file": filing.read_file,
    "sandbox_list_files": filing.list_files,
    "sandbox_pip_install": running.pip_install,
    "sandbox_run_subagent": keeping.run_subagent,
    "sandbox_confirm_action": allowing.confirm_action,
    "sandbox_run_background": running.run_background,
    "sandbox_poll": running.poll,
    "sandbox_kill": running.kill,
    "sandbox_expose": keeping.expose,
    "sandbox_unexpose": keeping.unexpose,
    "sandbox_allow_hosts": allowing.allow_hosts,
    "sandbox_snapshot_save": keeping.snapshot_save,
    "sandbox_snapshot_list": keeping.snapshot_list,
    "sandbox_snapshot_restore": keeping.snapshot_restore,
    "sandbox_snapshot_delete": keeping.snapshot_delete,
    "sandbox_list_sessions": keeping.list_sessions,
}
_OURS = {
    "gateway_unreachable": "sandboxes are not available now; tell the user to run: k8e doctor",
    "sandbox_died": "call again; a new session is made where none was named",
}
"""Better for an agent than what the error itself says."""
_HINTS = {
    "exec_not_found": "the run has ended long ago, or never was; start it again",
    "snapshot_not_found": "sandbox_snapshot_list tells which there are",
    "limit_exceeded": "ask for less, or destroy sessions that are no longer needed",
    "denied": "the server's credential may not do this; a person can",
}
_LISTING = "sandbox_list_files tells what is in /workspace"


async def call(
    name: str,
    given: dict[str, Any] | None,
    *,
    desk: Desk,
    teller: Teller,
    asker: Asker,
    allowed_hosts: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What a tool answers; InputNeeded if a person must be asked first."""
    try:
        arguments = checking.arguments(name, given)
        made = Call(arguments, desk, teller, asker, allowed_hosts)
        reply = await HANDLERS[name](made)
        if note := take_note():
            told = " ".join(filter(None, [reply.fields.get("note"), note]))
            more = [*reply.more, *(said([note]) if reply.text is not None else [])]
            reply = replace(reply, fields={**reply.fields, "note": told}, more=more)
        return reply.wire()
    except (InputNeeded, asyncio.CancelledError):
        raise
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> dict[str, Any]:
    """An error as a tool's result, which the model sees, unlike one of the protocol."""
    return {"content": [{"type": "text", "text": describe(error)}], "isError": True}


def describe(error: Exception) -> str:
    """What happened, and what to do next."""
    return clean(_described(error))


def _described(error: Exception) -> str:
    if isinstance(error, errors.K8eError):
        hint = _OURS.get(error.code) or error.hint or _HINTS.get(error.code)
        return f"{error.message}. What to do: {hint}" if hint else error.message
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}. What to do: {errors.file_hint(error, _LISTING)}"
    log.error("a tool failed: %s", error, exc_info=error)
    return f"a defect of k8e ({type(error).__name__}); its log has the rest"
