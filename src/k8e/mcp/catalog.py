"""What the tools are called, take, give and do to the world. Data only, and quick to import.

The first twelve have the names and arguments of K8E's own MCP server. Where K8E demands a session,
ours may be left out: then the connection's own is meant.
"""

from __future__ import annotations

from k8e.mcp.k8e_tools import K8E_TOOLS
from k8e.mcp.more_tools import MORE_TOOLS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "k8e-sandbox"
TITLE = "k8e sandboxes"
INSTRUCTIONS = (
    "Runs untrusted code in isolated sandboxes. sandbox_run needs nothing but code: this "
    "connection has a session of its own, made at the first use, whose files in /workspace stay "
    "between calls. A failing program is a normal result: look at exit_code and stderr. What a "
    "program may reach on the network is limited; refusals are told in `denials`, and "
    "sandbox_allow_hosts asks a person for more. Ask with sandbox_confirm_action before what "
    "cannot be undone. Use sandbox_run_background and sandbox_poll for servers and for what takes "
    "longer than a minute."
)

TOOLS: dict[str, dict[str, Any]] = {**K8E_TOOLS, **MORE_TOOLS}


def listed() -> list[dict[str, Any]]:
    """All tools, as ``tools/list`` tells them."""
    return [{"name": name, **known} for name, known in TOOLS.items()]
