"""Calls of tools: handlers by name, checked arguments, and errors in words for a model."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from k8e import errors
from k8e.mcp import approval_tools, catalog, file_tools, run_tools, session_tools
from k8e.mcp.calls import Asker, InputNeeded, Reply, Teller, ToolCall, clean, said
from k8e.mcp.connection import ConnectionSessions, take_note

MAX_COMPARED = 80  # characters; comparing megabytes would hold up every client
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def tool(name: str) -> dict[str, Any]:
    """The tool of this name."""
    found = catalog.TOOLS.get(name)
    if found is None:
        near = _near(name, catalog.TOOLS)
        advice = f"did you mean {near[0]}?" if near else "tools/list shows the tools"
        raise errors.InvalidRequest(f"there is no tool {name[:80]!r}", hint=advice)
    return found


def check_arguments(name: str, given: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of a call, with defaults.

    Nothing is also a null and, as in K8E, an empty text that need not be there and no time at all.
    """
    schema = tool(name)["inputSchema"]
    properties: dict[str, dict[str, Any]] = schema["properties"]
    needed: list[str] = schema.get("required", [])
    found = {
        key: value
        for key, value in (given or {}).items()
        if value is not None and (key not in properties or key in needed or not _empty(key, value))
    }
    for key in found:
        if key not in properties:
            raise _unknown(name, key, properties)
    missing = [key for key in needed if key not in found]
    if missing:
        raise errors.InvalidRequest(
            f"{name} needs the argument {missing[0]!r}",
            hint=f"{missing[0]}: {properties[missing[0]]['description']}",
        )
    checked = {
        key: _value(f"{name}: {key}", value, properties[key]) for key, value in found.items()
    }
    defaults = {key: one["default"] for key, one in properties.items() if "default" in one}
    return {**defaults, **checked}


def _empty(key: str, value: Any) -> bool:
    return value == "" or (key == "timeout" and type(value) in (int, float) and not value)


def _near(name: str, known: Iterable[str]) -> list[str]:
    """A similar name, if there is one; of a long name only the beginning is compared."""
    return difflib.get_close_matches(name[:MAX_COMPARED], known, 1, 0.5)


def _unknown(name: str, key: str, properties: dict[str, Any]) -> errors.InvalidRequest:
    near = _near(key, properties)
    known = ", ".join(properties) or "none"
    advice = f"did you mean {near[0]!r}? " if near else ""
    return errors.InvalidRequest(
        f"{name} has no argument {key[:80]!r}", hint=f"{advice}its arguments: {known}"
    )


def _value(where: str, value: Any, schema: dict[str, Any]) -> Any:
    kind, value = schema["type"], _whole(value) if schema["type"] == "integer" else value
    if not isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, bool)):
        raise errors.InvalidRequest(
            f"{where} is {_shown(value)}, not of type {kind}", hint=schema["description"]
        )
    if kind == "string":
        _text(where, value, schema)
    elif kind == "integer":
        _within(where, value, schema)
    elif kind == "array":
        _items(where, value, schema)
    elif kind == "object":
        for key, item in cast("dict[str, Any]", value).items():
            _value(f"{where}.{key}", item, {"description": "", **schema["additionalProperties"]})
    return value


def _whole(value: Any) -> Any:
    """A whole number: JSON has only numbers, and some clients write 30.0 for 30."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(where: str, value: str, schema: dict[str, Any]) -> None:
    if "enum" in schema and value not in schema["enum"]:
        choices = " or ".join(map(repr, schema["enum"]))
        raise errors.InvalidRequest(f"{where} is {_shown(value)}", hint=f"it can be {choices}")


def _within(where: str, value: int, schema: dict[str, Any]) -> None:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    if not low <= value <= high:
        bounds = [f"at least {low}"] if "minimum" in schema else []
        bounds += [f"at most {high}"] if "maximum" in schema else []
        raise errors.InvalidRequest(f"{where} is {value}", hint=f"it must be {', '.join(bounds)}")


def _items(where: str, value: list[Any], schema: dict[str, Any]) -> None:
    if len(value) < schema.get("minItems", 0):
        raise errors.InvalidRequest(f"{where} is empty", hint=schema["description"])
    for item in value:
        _value(where, item, {"description": schema["description"], **schema["items"]})


def _shown(value: Any) -> str:
    # A long text is cut before it is quoted.
    text = repr(value[:MAX_COMPARED] if isinstance(value, str) else value)
    return text if len(text) <= MAX_COMPARED else f"{text[:MAX_COMPARED]}…"


log = logging.getLogger(__name__)

Handler = Callable[[ToolCall], Awaitable[Reply]]

HANDLERS: dict[str, Handler] = {
    "sandbox_run": run_tools.run,
    "sandbox_status": session_tools.status,
    "sandbox_create_session": session_tools.create_session,
    "sandbox_destroy_session": session_tools.destroy_session,
    "sandbox_exec": run_tools.exec_,
    "sandbox_exec_stream": run_tools.exec_stream,
    "sandbox_write_file": file_tools.write_file,
    "sandbox_read_file": file_tools.read_file,
    "sandbox_list_files": file_tools.list_files,
    "sandbox_pip_install": run_tools.pip_install,
    "sandbox_run_subagent": session_tools.run_subagent,
    "sandbox_confirm_action": approval_tools.confirm_action,
    "sandbox_run_background": run_tools.run_background,
    "sandbox_poll": run_tools.poll,
    "sandbox_kill": run_tools.kill,
    "sandbox_expose": session_tools.expose,
    "sandbox_unexpose": session_tools.unexpose,
    "sandbox_allow_hosts": approval_tools.allow_hosts,
    "sandbox_snapshot_save": session_tools.snapshot_save,
    "sandbox_snapshot_list": session_tools.snapshot_list,
    "sandbox_snapshot_restore": session_tools.snapshot_restore,
    "sandbox_snapshot_delete": session_tools.snapshot_delete,
    "sandbox_list_sessions": session_tools.list_sessions,
}
_OURS = {
    "gateway_unreachable": "sandboxes are not available now; tell the user to run: k8e doctor",
    "sandbox_died": "call again; a new session is made where none was named",
}
"""Hints for agents, in place of the error's own."""
_HINTS = {
    "exec_not_found": "the run has ended long ago, or never was; start it again",
    "snapshot_not_found": "sandbox_snapshot_list shows the snapshots",
    "limit_exceeded": "ask for less, or destroy sessions that are no longer needed",
    "denied": "the server's credential may not do this; a person can",
}
_LISTING = "sandbox_list_files shows what is in /workspace"


async def call(
    name: str,
    given: dict[str, Any] | None,
    *,
    desk: ConnectionSessions,
    teller: Teller,
    asker: Asker,
    allowed_hosts: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The answer of a tool; InputNeeded if a person must be asked first."""
    try:
        arguments = check_arguments(name, given)
        made = ToolCall(arguments, desk, teller, asker, allowed_hosts)
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
    """An error in words: what happened, and what to do next."""
    return clean(_described(error))


def _described(error: Exception) -> str:
    if isinstance(error, errors.K8eError):
        hint = _OURS.get(error.code) or error.hint or _HINTS.get(error.code)
        return f"{error.message}. What to do: {hint}" if hint else error.message
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}. What to do: {errors.file_hint(error, _LISTING)}"
    log.error("a tool failed: %s", error, exc_info=error)
    return f"a defect of k8e ({type(error).__name__}); its log has the rest"
