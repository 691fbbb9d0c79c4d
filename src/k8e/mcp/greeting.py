"""The first answers on stdio, given before the official SDK is there. Pure.

Importing the SDK takes longer than everything else that a server does before its first tool call.
So the handshake, and the list of tools that follows it, are answered from data; the SDK is loaded
meanwhile and then hears of the handshake too. A test holds that it would have said the same.
"""

from __future__ import annotations

from k8e import _version
from k8e.mcp import catalog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSIONS = ("2026-07-28",)
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
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

    def answer(self, message: Any) -> dict[str, Any] | None:
        """The reply to a message, or None if the SDK must see it to reply."""
        if not isinstance(message, dict) or not _is_request(message):
            return None
        method, params = message["method"], message.get("params")
        if method == "initialize" and not self._initialized and _is_handshake(params):
            self._initialized, self.greeted = True, message["id"]
            return _reply(message, _initialize(params["protocolVersion"]))
        if _version_of(params) in MODERN_VERSIONS:
            if method == "server/discover" and isinstance(params, dict):
                return _reply(message, _discover()) if _is_enveloped(params["_meta"]) else None
            return None
        if method == "ping" and _is_plain(params):
            return _reply(message, {})
        if method == "tools/list" and self._initialized and _is_plain(params):
            return _reply(message, {"tools": catalog.listed()})
        return None

    def keeps(self, message: Any) -> bool:
        """Whether the SDK must see a message though it was answered."""
        return isinstance(message, dict) and message.get("method") == "initialize"


def _is_request(message: dict[str, Any]) -> bool:
    known = {"jsonrpc", "id", "method", "params"}
    return (
        message.get("jsonrpc") == "2.0"
        and type(message.get("id")) in (int, str)
        and isinstance(message.get("method"), str)
        and not message.keys() - known
    )


def _is_handshake(params: Any) -> bool:
    if not isinstance(params, dict) or not isinstance(params.get("protocolVersion"), str):
        return False
    info = params.get("clientInfo")
    return (
        isinstance(params.get("capabilities"), dict)
        and isinstance(info, dict)
        and isinstance(info.get("name"), str)
        and isinstance(info.get("version"), str)
    )


def _version_of(params: Any) -> Any:
    meta = params.get("_meta") if isinstance(params, dict) else None
    return meta.get(VERSION_KEY) if isinstance(meta, dict) else None


def _is_enveloped(meta: dict[str, Any]) -> bool:
    return isinstance(meta.get(CAPABILITIES_KEY), dict)


def _is_plain(params: Any) -> bool:
    """No arguments but what every request may have."""
    return params is None or (isinstance(params, dict) and not params.keys() - {"_meta"})


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
