"""The agent card: what other agents read before they know how to authenticate.

It is public, since clients fetch it without a credential: it says which one to send. So nothing in
it depends on the caller, on sessions or on settings, and it does not have the release of k8e, which
a stranger could look up in a list of vulnerabilities. It costs no more than a refusal.
"""

from __future__ import annotations

import json
from typing import Any

from k8e import access

PATH = "/.well-known/agent-card.json"
ENDPOINT = "/a2a"
VERSION = "1.0.0"
"""Of the agent that the card describes: it changes with the content of the card."""
_MODES = ["text/plain", "application/json"]


def document(host: str) -> str:
    """The card as JSON, for a caller that names us ``host``."""
    return json.dumps(card(url(host)), ensure_ascii=False)


def url(host: str) -> str:
    """The URL of calls, with the name by which the caller reached us.

    The endpoint listens on loopback, without TLS. A caller that names us otherwise comes through a
    proxy, which has TLS.
    """
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return f"{'http' if access.is_loopback(name) else 'https'}://{host}{ENDPOINT}"


def card(url: str) -> dict[str, Any]:
    """The card of an agent at this URL, in the words of A2A 1.0 and 0.3."""
    return {
        "name": "k8e",
        "description": "Runs code in isolated sandboxes and streams back what it prints. "
        "It does not write code.",
        "version": VERSION,
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
