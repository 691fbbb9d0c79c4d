"""What a client asks about contexts: checked here, then relayed to the guest that has them."""

from __future__ import annotations

from typing import Any

from k8e import errors
from k8e.guest import talking

OPERATIONS = frozenset(
    "create_context list_contexts remove_context restart_context interrupt_context".split()
)
MAX_ID = 64
MAX_PATH = 4096
MAX_GRACE = 60.0
KNOWN = "known are python, bash and node"


def check_id(name: Any, what: str) -> None:
    """Refuse what is no id; an empty one is chosen by the guest."""
    name = name or ""
    if (
        not isinstance(name, str)
        or len(name) > MAX_ID
        or not name.isascii()
        or (not name.replace("-", "a").isalnum() and name)
    ):
        raise errors.InvalidRequest(f"{what} has at most {MAX_ID} letters, digits and hyphens")


def check(call: dict[str, Any]) -> None:
    """Refuse an operation on contexts that is malformed."""
    op = call["op"]
    check_id(call.get("id"), "a context id")
    if not call.get("id") and op not in ("create_context", "list_contexts"):
        raise errors.InvalidRequest("the context id is missing")
    if op == "create_context":
        _check_new(call)
    grace = call.get("grace") or 0
    if not isinstance(grace, (int, float)) or not 0 <= grace <= MAX_GRACE:
        raise errors.InvalidRequest(f"grace must be 0 to {MAX_GRACE:g} seconds")


def _check_new(call: dict[str, Any]) -> None:
    language = call.get("language")
    if language is not None and language not in talking.CONTEXT_LANGUAGES:
        raise errors.InvalidRequest(f"there are no contexts for {str(language)[:80]!r}", hint=KNOWN)
    cwd = call.get("cwd") or ""
    if not isinstance(cwd, str) or len(cwd) > MAX_PATH or "\0" in cwd:
        raise errors.InvalidRequest("cwd must be a path")


def check_run(call: dict[str, Any]) -> None:
    """Refuse a run in a context that asks for what only a new program has."""
    check_id(call["context"], "a context id")
    if not call["context"]:
        raise errors.InvalidRequest("the context id is missing")
    if "code" not in call:
        raise errors.InvalidRequest("a context runs code", hint="pass code, and no argv")
    for key in ("tty", "stdin"):
        if call.get(key):
            raise errors.InvalidRequest(
                f"code in a context has no {key}", hint="run it without a context"
            )
    make = call.get("make_context")
    if make and make is not True and make not in talking.CONTEXT_LANGUAGES:
        raise errors.InvalidRequest(f"there are no contexts for {str(make)[:80]!r}", hint=KNOWN)
    _check_new(call)
