"""Sandboxes and their conversations: opened, looked at, listed, changed, ended."""

from __future__ import annotations

import base64
import json
from typing import Any, Literal, cast

from k8e.model import Phase
from k8e.rest import models
from k8e.rest.problems import Refusal
from k8e.rest.requests import Reply, Request

CONVERSATION_LABEL, USER_LABEL = "k8e/conversation", "k8e/user"
_STATUS: dict[str, Literal["creating", "running", "paused", "ended"]] = {
    Phase.CREATING: "creating",
    Phase.ACTIVE: "running",
    Phase.PAUSED: "paused",
    Phase.ENDED: "ended",
}


def sandbox_of(session: dict[str, Any]) -> dict[str, Any]:
    """A session as REST describes it."""
    labels = session["labels"]
    return {
        "sandbox_id": session["session_id"],
        "conversation_id": labels.get(CONVERSATION_LABEL),
        "user_id": labels.get(USER_LABEL),
        "status": _STATUS.get(session["phase"], "ended"),
        "tenant": session["tenant_id"],
        "runtime": session["runtime"],
        "template": session["template"],
        "created_at": session["created_at"],
        "expires_at": session["expires_at"],
        "allowed_hosts": session["allowed_hosts"],
        "ended_reason": session["ended_reason"],
    }


async def _told(request: Request, reply: Reply, session: Any = None) -> None:
    """Answer with the sandbox as it is now."""
    if session is None:
        found = await request.ask("get_session", session_id=request.sandbox_id)
        session = found["session"]
    await reply.tell(models.Sandbox(**sandbox_of(session)))


async def open_sandbox(request: Request, reply: Reply) -> None:
    asked = await request.body(models.OpenSandbox)
    spec = asked.model_dump(
        exclude={"user_id", "conversation_id", "tenant"}, exclude_none=True, exclude_unset=True
    )
    found: dict[str, Any] = await request.ask(
        "open_conversation",
        user_id=asked.user_id,
        conversation_id=asked.conversation_id,
        tenant=asked.tenant,
        spec=spec or None,
    )
    opened = models.OpenedSandbox(
        **sandbox_of(found["session"]),
        token=found["token"],
        token_expires_at=found["token_expires_at"],
        warning=found["warning"],
    )
    await reply.tell(opened, 201 if found["created"] else 200)


async def get_sandbox(request: Request, reply: Reply) -> None:
    await _told(request, reply)


async def list_sandboxes(request: Request, reply: Reply) -> None:
    wanted = request.query(models.ListQuery)
    found = await request.ask("list_sessions", tenant=wanted.tenant, ended=wanted.status == "ended")
    sessions = cast("list[dict[str, Any]]", found["sessions"])
    page, cursor = page_of([sandbox_of(item) for item in sessions], wanted)
    sandboxes = [models.Sandbox(**item) for item in page]
    await reply.tell(models.SandboxPage(sandboxes=sandboxes, cursor=cursor))


def page_of(
    sandboxes: list[dict[str, Any]], wanted: models.ListQuery
) -> tuple[list[dict[str, Any]], str | None]:
    """The sandboxes of one page, and the cursor for the next one."""
    after = _read_cursor(wanted.cursor) if wanted.cursor else None
    fits = [
        item
        for item in sandboxes
        if wanted.user_id in (None, item["user_id"])
        and wanted.conversation_id in (None, item["conversation_id"])
        and wanted.status in (None, item["status"])
        and (after is None or _place(item) > after)
    ]
    fits.sort(key=_place)
    page = fits[: wanted.limit]
    return page, _cursor(page[-1]) if len(fits) > len(page) else None


def _place(item: dict[str, Any]) -> tuple[float, str]:
    return item["created_at"], item["sandbox_id"]


def _cursor(item: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(_place(item)).encode()).decode()


def _read_cursor(cursor: str) -> tuple[float, str]:
    try:
        at, name = json.loads(base64.b64decode(cursor, b"-_", validate=True))
        if type(at) not in (int, float) or not isinstance(name, str):
            raise ValueError
    except (ValueError, TypeError):  # also of what is no base64, and no JSON
        raise Refusal(
            400, "invalid_request", "the cursor is not one of ours", hint="begin without one"
        ) from None
    return at, name


async def delete_sandbox(request: Request, reply: Reply) -> None:
    found = await request.ask("get_session", session_id=request.sandbox_id)
    await request.ask("destroy_session", session_id=request.sandbox_id)
    session = cast("dict[str, Any]", found["session"])
    ended = {**session, "phase": "ended", "ended_reason": "destroyed by its owner"}
    await _told(request, reply, ended)


async def pause_sandbox(request: Request, reply: Reply) -> None:
    await request.ask("pause_session", session_id=request.sandbox_id)
    await _told(request, reply)


async def resume_sandbox(request: Request, reply: Reply) -> None:
    await request.ask("resume_session", session_id=request.sandbox_id)
    await _told(request, reply)


async def extend_sandbox(request: Request, reply: Reply) -> None:
    asked = await request.body(models.Extend)
    found = await request.ask(
        "extend_session", session_id=request.sandbox_id, lifetime=asked.lifetime
    )
    await _told(request, reply, found["session"])


# What it may reach.


async def get_egress(request: Request, reply: Reply) -> None:
    found: dict[str, Any] = await request.ask("egress", session_id=request.sandbox_id)
    await reply.tell(models.Egress(**found))


async def replace_egress(request: Request, reply: Reply) -> None:
    asked = await request.body(models.ReplaceEgress)
    found: dict[str, Any] = await request.ask(
        "update_allowed_hosts", session_id=request.sandbox_id, hosts=asked.allowed_hosts
    )
    await _tell_allowed(reply, found)


async def change_egress(request: Request, reply: Reply) -> None:
    asked = await request.body(models.ChangeEgress)
    found: dict[str, Any] = await request.ask(
        "change_allowed_hosts", session_id=request.sandbox_id, add=asked.add, remove=asked.remove
    )
    await _tell_allowed(reply, found)


async def _tell_allowed(reply: Reply, found: dict[str, Any]) -> None:
    words = found["session"]["allowed_hosts"]
    await reply.tell(models.AllowedHosts(allowed_hosts=words, rules=found["hosts"]))


# What happened, and what it serves.


async def list_events(request: Request, reply: Reply) -> None:
    limit = request.query(models.EventsQuery).limit
    found: dict[str, Any] = await request.ask("events", session_id=request.sandbox_id, limit=limit)
    events = [json.loads(line) for line in found["events"]]
    size = sum(map(len, found["events"]))
    await reply.tell_large(models.Events(events=events, truncated=found["truncated"]), size)


async def list_ports(request: Request, reply: Reply) -> None:
    await request.ask("get_session", session_id=request.sandbox_id)  # 404 for one that is none
    found: dict[str, Any] = await request.ask("list_exposed", session_id=request.sandbox_id)
    ports = [models.Port(port=item["port"], url=item["url"]) for item in found["services"]]
    await reply.tell(models.Ports(ports=ports))


async def expose_port(request: Request, reply: Reply) -> None:
    asked = await request.body(models.Expose)
    found: dict[str, Any] = await request.ask(
        "expose", session_id=request.sandbox_id, port=asked.port
    )
    port = models.Port(port=found["port"], url=found["url"], warning=found.get("warning", ""))
    await reply.tell(port)


async def unexpose_port(request: Request, reply: Reply) -> None:
    text = request.names["port"]
    port = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else 0
    if not 0 < port < 65536:
        raise Refusal(404, "not_exposed", "a port is a number from 1 to 65535")
    await request.ask("unexpose", session_id=request.sandbox_id, port=port)
    await list_ports(request, reply)


# Its tokens.


async def issue_token(request: Request, reply: Reply) -> None:
    asked = await request.body(models.IssueToken)
    found: dict[str, Any] = await request.ask(
        "issue_token", session_id=request.sandbox_id, **asked.model_dump(exclude_none=True)
    )
    await reply.tell(models.Token(**{name: found[name] for name in models.Token.model_fields}), 201)


async def revoke_tokens(request: Request, reply: Reply) -> None:
    await request.ask("get_session", session_id=request.sandbox_id)
    found: dict[str, Any] = await request.ask("revoke_tokens", session_id=request.sandbox_id)
    await reply.tell(models.Revoked(**found))
