"""Tokens of conversations: issued, renewed in their sandboxes, revoked, and recognised in calls.

The stores, PyJWT and the keys are opened with the first conversation or token: most gateways never
see one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

from k8e import errors
from k8e.auth import keys, tokens
from k8e.auth.keys import Keys
from k8e.auth.tokens import (
    REST_AUDIENCE,
    Grant,
    Issued,
    KeyRing,
    SharedSecret,
    Signer,
    Tokens,
)
from k8e.errors import TokenRefused
from k8e.gateway.arguments import seconds, text
from k8e.gateway.operations import (
    ADMIN,
    AGENT,
    AGENT_OR_ADMIN,
    PUBLIC,
    Limit,
    NoRow,
    WritesRow,
    operation,
)
from k8e.gateway.stores import Stores
from k8e.model import Phase, Principal, Role, Scope, Session, check_id, check_tenant
from k8e.sessions.conversations import (
    CONVERSATION_LABEL,
    USER_LABEL,
    Conversations,
    check_name,
)
from k8e.sessions.service import Sessions
from k8e.settings import Settings

log = logging.getLogger(__name__)

READING = frozenset({"get_session", "egress", "events"})
USING = READING | frozenset(
    "exec signal execs read write list stat remove rename mkdir issue_token".split()
)
"""What the token of an answer allows: everything in the sandbox, but neither its life nor what it
may reach."""
MAX_AUDIENCE = 128
EXPIRY_SLACK = tokens.LEEWAY
"""Seconds beyond its end that an answer to a request with a token may take."""
STOP_SECONDS = 5.0
RETRY_SECONDS = 30.0
"""After which the token of a sandbox that did not take it is renewed again."""


class TokenDesk:
    """Tokens and conversations of one gateway."""

    def __init__(self, settings: Settings, stores: Stores, sessions: Sessions) -> None:
        self._settings = settings
        self._stores = stores
        self._sessions = sessions
        self._opened: Tokens | None = None
        self._conversations: Conversations | None = None
        self._store_closers: list[Callable[[], None]] = []
        self._used: dict[asyncio.Timeout, Grant] = {}
        self._issued: set[str] = set()  # for sessions without a conversation, by their ids
        self.on_revoke: list[Callable[[str], None]] = []
        """Called with each subject whose tokens were revoked here."""
        self.namespace = settings.sandbox_namespace
        self.ttl = tokens.parse_ttl(settings.token_ttl)
        # At the start, so that a key that anybody can guess keeps a gateway from starting.
        secret = settings.token_signing_key
        self._secret: Signer | None = SharedSecret(secret) if secret else None

    @property
    def conversations(self) -> Conversations:
        if self._conversations is None:
            store = self._stores.conversations(self._settings.data_dir)
            self._store_closers.append(store.close)
            self._conversations = Conversations(store, self._sessions.find)
        return self._conversations

    @property
    def tokens(self) -> Tokens:
        if self._opened is None:
            store = self._stores.tokens(self._settings.data_dir)
            self._store_closers.append(store.close)
            self._opened = Tokens(self._secret or KeyRing(store), store, ttl=self.ttl)
        return self._opened

    def close(self) -> None:
        for close in self._store_closers:
            close()

    async def issue(
        self,
        session: Session,
        *,
        operations: frozenset[str] = USING,
        audience: str = REST_AUDIENCE,
        ttl: float = 0,
    ) -> Issued:
        """A token for one sandbox."""
        if CONVERSATION_LABEL not in session.spec.labels:
            self._issued.add(session.session_id)
        return await self.tokens.mint(grant_of(session, operations, audience), ttl)

    async def revoke(self, name: str) -> None:
        """Refuse all tokens of a subject that were issued until now."""
        await self.tokens.revoke(name)
        now = asyncio.get_running_loop().time()
        for limit, grant in list(self._used.items()):
            if name in grant.subjects() and not limit.expired():
                limit.reschedule(now)
        self.tell_revoked(name)

    def tell_revoked(self, name: str) -> None:
        """Say that the tokens of a subject are no longer good here."""
        for tell in self.on_revoke:
            tell(name)

    async def recognise(self, token: str, audience: str = REST_AUDIENCE) -> tuple[Principal, Grant]:
        """Who calls with a token, and what it says; TokenRefused if it is not for this audience."""
        grant = await self.tokens.verify(token, audience)
        session = self._sessions.find(grant.sandbox_id, grant.owner)
        if session is None or session.phase is Phase.ENDED:
            raise TokenRefused("its sandbox has ended")
        if grant.issued_at < session.created_at - tokens.LEEWAY:
            raise TokenRefused("it is for an earlier sandbox of this id")
        scope = Scope(grant.sandbox_id, grant.operations)
        return Principal(grant.owner, frozenset({Role.AGENT}), scope=scope), grant

    @contextlib.asynccontextmanager
    async def while_good(self, grant: Grant) -> AsyncGenerator[None]:
        """A request with a token, which ends with it: when it expires, or is revoked here."""
        limit = asyncio.timeout(max(0.0, grant.expires_at - time.time()) + EXPIRY_SLACK)
        try:
            async with limit:
                self._used[limit] = grant
                try:
                    yield
                finally:
                    del self._used[limit]
        except TimeoutError:
            if not limit.expired():
                raise
            how = "was revoked" if time.time() < grant.expires_at else "has expired"
            raise TokenRefused(f"the token {how} meanwhile") from None

    def forget(self, session: Session) -> bool:
        """Note that a session has ended; whether there may be tokens of it."""
        known = session.session_id in self._issued
        self._issued.discard(session.session_id)
        return known or CONVERSATION_LABEL in session.spec.labels

    async def evict(self, owner: str) -> None:
        """Forget the conversations of an owner that is gone; its tokens go with its sessions."""
        known = self._settings.data_dir / "conversations.db"
        if self._stores.shared is not None or known.exists():
            await self.conversations.evict(owner)


def grant_of(session: Session, operations: frozenset[str], audience: str) -> Grant:
    """What a token for a session says."""
    labels: Mapping[str, str] = session.spec.labels
    return Grant(
        owner=session.owner,
        tenant=session.spec.tenant,
        user_id=labels.get(USER_LABEL, ""),
        conversation_id=labels.get(CONVERSATION_LABEL, ""),
        sandbox_id=session.session_id,
        audience=audience,
        operations=operations,
    )


def has_token(session: Session) -> bool:
    """Whether a sandbox finds a token in itself: only one of a conversation, and no sub-agent."""
    return CONVERSATION_LABEL in session.spec.labels and not session.parent


class SandboxTokens:
    """Gives each sandbox of a conversation its own token, and renews it there in time."""

    def __init__(self, desk: TokenDesk, sessions: Sessions) -> None:
        self._desk = desk
        self._sessions = sessions
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        sessions.give_tokens(self._first)
        sessions.on_end.append(self._ended)
        desk.on_revoke.append(self._revoked)
        sessions.events.observers.append(self._on_event)

    def start(self) -> None:
        """Renew the tokens of sandboxes that were adopted: nobody knows how old theirs are."""
        for session in self._sessions.alive():
            if has_token(session):
                self._spawn(session)

    async def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._tasks:  # among them are revocations
            _, late = await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
            for task in late:
                task.cancel()

    async def _first(self, session: Session) -> str:
        """The token that a new sandbox begins with."""
        if not has_token(session):
            return ""
        issued = await self._desk.issue(session, operations=READING)
        self._schedule(session, self._desk.ttl / 2)
        return issued.token

    def _schedule(self, session: Session, delay: float) -> None:
        if (known := self._timers.pop(session.session_id, None)) is not None:
            known.cancel()
        loop = asyncio.get_running_loop()
        self._timers[session.session_id] = loop.call_later(delay, self._spawn, session)

    def _spawn(self, session: Session) -> None:
        task = asyncio.create_task(self._renew(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self, session: Session) -> None:
        self._timers.pop(session.session_id, None)
        now = self._sessions.find(session.session_id, session.owner)
        if now is None or now.phase in (Phase.ENDED, Phase.PAUSED):
            return  # a paused one gets it when it is resumed
        try:
            issued = await self._desk.issue(now, operations=READING)
            if not await self._sessions.renew_token(now.session_id, issued.token):
                return
        except (errors.K8eError, OSError, sqlite3.Error) as error:
            log.warning("the token in session %s is not renewed: %s", now.session_id, error)
            self._schedule(now, RETRY_SECONDS)
        else:
            self._schedule(now, self._desk.ttl / 2)

    def _on_event(self, session: Session, kind: str, *_: object) -> None:
        if kind == "session.resumed" and has_token(session):
            self._spawn(session)

    def _revoked(self, name: str) -> None:
        """Sandboxes whose own tokens went with the others get new ones."""
        for session in self._sessions.alive():
            if has_token(session) and name in grant_of(session, READING, "").subjects():
                self._spawn(session)

    def _ended(self, session: Session) -> None:
        if (timer := self._timers.pop(session.session_id, None)) is not None:
            timer.cancel()
        if self._desk.forget(session):
            task = asyncio.create_task(self._revoke(session))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _revoke(self, session: Session) -> None:
        """Every gateway refuses them from now on, also one that does not know yet of the end."""
        name = tokens.subject("sandbox", session.owner, session.session_id)
        try:
            await self._desk.tokens.revoke(name)
        except errors.StoreUnreachable:
            log.warning("tokens of session %s end with it, unrevoked", session.session_id)


class TokenCalls:
    """Operations on tokens."""

    def __init__(self, desk: TokenDesk, sessions: Sessions) -> None:
        self._desk = desk
        self._sessions = sessions

    @operation(
        roles=AGENT,
        audit=WritesRow("token.issued", ("session_id", "audience"), ("token_id", "operations")),
    )
    async def issue_token(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """A token for a session; with a token, one that allows no more than that."""
        session = self._sessions.get(principal, text(call, "session_id"))
        if session.phase is Phase.ENDED:
            raise errors.SessionNotFound(
                f"session {session.session_id} not found (it ended: {session.ended_reason})"
            )
        allowed = principal.scope.operations if principal.scope is not None else ALLOWED
        operations = tokens.narrowed(allowed, _names(call)) if "operations" in call else None
        if operations is None:
            operations = USING & allowed
        audience = text(call, "audience", optional=True) or REST_AUDIENCE
        if len(audience) > MAX_AUDIENCE or not audience.isprintable():
            raise errors.InvalidRequest(f"an audience has 1 to {MAX_AUDIENCE} printable characters")
        ttl = min(seconds(call, "ttl") or self._desk.ttl, self._desk.ttl)
        issued = await self._desk.issue(session, operations=operations, audience=audience, ttl=ttl)
        return {
            "token": issued.token,
            "token_id": issued.grant.token_id,
            "expires_at": issued.grant.expires_at,
            "operations": sorted(issued.grant.operations),
            "audience": audience,
            "session_id": session.session_id,
        }

    @operation(
        roles=AGENT_OR_ADMIN,
        audit=WritesRow(
            "token.revoked", ("session_id", "conversation_id", "user_id", "owner", "all"),
            needs_room=False,
        ),
    )  # fmt: skip
    async def revoke_tokens(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Refuse all tokens until now of a session, conversation, user or owner, or all of them.

        Only an admin may name another owner than itself, or ask for all.
        """
        owner = text(call, "owner", optional=True) or principal.name
        everything = call.get("all") is True
        if (everything or owner != principal.name) and Role.ADMIN not in principal.roles:
            raise errors.Denied(
                "only an admin may revoke tokens of others",
                hint="k8e sandbox api-key create NAME --role admin makes a key of one",
            )
        named = _subject(call, owner, self._desk.namespace)
        await self._desk.revoke(tokens.EVERYTHING if everything else named)
        return {"revoked_at": time.time()}

    @operation(roles=ADMIN, audit=WritesRow("token.key_rotated", ("at_once",), ("kid",)))
    async def rotate_token_key(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Sign with a new key soon; ``at_once`` revokes all tokens and forgets the old keys."""
        signer = self._desk.tokens.signer
        if not isinstance(signer, KeyRing):
            raise errors.InvalidRequest(
                "tokens are signed with TOKEN_SIGNING_KEY",
                hint="start the gateway with another one",
            )
        at_once = call.get("at_once") is True
        kid = await signer.rotate(at_once=at_once)
        if at_once:  # other gateways remember the old keys for a moment
            await self._desk.revoke(tokens.EVERYTHING)
        return {"kid": kid}

    @operation(roles=PUBLIC, audit=NoRow.READS, limit=Limit.NONE, session="")
    async def token_keys(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """The public keys with which tokens can be checked, as a JWKS."""
        return {"keys": await self._desk.tokens.signer.published()}


ALLOWED = USING | frozenset(
    "pause_session resume_session extend_session destroy_session update_allowed_hosts "
    "change_allowed_hosts expose unexpose list_exposed connect".split()
)
"""All that a token can allow."""


def _names(call: dict[str, Any]) -> list[str]:
    found: Any = call["operations"]
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):  # pyright: ignore[reportUnknownVariableType]
        raise errors.InvalidRequest("operations must be a list of names")
    return found  # pyright: ignore[reportUnknownVariableType]


def _subject(call: dict[str, Any], owner: str, namespace: str) -> str:
    """The one thing that a call names whose tokens are to be revoked."""
    session_id = text(call, "session_id", optional=True)
    conversation_id = text(call, "conversation_id", optional=True)
    user_id = text(call, "user_id", optional=True)
    if sum(map(bool, (session_id, conversation_id, user_id))) > 1:
        raise errors.InvalidRequest("name one of session_id, conversation_id and user_id")
    tenant = text(call, "tenant", optional=True) or namespace
    if session_id:
        return tokens.subject("sandbox", owner, check_id(session_id, "session id"))
    check_tenant(tenant)
    if conversation_id:
        check_name(conversation_id, "the conversation_id")
        return tokens.subject("conversation", owner, tenant, conversation_id)
    if user_id:
        check_name(user_id, "the user_id")
        return tokens.subject("user", owner, tenant, user_id)
    return tokens.subject("owner", owner)


def with_key(principal: Principal, issued_at: float, known: Keys) -> Principal:
    """A caller with a token: it counts against the key whose sandbox it is, and ends with it.

    Raises:
        TokenRefused: the key was deleted or has expired, or has another secret since then.
    """
    if not principal.name.startswith(keys.OWNER_PREFIX):
        return principal
    key = known.of_principal(principal)
    if key is None or issued_at < key.created_at:
        raise TokenRefused("the API key of its sandbox has ended, or was replaced since")
    return replace(keys.principal(key), roles=principal.roles, scope=principal.scope)
