"""The gateway's HTTP app: it checks credentials, and serves the routes.

A plain ASGI app. Every route needs a credential: web pages and sandboxes can reach loopback too.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from typing import NamedTuple

from k8e import access, admission, errors, metrics
from k8e._version import __version__
from k8e.access import HostPolicy
from k8e.audit import act
from k8e.audit.act import Act, AuditCaller
from k8e.auth import keys
from k8e.auth.keys import Unknown
from k8e.gateway import refusals
from k8e.gateway.http.mounts import MOUNTS, Message, MountClosed, Mounts, Receive, Scope, Send
from k8e.gateway.identity import LOCAL, UnknownPeer
from k8e.gateway.local import Known
from k8e.gateway.operations import ANY, USE_SESSION, Limit, NoRow, OperationDeclaration
from k8e.gateway.service import OPERATIONS, Gateway
from k8e.model import Principal, Role

log = logging.getLogger(__name__)

AGENT = Principal(LOCAL.name, frozenset({Role.AGENT}))
"""Who shows the token of the file: the local user, but no admin, since agents have this token."""
TEXT, JSON = "text/plain; charset=utf-8", "application/json"


class HttpRoute(NamedTuple):
    """A route, and the declaration whose roles and limit hold for it."""

    operation: OperationDeclaration
    mount: bool = False
    below: bool = False
    """Whether it has the paths below its own, too."""


_HEALTH = OperationDeclaration("healthz", ANY, NoRow.READS)
_NOTHING = OperationDeclaration("http", ANY, NoRow.READS)
"""Paths that lead nowhere."""
_DIALECT = USE_SESSION._replace(audit=NoRow.CALLS, limit=Limit.STREAMS)
ROUTES = {
    "/healthz": HttpRoute(_HEALTH),
    "/metrics": HttpRoute(OPERATIONS["metrics"]),
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
    """The answer to one request: knows how much of it was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = self.done = False

    async def send(self, message: Message) -> None:
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
        elif not self.done:
            body = b""
        else:
            return
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


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
        answer = HttpAnswer(send)
        route = route_of(scope["path"])
        peer = "{}:{}".format(*(scope.get("client") or ("", 0)))
        act.begin(Act(AuditCaller("", "http", peer), f"http {route}".strip()))
        refusal = access.judge_place(self._door, scope["headers"])
        if refusal is not None:
            self._gateway.refused(UnknownPeer(refusal.text))
            await answer.tell(refusal.status, refusal.text + "\n", connection="close")
            return
        try:
            async with self._known(scope, peer) as known:
                admission.admit_request(scope)
                act.begin(Act(known.caller, f"http {route}".strip()))
                await self._serve(route, known, scope, receive, answer)
        except (UnknownPeer, errors.K8eError) as error:
            self._gateway.refused(error)
            await _fail(answer, error)
        except MountClosed:
            await answer.tell(503, "The gateway ends this; try again.\n", retry_after="1")

    @contextlib.asynccontextmanager
    async def _known(self, scope: Scope, peer: str) -> AsyncGenerator[Known]:
        """Who calls, for as long as the credential is good."""
        shown = access.credential(scope["headers"])
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

    async def _metrics(self, principal: Principal, answer: HttpAnswer) -> None:
        found = await self._gateway.operations.find("metrics").run(principal, {})
        await answer.tell(200, found["text"], metrics.CONTENT_TYPE)


async def _fail(answer: HttpAnswer, error: Exception) -> None:
    status, text = refusals.describe(error)
    more: dict[str, str] = {}
    if status.http == errors.UNAUTHENTICATED.http:
        more = {"www_authenticate": "Bearer", "connection": "close"}
    elif status.http == errors.LimitExceeded.http_status:
        more = {"retry_after": "60", "connection": "close"}
    await answer.tell(status.http, f"{text}\n", TEXT, **more)
