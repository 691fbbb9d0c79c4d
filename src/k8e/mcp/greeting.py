"""The first answers on stdio, given before the official SDK is there. Pure.

Importing the SDK takes longer than everything else that a server does before its first tool call.
So the handshake, and the list of tools that follows it, are answered from data; the SDK is loaded
meanwhile and then hears of the handshake too. A test holds that it would have said the same.
"""

from __future__ import annotations

from typing import Any, cast

from k8e import _version
from k8e.mcp import catalog

HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSIONS = ("2026-07-28",)
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
NOBODY = {"name": "unknown", "version": ""}
CAPABILITIES: dict[str, Any] = {
    "resources": {"subscribe": False, "listChanged": False},
    "tools": {"listChanged": False},
}


def server_info() -> dict[str, Any]:
    return {"name": catalog.NAME, "title": catalog.TITLE, "version": _version.__version__}


class Greeter:
    """Answers what it surely knows; the rest is for the SDK."""

    def __init__(self) -> None:
        self.greeted: Any = None
        """The id of the handshake that was answered: the SDK's own answer to it is not sent."""
        self._initialized = False

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The reply to a message, or None if the SDK must see it to reply."""
        if not _is_request(message):
            return None
        method, params = message["method"], message.get("params")
        given = fields(params)
        meta = fields(given.get("_meta"))
        if method == "initialize" and not self._initialized and _is_handshake(given):
            self._initialized, self.greeted = True, message["id"]
            return _reply(message, _initialize(given["protocolVersion"]))
        if VERSION_KEY in meta:
            known = meta[VERSION_KEY] in MODERN_VERSIONS and _is_enveloped(meta)
            return _reply(message, _discover()) if known and method == "server/discover" else None
        plain = params is None or (isinstance(params, dict) and not given.keys() - {"_meta"})
        if method == "ping" and plain:
            return _reply(message, {})
        if method == "tools/list" and self._initialized and plain:
            return _reply(message, {"tools": catalog.listed()})
        return None

    def keeps(self, message: dict[str, Any]) -> bool:
        """Whether the SDK must see a message though it was answered."""
        return message.get("method") == "initialize"


def completed(message: dict[str, Any]) -> dict[str, Any]:
    """A handshake with all its parts: clients of K8E may leave out everything."""
    params = message.get("params", {})
    if message.get("method") != "initialize" or not isinstance(params, dict):
        return message
    parts = {"protocolVersion": HANDSHAKE_VERSIONS[0], "capabilities": {}, "clientInfo": NOBODY}
    return {**message, "params": {**parts, **params}}


def fields(value: Any) -> dict[str, Any]:
    """A JSON object; of anything else, nothing."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_request(message: dict[str, Any]) -> bool:
    known = {"jsonrpc", "id", "method", "params"}
    return (
        message.get("jsonrpc") == "2.0"
        and type(message.get("id")) in (int, str)
        and isinstance(message.get("method"), str)
        and not message.keys() - known
    )


def _is_handshake(params: dict[str, Any]) -> bool:
    info = fields(params.get("clientInfo"))
    return (
        isinstance(params.get("protocolVersion"), str)
        and isinstance(params.get("capabilities"), dict)
        and isinstance(info.get("name"), str)
        and isinstance(info.get("version"), str)
    )


def _is_enveloped(meta: dict[str, Any]) -> bool:
    return isinstance(meta.get(CAPABILITIES_KEY), dict)


def _reply(message: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _initialize(asked: str) -> dict[str, Any]:
    return {
        "protocolVersion": asked if asked in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1],
        "capabilities": CAPABILITIES,
        "serverInfo": server_info(),
        "instructions": catalog.INSTRUCTIONS,
    }


def _discover() -> dict[str, Any]:
    return {
        "resultType": "complete",
        "ttlMs": 0,
        "cacheScope": "private",
        "supportedVersions": list(MODERN_VERSIONS),
        "capabilities": CAPABILITIES,
        "instructions": catalog.INSTRUCTIONS,
        "_meta": {SERVER_KEY: server_info()},
    }
