"""The router: from a request's headers to a sandbox of its caller, and back.

What leads to a sandbox differs: the links of this machine's gateway (:class:`LocalSandboxes`), or
the pods of a cluster (:mod:`k8e.agent_sandbox.cluster_router`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from k8e import errors
from k8e.agent_sandbox import python_runtime, sandboxd, status, target
from k8e.agent_sandbox.answers import Answer, Refusal, refusal_of
from k8e.agent_sandbox.bodies import Left, TooLarge
from k8e.agent_sandbox.claims import Claims
from k8e.agent_sandbox.client import InsideClient
from k8e.agent_sandbox.forward import forward
from k8e.agent_sandbox.paths import Outside
from k8e.agent_sandbox.python_runtime import PythonRuntime
from k8e.agent_sandbox.reach import LinkReach
from k8e.agent_sandbox.sandboxd import Sandboxd
from k8e.agent_sandbox.target import Target
from k8e.bounded_sockets import BoundedSocket
from k8e.http_connections import CUT_OFF, SWITCH
from k8e.http_headers import Headers

log = logging.getLogger(__name__)

MAX_KNOWN = 4096
"""Sandboxes whose namespace is remembered."""
EXPECTED = (Refusal, TooLarge, Outside, errors.K8eError, OSError)
HEALTH = "/healthz"


class Sandboxes(Protocol):
    """The sandboxes that a router leads one caller to."""

    async def check(self, asked: Target) -> None:
        """Refuse a sandbox that is not the caller's, or is not there."""
        ...

    async def serve(
        self, asked: Target, path: str, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        """Answer a request to a port of a sandbox."""
        ...


class Router:
    """Serves the sandboxes of one caller."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send, scope.get("state", {}).get(SWITCH))
        try:
            if path == HEALTH and scope["method"] == "GET":
                await answer.tell({"status": "ok"})
            else:
                await self._serve(path, scope, receive, answer)
        except Left:
            return
        except EXPECTED as error:
            if answer.begun:
                _cut_off(scope, error)
                return
            await answer.refuse(refusal_of(error))

    async def _serve(self, path: str, scope: Scope, receive: Receive, answer: Answer) -> None:
        asked = target.parse(scope["headers"])
        await self._sandboxes.check(asked)
        limit = asyncio.timeout(asked.seconds)
        try:
            async with limit:
                timed = _Timed(answer, limit)
                await self._sandboxes.serve(asked, path, scope, receive, timed)
        except TimeoutError:
            if not limit.expired():
                raise
            seconds = f"{asked.seconds:g}"
            raise Refusal(504, f"the sandbox did not answer within {seconds} seconds") from None


class LocalSandboxes:
    """Sandboxes of this machine's gateway.

    Both runtimes' routes are answered here; see :mod:`k8e.agent_sandbox.python_runtime` for why.
    """

    def __init__(self, client: InsideClient, claims: Claims) -> None:
        self._reach = LinkReach(client)
        self._claims = claims
        self._python = PythonRuntime(client)
        self._sandboxd = Sandboxd(client)
        self._namespaces: OrderedDict[str, str] = OrderedDict()

    async def serve(
        self, asked: Target, path: str, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        if asked.port == python_runtime.PORT and python_runtime.is_route(path):
            await self._python.serve(asked.sandbox, path, scope, receive, answer)
        elif asked.port == sandboxd.PORT and sandboxd.is_route(path):
            await self._sandboxd.serve(asked.sandbox, path, scope, receive, answer)
        else:
            await forward(self._reach.open(asked), path, scope, receive, answer)

    async def check(self, asked: Target) -> None:
        """Refuse a sandbox that is not the caller's, or of another namespace.

        What is remembered is never an admission: each operation asks the gateway again whose the
        session is.
        """
        known = self._namespaces.get(asked.sandbox)
        if known is None:
            try:
                session = await self._claims.session(asked.namespace, asked.sandbox)
            except status.ApiError:
                raise _unknown(asked) from None
            known = self._namespaces[asked.sandbox] = session.tenant_id
            if len(self._namespaces) > MAX_KNOWN:
                self._namespaces.popitem(last=False)
        if known != asked.namespace or asked.uid not in ("", asked.sandbox):
            raise _unknown(asked)


def _cut_off(scope: Scope, error: Exception) -> None:
    """End an answer in the middle."""
    cut_off = scope.get("state", {}).get(CUT_OFF)
    if cut_off is None:
        raise Broken from error
    log.debug("an answer was cut off: %s", error)
    cut_off()


class Broken(Exception):
    """An answer ended in the middle; its connection is cut off, so that the client notices."""


class _Timed(Answer):
    """An answer whose time counts only until it begins."""

    def __init__(self, answer: Answer, limit: asyncio.Timeout) -> None:
        super().__init__(answer.send, answer.switch)
        self._limit = limit

    async def send(self, message: Message) -> None:
        self._begin()
        await super().send(message)

    def switch(self, headers: Headers) -> BoundedSocket:
        self._begin()
        return super().switch(headers)

    def _begin(self) -> None:
        if not self.begun and not self._limit.expired():
            self._limit.reschedule(None)


def _unknown(asked: Target) -> Refusal:
    return Refusal(404, f"there is no sandbox {asked.sandbox} in the namespace {asked.namespace}")
