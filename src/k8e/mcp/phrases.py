"""What many tools have in common: arguments, fields of answers, and how a tool is written down."""

from __future__ import annotations

from k8e.mcp.schemas import flag, number, text, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.mcp.schemas import Schema

MAX_TIMEOUT = 24 * 3600
MAX_WAIT = 600
OWN = "the session; by default this connection's own"
WORKSPACE = "/workspace"

SESSION = text(OWN)
TIMEOUT = number(
    "seconds after which the program is killed", default=30, minimum=1, maximum=MAX_TIMEOUT
)
LANGUAGE = text(
    "bash, python, node or ts (also py, python3, js, nodejs, javascript, typescript)",
    default="bash",
)
PATH = text("a path in the sandbox; relative to /workspace")
WAIT_SECONDS = number("seconds to wait for a person", default=300, minimum=1, maximum=MAX_TIMEOUT)
ENDED = {
    "exit_code": number("what the program returned; 128 + n if signal n ended it"),
    "stdout": text("what it printed"),
    "stderr": text("what it printed to standard error"),
    "session_id": text("where it ran"),
    "status": text("completed, timed_out or killed"),
    "duration_ms": number("how long it ran"),
    "truncated": flag("whether output above the limit was dropped"),
    "denials": texts("what the session's policy refused to let it reach"),
    "note": text("something to know about the session"),
}
DECIDED = {
    "approval_id": text("what was asked; give it to ask for the decision again"),
    "approved": flag("whether the action may be done, once"),
    "status": text("approved, rejected, pending or declined"),
    "advisory": flag("whether it was (or can be) decided without an approver's secret"),
    "reason": text("the approver's words"),
    "note": text("what to do next"),
}


def tool(
    title: str,
    meaning: str,
    given: Schema,
    answered: Schema,
    **hints: bool,
) -> dict[str, Any]:
    """One tool, as ``tools/list`` tells it. Hints not given are the careful ones."""
    names = {
        "reads": "readOnlyHint",
        "destroys": "destructiveHint",
        "repeats": "idempotentHint",
        "open_world": "openWorldHint",
    }
    chosen = {"reads": False, "destroys": False, "repeats": False, "open_world": False, **hints}
    return {
        "title": title,
        "description": meaning,
        "inputSchema": given,
        "outputSchema": answered,
        "annotations": {"title": title, **{names[name]: chosen[name] for name in names}},
    }
