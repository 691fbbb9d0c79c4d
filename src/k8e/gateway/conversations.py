"""Operations on conversations: each has one sandbox, whichever gateway is asked how often."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any, cast

from k8e import errors
from k8e.gateway.arguments import text
from k8e.gateway.operations import AGENT, WritesRow, operation
from k8e.gateway.tokens import TokenDesk
from k8e.model import Phase, Principal, Session
from k8e.sessions.conversations import CONVERSATION_LABEL, USER_LABEL
from k8e.sessions.service import Sessions

MAX_TRIES = 3
"""To open a conversation whose sandbox ends again and again meanwhile."""
_NOT_CHOSEN = frozenset(("session_id", "request_id", "labels", "tenant"))
"""Fields of a session that a conversation decides."""


class ConversationCalls:
    """The operation that gives a conversation its sandbox."""

    def __init__(self, desk: TokenDesk, sessions: Sessions, namespace: str) -> None:
        """``namespace`` is the tenant of conversations that name none."""
        self._desk = desk
        self._sessions = sessions
        self._namespace = namespace

    @operation(
        roles=AGENT,
        audit=WritesRow("conversation.opened", ("conversation_id", "user_id"), ("session_id",)),
        session="",
    )
    async def open_conversation(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """The sandbox of a conversation, made if it has none, and a token for it."""
        conversation_id, user_id = text(call, "conversation_id"), text(call, "user_id")
        tenant = text(call, "tenant", optional=True) or self._namespace
        asked = _asked(call.get("spec"))
        fields: dict[str, Any] = {
            **asked,
            "tenant": tenant,
            "labels": {CONVERSATION_LABEL: conversation_id, USER_LABEL: user_id},
        }
        known, owner, options = self._desk.conversations, principal.name, _digest(asked)
        for _ in range(MAX_TRIES):
            session_id = await known.session_id(owner, tenant, conversation_id, user_id, options)
            try:
                session, made = await self._open(principal, session_id, fields)
            except Exception:  # else it would keep what was asked for, and refuse all else
                with contextlib.suppress(errors.StoreUnreachable):
                    await known.let_go(owner, tenant, conversation_id, session_id)
                raise
            if made and not await known.holds(
                owner, tenant, conversation_id, user_id, options, session_id
            ):
                with contextlib.suppress(errors.SessionNotFound):  # another caller has done it
                    await self._sessions.destroy(principal, session_id)
                continue
            if session.phase is not Phase.ENDED:
                issued = await self._desk.issue(session)
                return {
                    "session": session.to_json(),
                    "session_id": session.session_id,
                    "created": made,
                    "token": issued.token,
                    "token_expires_at": issued.grant.expires_at,
                    "warning": self._sessions.warning(session),
                }
        raise errors.Conflict(
            f"the sandbox of conversation {conversation_id} ends again and again",
            hint="try again; its events say why it ended",
        )

    async def _open(
        self, principal: Principal, session_id: str, fields: dict[str, Any]
    ) -> tuple[Session, bool]:
        """The session of this id, and whether this call made it."""
        known = await self._sessions.requested(principal, session_id)
        if known is None:
            # The request id is what makes one of all that ask at once, on any gateway.
            chosen = {**fields, "session_id": session_id, "request_id": session_id}
            spec = await self._sessions.templates.specify(chosen)
            try:
                return await self._sessions.create(principal, spec), True
            except errors.Conflict:  # somebody asked for it differently, and was quicker
                known = await self._sessions.requested(principal, session_id)
                if known is None:
                    raise
        return known, False


def _asked(spec: Any) -> dict[str, Any]:
    """What the sandbox is to be like."""
    if spec is None:
        return {}
    if not isinstance(spec, dict) or not _NOT_CHOSEN.isdisjoint(cast("dict[str, Any]", spec)):
        raise errors.InvalidRequest("spec must say what the sandbox is like, and no more")
    return cast("dict[str, Any]", spec)


def _digest(asked: dict[str, Any]) -> str:
    """What says whether two callers ask for the same; empty if they ask for nothing special."""
    if not asked:
        return ""
    try:
        plain = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError):
        raise errors.InvalidRequest("spec must be a value of JSON") from None
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()
