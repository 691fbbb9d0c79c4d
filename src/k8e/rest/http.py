"""The app of REST, for one caller."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from urllib.parse import unquote_to_bytes

from starlette.types import Receive, Scope, Send

from k8e.client.async_driver import Dial
from k8e.http_connections import CUT_OFF
from k8e.model import check_id
from k8e.rest import routes
from k8e.rest.bodies import Left
from k8e.rest.client import GatewayCalls
from k8e.rest.problems import Refusal
from k8e.rest.requests import Reply, Request
from k8e.rest.routes import Route

log = logging.getLogger(__name__)


class App:
    """Serves ``/sandbox`` and what is below."""

    def __init__(self, dial: Dial) -> None:
        self._calls = GatewayCalls(dial)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Its connections end with the block; sandboxes stay."""
        try:
            yield
        finally:
            await self._calls.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        request_id = str(scope.get("k8e.request_id", ""))
        method: str = scope["method"]
        shown = "?"
        try:
            route, names = _find(scope)
            shown = route.path
            await route.handler(Request(self._calls, scope, receive, names), reply)
        except Left:
            reply.status = reply.status or 499
        except Exception as error:
            with contextlib.suppress(Left):
                await reply.refuse(error, request_id)
        if not reply.done and (cut_off := scope.get("state", {}).get(CUT_OFF)) is not None:
            # Else the connection would wait until its client has read all that was sent.
            cut_off()
        log.info("%s %s %d, request %s", method, shown, reply.status, request_id)


def _find(scope: Scope) -> tuple[Route, dict[str, str]]:
    """The route of a request, and the parts of its path that have names."""
    found = routes.find(_segments(scope))
    if not found.routes:
        raise Refusal(
            404, "not_found", "there is nothing here", hint="GET /openapi.json lists what there is"
        )
    route = found.routes.get(scope["method"])
    if route is None:
        allowed = ", ".join(sorted(found.routes))
        raise Refusal(
            405, "method_not_allowed", f"this path has {allowed}",
            headers=[(b"allow", allowed.encode())],
        )  # fmt: skip
    if (sandbox_id := found.names.get("sandbox_id")) is not None:
        _check_sandbox_id(sandbox_id)
    return route, found.names


def _check_sandbox_id(sandbox_id: str) -> None:
    """What cannot be an id is no sandbox of anybody's."""
    from k8e import errors

    try:
        check_id(sandbox_id, "sandbox_id")
    except errors.InvalidRequest:
        raise Refusal(
            404, errors.SessionNotFound.code, f"sandbox {sandbox_id[:80]!r} not found",
            hint="GET /sandbox lists yours",
        ) from None  # fmt: skip


def _segments(scope: Scope) -> list[str]:
    """The parts of a path as the client wrote them: an encoded slash is part of a name."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.partition(b"?")[0].removesuffix(b"/")
    return [unquote_to_bytes(part).decode("utf-8", "replace") for part in path.split(b"/")[1:]]


def mount(dial: Dial) -> App:
    """An app for one caller, on whose behalf ``dial`` connects to the gateway."""
    return App(dial)
