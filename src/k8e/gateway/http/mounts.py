"""Dialects in the HTTP app: each is loaded when it is first used, and lives apart for each caller.

A dialect is known here by its path and the name of its module alone. Its ``mount(dial)`` makes an
app for one caller; ``dial`` opens connections on that caller's behalf, and on nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol

from k8e import errors
from k8e.auth.tokens import REST_AUDIENCE, ROUTER_AUDIENCE
from k8e.egress.dns_answers import Share
from k8e.gateway import local
from k8e.gateway.local import Known
from k8e.gateway.service import Gateway
from k8e.model import Scope as TokenScope

log = logging.getLogger(__name__)

JSON = "application/json"

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class DialectMount(NamedTuple):
    """The module of a dialect, and which paths are its own."""

    module: str
    below: bool = False
    """Whether every path below its own is the dialect's too; it answers those that lead nowhere."""
    conversations: bool = False
    """Whether programs of the gateway's own user are let in where K8E_HTTP_TRUST_LOCAL says so; its
    errors are problems (RFC 9457)."""
    audience: str = ""
    """The audience of tokens of sandboxes that are good for it; empty if none are."""


MOUNTS = {
    "/sandbox": DialectMount(
        "k8e.rest.http", below=True, conversations=True, audience=REST_AUDIENCE
    ),
    "/mcp": DialectMount("k8e.mcp.http"),
    "/a2a": DialectMount("k8e.a2a.http"),
    "/agent-sandbox": DialectMount("k8e.agent_sandbox.http", below=True, audience=ROUTER_AUDIENCE),
}
"""The dialects by their paths, which end without a slash."""
DOCUMENTS = {
    "/.well-known/agent-card.json": "k8e.a2a.card",
    "/a2a/.well-known/agent-card.json": "k8e.a2a.card",
    "/openapi.json": "k8e.rest.openapi",
    "/docs": "k8e.rest.page",
}
"""What anybody may read, by path: ``document(host)`` of a module makes it for a caller that names
us ``host``, as JSON unless its ``CONTENT_TYPE`` says otherwise. It depends on nothing else, and so
tells strangers nothing."""
MAX_REQUESTS = 256
"""Requests of one caller under way, streams included."""
MAX_ALL_REQUESTS = 512
"""Of all callers: a part of the connections that there are. One gets half of them at most, two get
a third each, and so on."""
MAX_SCOPED = 128
"""Mounts of callers with tokens that are kept for their next request."""
LEAST_REQUESTS = 8
"""What each caller may have under way, however many others have come before."""
CLOSE_SECONDS = 20.0
"""For a dialect that ends: it may have sessions to destroy."""


class MountedDialect(Protocol):
    """The ASGI app that the module of a dialect makes for one caller."""

    def running(self) -> contextlib.AbstractAsyncContextManager[None]: ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class MountName(NamedTuple):
    """Whose mount of which dialect."""

    path: str
    owner: str
    scope: TokenScope | None
    """What its caller may do there, if it came with a token."""


class MountClosed(Exception):
    """The mount was closed while it answered."""


class Mount:
    """A dialect for one caller, in a task of its own: its tasks must end where they began."""

    def __init__(self, dialect: MountedDialect, share: Share) -> None:
        """``share`` is of the requests that all mounts have under way."""
        self._dialect = dialect
        self._share = share
        self._ready = asyncio.Event()
        self._over = asyncio.Event()
        self._requests: dict[asyncio.Timeout, bool] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            async with self._dialect.running():
                self._ready.set()
                await self._over.wait()
        except Exception:
            log.exception("a dialect of the HTTP endpoint failed")
        finally:
            self._over.set()
            self._ready.set()

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._requests

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; Ended if the mount is closed first."""
        await self._ready.wait()
        if self.ended:
            raise MountClosed
        held = len(self._requests)
        if not self._share.allows(held):
            raise errors.LimitExceeded(
                f"{held} requests of this caller are under way; it may have {MAX_REQUESTS} at the "
                f"most, and fewer while others have many",
                hint="end some of them",
            )
        async with self._under_way(stream=scope["method"] == "GET"):
            await self._dialect(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _under_way(self, *, stream: bool) -> AsyncGenerator[None]:
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._requests[limit] = stream
                self._share.take()
                self._idle.clear()
                try:
                    yield
                finally:
                    del self._requests[limit]
                    self._share.give_back()
                    if all(self._requests.values()):
                        self._idle.set()
        except TimeoutError:
            if not limit.expired():
                raise
            raise MountClosed from None

    def _end(self, *, streams: bool) -> None:
        now = asyncio.get_running_loop().time()
        for limit, stream in list(self._requests.items()):
            if stream == streams and not limit.expired():  # it may be on its way out
                limit.reschedule(now)

    async def close(self, grace: float = 0) -> None:
        """End it; requests that will be answered may take ``grace`` seconds, streams none."""
        self._end(streams=True)
        if grace:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._idle.wait()
        self._end(streams=False)
        self._over.set()
        _, late = await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        for task in late:
            task.cancel()


class Mounts:
    """All of them, by path and by the caller's name."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._share = Share(MAX_ALL_REQUESTS, MAX_REQUESTS, LEAST_REQUESTS)
        self._loading = asyncio.Lock()
        self._open: dict[MountName, Mount] = {}
        self._closed = False
        gateway.keys.on_end.append(lambda key: self.drop(key.owner))

    async def find(self, path: str, known: Known) -> Mount:
        """The mount of a caller, made now if need be.

        Raises:
            NotImplementedYet: its packages are not installed.
        """
        name = MountName(path, known.principal.name, known.principal.scope)
        async with self._loading:
            if self._closed:
                raise MountClosed
            if name.scope is not None:
                self._make_room(name)
            if name not in self._open or self._open[name].ended:
                make = (await _load(MOUNTS[path].module)).mount

                async def dial() -> socket.socket:
                    return await local.inside(self._gateway, known)

                self._open[name] = Mount(make(dial), self._share)
            return self._open[name]

    def _make_room(self, wanted: MountName) -> None:
        """Close mounts of tokens that are idle, the oldest first, and let the wanted one be new."""
        if wanted in self._open:
            self._open[wanted] = self._open.pop(wanted)
            return
        scoped = [name for name in self._open if name.scope is not None]
        idle = [name for name in scoped if self._open[name].idle]
        for name in idle[: max(0, len(scoped) + 1 - MAX_SCOPED)]:
            self._gateway.spawn(self._open.pop(name).close())

    def drop(self, owner: str) -> None:
        """Close the mounts of a caller whose credential is no longer valid."""
        for name in [name for name in self._open if name.owner == owner]:
            self._gateway.spawn(self._open.pop(name).close())

    async def close(self, grace: float) -> None:
        self._closed = True
        left, self._open = list(self._open.values()), {}
        await asyncio.gather(*(mount.close(grace) for mount in left))


async def document(path: str, host: str) -> tuple[str, str]:
    """One of :data:`DOCUMENTS`, and its type."""
    module = await _load(DOCUMENTS[path])
    return module.document(host), getattr(module, "CONTENT_TYPE", JSON)


async def _load(module: str) -> Any:
    try:
        return await asyncio.to_thread(importlib.import_module, module)
    except ImportError as error:
        raise errors.NotImplementedYet(
            f"a part of this endpoint is missing: {error}", hint=errors.install_extra("gateway")
        ) from None
