"""The agent card: what this agent can do, where, and that it wants a token; for both versions."""

from __future__ import annotations

from typing import Any

from k8e import _version

PATH = "/.well-known/agent-card.json"
_MODES = ["text/plain", "application/json"]


def card(url: str) -> dict[str, Any]:
    """What ``GET /.well-known/agent-card.json`` answers; nothing in it is secret."""
    return {
        "name": "k8e",
        "description": "Runs code in isolated sandboxes and streams back what it prints. "
        "It does not write code.",
        "version": _version.__version__,
        "provider": {"organization": "k8e", "url": url},
        "capabilities": {"streaming": True, "pushNotifications": False},
        "defaultInputModes": _MODES,
        "defaultOutputModes": _MODES,
        "skills": [_skill()],
        "securitySchemes": {
            "bearer": {
                "httpAuthSecurityScheme": {"scheme": "bearer"},  # 1.0
                "type": "http",  # 0.3
                "scheme": "bearer",
            }
        },
        # 1.0
        "supportedInterfaces": [
            {"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
            {"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "0.3"},
        ],
        "securityRequirements": [{"schemes": {"bearer": {"list": []}}}],
        # 0.3
        "url": url,
        "preferredTransport": "JSONRPC",
        "protocolVersion": "0.3.0",
        "security": [{"bearer": []}],
    }


def _skill() -> dict[str, Any]:
    return {
        "id": "run-code",
        "name": "Run code",
        "description": "Runs bash, Python, Node.js or TypeScript code in a sandbox. Messages of "
        "one context share /workspace. Files of a message are put there. Artifacts: stdout, "
        "stderr, and result with the exit code.",
        "tags": ["code", "sandbox", "python", "bash", "node", "typescript"],
        "examples": ["```python\nprint(6 * 7)\n```", '{"code": "uname -a", "language": "bash"}'],
        "inputModes": [*_MODES, "application/octet-stream"],
        "outputModes": _MODES,
    }
