"""The gateway's HTTP app: it checks credentials, and serves the routes.

A plain ASGI app. Every route needs a credential, since web pages and sandboxes can reach loopback
too. The exception is documents that say how to authenticate, which are the same for everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from h11 import LocalProtocolError

from k8e import access, admission, errors, metrics
from k8e._version import __version__
from k8e.access import HostPolicy
from k8e.audit import act
from k8e.audit.act import Act, AuditCaller
from k8e.auth import keys
from k8e.auth.keys import Unknown
from k8e.auth.tokens import is_token
from k8e.errors import TokenRefused
from k8e.gateway import identity, refusals, tokens
from k8e.gateway.http import mounts
from k8e.gateway.http.mounts import (
    DOCUMENTS,
    MOUNTS,
    Message,
    MountClosed,
    Mounts,
    Receive,
    Scope,
    Send,
)
from k8e.gateway.identity import LOCAL, UnknownPeer
from k8e.gateway.local import Known
from k8e.gateway.operations import (
    ANY,
    ANYBODY,
    PUBLIC,
    USE_SESSION,
    Limit,
    NoRow,
    OperationDeclaration,
)
from k8e.gateway.service import OPERATIONS, Gateway
from k8e.http_connections import CUT_OFF
from k8e.model import Principal, Role

log = logging.getLogger(__name__)

AGENT = Principal(LOCAL.name, frozenset({Role.AGENT}))
"""Who shows the token of the file: the local user, but no admin, since agents have this token."""
TEXT, JSON = "text/plain; charset=utf-8", "application/json"
PROBLEM = "application/problem+json"
JWKS = "/.well-known/jwks.json"
REQUEST_HEADER = b"x-request-id"
REQUEST_KEY = "k8e.request_id"
"""Where dialects find the id of a request in its scope."""
END_SECONDS = 5.0
"""For a client to take the end of an answer that the gateway ends."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# What a page can send to another site without asking first, whatever its browser says of it.
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SIMPLE = ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded")


class HttpRoute(NamedTuple):
    """A route, and the declaration whose roles and limit hold for it."""

    operation: OperationDeclaration
    mount: bool = False
    below: bool = False
    """Whether it has the paths below its own, too."""


_HEALTH = OperationDeclaration("healthz", ANY, NoRow.READS)
_NOTHING = OperationDeclaration("http", ANY, NoRow.READS)
"""Paths that lead nowhere."""
_DOCUMENT = OperationDeclaration("public document", PUBLIC, NoRow.READS, Limit.NONE)
_DIALECT = USE_SESSION._replace(audit=NoRow.CALLS, limit=Limit.STREAMS)
ROUTES = {
    "/healthz": HttpRoute(_HEALTH),
    "/metrics": HttpRoute(OPERATIONS["metrics"]),
    JWKS: HttpRoute(OPERATIONS["token_keys"]),
    **{path: HttpRoute(_DOCUMENT) for path in DOCUMENTS},
    **{path: HttpRoute(_DIALECT, mount=True, below=MOUNTS[path].below) for path in MOUNTS},
}
"""Every route of the endpoint."""


def route_of(path: str) -> str:
    """The route that a path belongs to: its own, or else the longest that has the paths below it.

    Empty if it belongs to none.
    """
    path = path.rstrip("/")
    if path in ROUTES:
        return path
    above = (route for route in ROUTES if ROUTES[route].below and path.startswith(f"{route}/"))
    return max(above, key=len, default="")


class HttpAnswer:
    """The answer to one request: knows how much of it was sent, and says the request's id."""

    def __init__(self, send: Send, request_id: str, cut_off: Callable[[], None]) -> None:
        """``cut_off`` ends the connection, for an answer that cannot be ended otherwise."""
        self._send = send
        self._cut_off = cut_off
        self.request_id = request_id
        self.begun = self.done = False

    async def send(self, message: Message) -> None:
        if not self.begun:
            named = (REQUEST_HEADER, self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), named]}
        self.begun = True
        self.done = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)

    async def tell(self, status: int, text: str, kind: str = TEXT, **headers: str) -> None:
        """A whole answer; where another has begun, that one ends here."""
        body = text.encode("utf-8", "replace")
        if not self.begun:
            named = {"content-type": kind, "content-length": str(len(body)), **headers}
            fields = [(key.replace("_", "-").encode(), named[key].encode()) for key in named]
            await self.send({"type": "http.response.start", "status": status, "headers": fields})
            await self.send({"type": "http.response.body", "body": body, "more_body": False})
        elif not self.done:
            await self._end()

    async def _end(self) -> None:
        """End what has begun; its client may read nothing, or was promised more bytes."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, LocalProtocolError):
            self._cut_off()


class App:
    """Serves ``/healthz``, ``/metrics`` and the dialects."""

    def __init__(self, gateway: Gateway, door: HostPolicy) -> None:
        self._gateway = gateway
        self._door = door
        self._mounts = Mounts(gateway)
        self._answers = {"/healthz": self._health, "/metrics": self._metrics}

    async def close(self, grace: float) -> None:
        """End everything; answers under way may take ``grace`` seconds."""
        await self._mounts.close(grace)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = scope[REQUEST_KEY] = _request_id(scope)
        answer = HttpAnswer(send, request_id, scope.get("state", {}).get(CUT_OFF, _nothing))
        route = route_of(scope["path"])
        problems = route in MOUNTS and MOUNTS[route].conversations
        peer = "{}:{}".format(*(scope.get("client") or ("", 0)))
        act.begin(Act(AuditCaller("", "http", peer), f"http {route}".strip(), "", request_id))
        refusal = access.judge_place(self._door, scope["headers"])
        if refusal is not None:
            self._gateway.refused(UnknownPeer(refusal.text))
            text, kind = refusal.text + "\n", TEXT
            if problems:
                text, kind = _problem(refusal.status, "denied", refusal.text, request_id), PROBLEM
            await answer.tell(refusal.status, text, kind, connection="close")
            return
        if route in DOCUMENTS or route == JWKS:
            await self._publish(route, scope, answer)
            return
        try:
            async with self._known(scope, peer, route, trusting=problems) as known:
                admission.admit_request(scope)
                act.begin(Act(known.caller, f"http {route}".strip(), "", request_id))
                await self._serve(route, known, scope, receive, answer)
        except (UnknownPeer, errors.K8eError) as error:
            self._gateway.refused(error)
            await _fail(answer, error, problems=problems)
        except MountClosed:
            error = errors.GatewayUnreachable("the gateway ends this", hint="try again")
            await _fail(answer, error, problems=problems)

    @contextlib.asynccontextmanager
    async def _known(
        self, scope: Scope, peer: str, route: str, *, trusting: bool
    ) -> AsyncGenerator[Known]:
        """Who calls, for as long as the credential is good.

        ``trusting`` routes may take our own user without any.
        """
        shown = access.credential(scope["headers"])
        audience = MOUNTS[route].audience if route in MOUNTS else ""
        if audience and is_token(shown):
            async with self._with_token(shown, peer, audience) as known:
                yield known
            return
        if trusting and self._gateway.settings.http_trust_local and _shows_nothing(scope):
            self._check_own_program(scope)
            yield Known(AGENT, AuditCaller(AGENT.name, "loopback", peer))
            return
        if self._door.opens(shown):
            yield Known(AGENT, AuditCaller(AGENT.name, "token", peer))
            return
        try:
            key = self._gateway.keys.of_secret(shown)
        except Unknown:
            raise self._stranger(peer) from None
        principal = keys.principal(key)
        try:
            async with self._gateway.keys.while_valid(key):
                yield Known(principal, AuditCaller(principal.name, "key", peer))
        except Unknown as error:
            self._mounts.drop(principal.name)
            raise UnknownPeer(str(error)) from None

    @contextlib.asynccontextmanager
    async def _with_token(self, shown: str, peer: str, audience: str) -> AsyncGenerator[Known]:
        """A caller with a token of a sandbox, for as long as that is good."""
        if self._gateway.tokens is None:
            raise TokenRefused("this gateway has no tokens")
        try:
            principal, grant = await self._gateway.tokens.recognise(shown, audience)
            principal = tokens.with_key(principal, grant.issued_at, self._gateway.keys)
        except TokenRefused as error:
            error.hint = error.hint or (
                "open the conversation again, which gives a new token; or show the API key"
            )
            raise
        async with self._gateway.tokens.while_good(grant):
            yield Known(principal, AuditCaller(principal.name, "conversation-token", peer))

    def _check_own_program(self, scope: Scope) -> None:
        """Refuse whatever is no program of the gateway's own user on this machine.

        A page could make the browser of that user call us. It cannot keep the browser from saying
        so, and it cannot send JSON, or raw bytes, without asking first.
        """
        names = {name.lower() for name, _ in scope["headers"]}
        if b"origin" in names or any(name.startswith(b"sec-fetch-") for name in names):
            raise UnknownPeer(
                "without a credential, a request with Origin or Sec-Fetch headers is refused: web "
                "pages send them, and so does fetch of Node.js"
            )
        kind = access.content_type(scope["headers"])
        if kind in _SIMPLE:
            raise UnknownPeer(
                f"without a credential, a body of the type {kind} is refused: use application/json"
            )
        client, server = scope.get("client"), scope.get("server")
        if scope["scheme"] != "http" or not client or not server or not server[1]:
            raise UnknownPeer(access.UNKNOWN.text)
        ends = identity.endpoint(*client[:2]), identity.endpoint(server[0], server[1])
        identity.identify_peer(*ends)

    def _stranger(self, peer: str) -> Exception:
        address = peer.rpartition(":")[0]
        if not self._gateway.keys.attempts.failed(address):
            return errors.LimitExceeded(
                f"too many wrong credentials from {address}", hint="correct them, and wait a minute"
            )
        log.warning("refused an HTTP request from %s: its token is missing or wrong", address)
        return UnknownPeer(access.UNKNOWN.text)

    async def _serve(
        self, route: str, known: Known, scope: Scope, receive: Receive, answer: HttpAnswer
    ) -> None:
        found = ROUTES.get(route) or HttpRoute(_NOTHING)
        self._gateway.operations.admit(known.principal, found.operation)
        if found.mount:
            caller = known.caller._replace(peer=f"http {route}")
            mount = await self._mounts.find(route, known._replace(caller=caller))
            await mount.serve(scope, receive, answer.send)
        elif not route:
            await answer.tell(404, f"There is nothing here; there is {', '.join(ROUTES)}.\n")
        elif scope["method"] not in ("GET", "HEAD"):
            await answer.tell(405, "Use GET.\n", allow="GET, HEAD")
        else:
            await self._answers[route](known.principal, answer)

    async def _health(self, principal: Principal, answer: HttpAnswer) -> None:
        found = {"status": "ok", "version": __version__}
        await answer.tell(200, json.dumps(found) + "\n", JSON)

    async def _publish(self, route: str, scope: Scope, answer: HttpAnswer) -> None:
        """Answer with what anybody may read; what they show us is not looked at."""
        if scope["method"] not in ("GET", "HEAD"):
            await answer.tell(405, "Use GET.\n", allow="GET, HEAD", connection="close")
            return
        safe = {"cache_control": "no-store", "x_content_type_options": "nosniff"}
        if route == JWKS:
            try:
                found = await self._gateway.operations.find("token_keys").run(ANYBODY, {})
            except errors.K8eError as error:
                await _fail(answer, error, problems=True)
                return
            safe["cache_control"] = "public, max-age=60"
            await answer.tell(200, json.dumps(found) + "\n", JSON, **safe)
            return
        text, kind = await mounts.document(route, access.host_of(scope["headers"]))
        if kind != JSON:
            safe["content_security_policy"] = PAGE_POLICY
        await answer.tell(200, text, kind, **safe)

    async def _metrics(self, principal: Principal, answer: HttpAnswer) -> None:
        found = await self._gateway.operations.find("metrics").run(principal, {})
        await answer.tell(200, found["text"], metrics.CONTENT_TYPE)


async def _fail(answer: HttpAnswer, error: Exception, *, problems: bool = False) -> None:
    status, text = refusals.describe(error)
    more: dict[str, str] = {}
    if status.http == errors.UNAUTHENTICATED.http:
        more = {"www_authenticate": "Bearer", "connection": "close"}
    elif status.http == errors.LimitExceeded.http_status:
        more = {"retry_after": "60", "connection": "close"}
    elif status.http == errors.GatewayUnreachable.http_status:
        more = {"retry_after": "1"}
    if not problems:
        await answer.tell(status.http, f"{text}\n", TEXT, **more)
        return
    known = isinstance(error, errors.K8eError)
    message, hint = (error.message, error.hint) if known else (text, "")
    if status.http == errors.UNAUTHENTICATED.http and not hint:
        hint = "send 'Authorization: Bearer ' and an API key (k8e sandbox api-key create NAME)"
    body = _problem(status.http, status.code, message, answer.request_id, hint=hint)
    await answer.tell(status.http, body, PROBLEM, **more)


def _problem(status: int, code: str, detail: str, request_id: str, *, hint: str = "") -> str:
    """An error of a dialect with problems, from before that dialect was reached."""
    told = {"title": http.HTTPStatus(status).phrase, "status": status, "detail": detail}
    return json.dumps({**told, "code": code, "hint": hint, "request_id": request_id}) + "\n"


def _request_id(scope: Scope) -> str:
    """The id that a client chose for its request, if it is a plain one; else a new one."""
    given = [value for name, value in scope["headers"] if name.lower() == REQUEST_HEADER]
    chosen = given[0].decode("latin-1") if len(given) == 1 else ""
    return chosen if _REQUEST_ID.fullmatch(chosen) else f"req-{secrets.token_hex(8)}"


def _nothing() -> None:
    """Do nothing: a server that cannot cut connections off ends them itself."""


def _shows_nothing(scope: Scope) -> bool:
    """Whether a request comes without any credential, also without a wrong one."""
    return not any(name.lower() == b"authorization" for name, _ in scope["headers"])
