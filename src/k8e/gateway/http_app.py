"""The gateway's HTTP app: who is let in, and the routes.

A plain ASGI app. Every route needs a credential: web pages and sandboxes can reach loopback too.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator

from k8e import admission, doors, errors, metrics
from k8e._version import __version__
from k8e.audit import acting
from k8e.audit.acting import Act, Caller
from k8e.auth import keys
from k8e.auth.keys import Unknown
from k8e.doors import Door
from k8e.gateway import roles
from k8e.gateway.http_mounts import MOUNTS, Ended, Message, Mounts, Receive, Scope, Send
from k8e.gateway.local import Known
from k8e.gateway.peers import LOCAL, Refusal
from k8e.gateway.service import Gateway
from k8e.model import Principal, Role

log = logging.getLogger(__name__)

AGENT = Principal(LOCAL.name, frozenset({Role.AGENT}))
"""Who shows the token of the file: the local user, but no admin, since agents have this token."""
TEXT, JSON = "text/plain; charset=utf-8", "application/json"
STATUS = {
    errors.Denied: 403,
    errors.LimitExceeded: 429,
    errors.NotImplementedYet: 501,
    errors.InvalidRequest: 400,
}


class Answer:
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

    def __init__(self, gateway: Gateway, door: Door) -> None:
        self._gateway = gateway
        self._door = door
        self._mounts = Mounts(gateway)
        self._routes = {"/healthz": self._health, "/metrics": self._metrics}

    async def close(self, grace: float) -> None:
        """End everything; answers under way may take ``grace`` seconds."""
        await self._mounts.close(grace)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = Answer(send)
        path = scope["path"].rstrip("/")
        route = path if path in (*MOUNTS, *self._routes) else ""
        peer = "{}:{}".format(*(scope.get("client") or ("", 0)))
        acting.begin(Act(Caller("", "http", peer), f"http {route}".strip()))
        refusal = doors.judge_place(self._door, scope["headers"])
        if refusal is not None:
            self._gateway.refused(Refusal(refusal.text))
            await answer.tell(refusal.status, refusal.text + "\n", connection="close")
            return
        try:
            async with self._known(scope, peer) as known:
                admission.admit_request(scope)
                acting.begin(Act(known.caller, f"http {route}".strip()))
                await self._serve(route, known, scope, receive, answer)
        except (Refusal, errors.K8eError) as error:
            self._gateway.refused(error)
            await _fail(answer, error)
        except Ended:
            await answer.tell(503, "The gateway ends this; try again.\n", retry_after="1")

    @contextlib.asynccontextmanager
    async def _known(self, scope: Scope, peer: str) -> AsyncGenerator[Known]:
        """Who calls, for as long as the credential is good."""
        shown = doors.credential(scope["headers"])
        if self._door.opens(shown):
            yield Known(AGENT, Caller(AGENT.name, "token", peer))
            return
        try:
            key = self._gateway.keys.of_secret(shown)
        except Unknown:
            raise self._stranger(peer) from None
        principal = keys.principal(key)
        try:
            async with self._gateway.keys.while_valid(key):
                yield Known(principal, Caller(principal.name, "key", peer))
        except Unknown as error:
            self._mounts.drop(principal.name)
            raise Refusal(str(error)) from None

    def _stranger(self, peer: str) -> Exception:
        address = peer.rpartition(":")[0]
        if not self._gateway.keys.attempts.failed(address):
            return errors.LimitExceeded(
                f"too many wrong credentials from {address}", hint="correct them, and wait a minute"
            )
        log.warning("refused an HTTP request from %s: its token is missing or wrong", address)
        return Refusal(doors.UNKNOWN.text)

    async def _serve(
        self, route: str, known: Known, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        if route in MOUNTS:
            roles.check_use(known.principal)
            self._gateway.streams.take(
                known.principal
            )  # what comes through it is counted by itself
            caller = known.caller._replace(peer=f"http {route}")
            mount = await self._mounts.find(route, known._replace(caller=caller))
            await mount.serve(scope, receive, answer.send)
            return
        # What a dialect does is counted call by call.
        self._gateway.rates.take(known.principal)
        if route not in self._routes:
            there = ", ".join((*self._routes, *MOUNTS))
            await answer.tell(404, f"There is nothing here; there is {there}.\n")
        elif scope["method"] not in ("GET", "HEAD"):
            await answer.tell(405, "Use GET.\n", allow="GET, HEAD")
        else:
            await self._routes[route](known.principal, answer)

    async def _health(self, principal: Principal, answer: Answer) -> None:
        told = {"status": "ok", "version": __version__}
        await answer.tell(200, json.dumps(told) + "\n", JSON)

    async def _metrics(self, principal: Principal, answer: Answer) -> None:
        roles.check(principal, "metrics")
        told = await self._gateway.call_metrics(principal, {})
        await answer.tell(200, told["text"], metrics.CONTENT_TYPE)


async def _fail(answer: Answer, error: Refusal | errors.K8eError) -> None:
    if isinstance(error, Refusal):
        await answer.tell(401, f"{error}\n", www_authenticate="Bearer", connection="close")
        return
    status = next((STATUS[kind] for kind in STATUS if isinstance(error, kind)), 500)
    more = {"retry_after": "60", "connection": "close"} if status == 429 else {}
    hint = f" ({error.hint})" if error.hint else ""
    await answer.tell(status, f"{error}{hint}\n", TEXT, **more)
