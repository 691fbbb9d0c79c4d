"""Sessions of one MCP connection: its own, and others that it made.

A gateway knows the principal that calls, not the agent. So each connection has a set of sessions,
and can name no others. Clients without a connection have a set for each client name. With a tenant,
every connection of the server can use all of the tenant's sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

from k8e import errors
from k8e.client.results import SessionInfo
from k8e.mcp.client import ToolClient

T = TypeVar("T")
MAX_KNOWN = 10_000  # sessions of one connection; of more, the oldest can no longer be named
LIVING = ("active", "paused", "creating")
CLOSE_SECONDS = 10.0
MAX_CLIENTS = 64
"""Clients without a connection whose sessions are kept; of more, those that called longest ago
lose theirs.
"""
MAX_NAME = 200  # characters of a client's name
IDLE_TIMEOUT = 1800.0
"""Seconds that the session of a client without a connection lives unused: none of them says when it
leaves."""
CLIENT_SECONDS = 2 * IDLE_TIMEOUT
"""How long such a client is remembered; longer than its session, so that it learns of the end."""
_note: ContextVar[str] = ContextVar("note", default="")
"""A note about the session of a call. Each call has a task, and so a note, of its own: a note for
one agent must not be read by another.
"""


def take_note() -> str:
    """A note for the model about the session of this call, returned once."""
    note = _note.get()
    _note.set("")
    return note


class ConnectionSessions:
    """The sessions of one connection."""

    def __init__(self, client: ToolClient, *, idle_timeout: float = 0) -> None:
        self.client = client
        self._idle_timeout = idle_timeout
        self.tenant = client.tenant_id
        self._own = ""
        self._known: dict[str, None] = {}  # in the order in which they came
        self._making = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # that make or destroy sessions
        self._closed = False

    @property
    def own(self) -> str:
        """The session of calls that name none; empty before the first one."""
        return self._own

    @property
    def known(self) -> list[str]:
        return list(self._known)

    def add(self, session_id: str) -> str:
        """A session that this connection made."""
        self._known[session_id] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return session_id

    async def made(self, making: Awaitable[str]) -> str:
        """Note a session that is being made, even if no call waits for it any more."""
        return await asyncio.shield(self._start(self._take(making)))

    async def _take(self, making: Awaitable[str]) -> str:
        session_id = await making
        if self._closed and not self.tenant:
            await self._destroy(session_id)
            raise errors.Conflict("the connection has ended", hint="connect again")
        return self.add(session_id)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # waiters have it; other callers do not care

    async def _destroy(self, session_id: str) -> None:
        with contextlib.suppress(errors.K8eError, OSError):
            await self.client.destroy_session(session_id)

    def forget(self, session_id: str, note: str = "") -> None:
        self._known.pop(session_id, None)
        if self._own == session_id:
            self._own = ""
            _note.set(note)

    async def within(self, given: str, work: Callable[[str], Awaitable[T]]) -> T:
        """Work in the named session, or in the connection's own, made again if it is gone."""
        if given:
            return await work(await self.find(given))
        session_id = await self.default()
        try:
            return await work(session_id)
        except errors.SessionNotFound:
            self.forget(session_id, _replacement_note(session_id))
        except errors.SandboxDied:
            self.forget(session_id, _replacement_note(session_id))
            raise  # the program may have run
        return await work(await self.default())

    async def find(self, session_id: str) -> str:
        """The id, if this connection may use it."""
        if session_id in self._known:
            return session_id
        if self.tenant and (await self.client.get_session(session_id)).tenant_id == self.tenant:
            return self.add(session_id)
        raise unknown(session_id)

    async def default(self) -> str:
        """The connection's own session."""
        if self._own:
            return self._own
        async with self._making:
            if not self._own:
                self._own = await self.made(self._make())
        return self._own

    async def _make(self) -> str:
        if not self.tenant:
            return await self.client.create_session(idle_timeout=self._idle_timeout)
        for session in await self.client.list_sessions(self.tenant):
            if session.auto and session.phase in LIVING:
                return session.session_id
        # The gateway makes the standing session of a tenant when something runs in it.
        return (await self.client.run(":")).session_id

    async def listing(self) -> list[SessionInfo]:
        """The sessions that this connection can use."""
        found = await self.client.list_sessions(self.tenant)
        return [item for item in found if self.tenant or item.session_id in self._known]

    async def close(self) -> None:
        """Destroy the sessions that the connection made; a tenant's sessions stay."""
        self._closed = True
        left, self._known, self._own = list(self._known), {}, ""
        for session_id in () if self.tenant else left:
            await self._destroy(session_id)
        await self.settled()

    async def settled(self) -> None:
        """Wait for a bounded time until pending creations and removals are done."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)


class ClientDesks:
    """The sessions of clients without a connection, by the name that each client gives itself.

    The newest version of the protocol has no sessions: each request is by itself, and says only who
    the client is. All requests here have shown the same credential, so a client that takes the name
    of another one is the same principal, and takes nothing from other principals.
    """

    def __init__(self, client: ToolClient) -> None:
        self._client = client
        self._held: dict[str, _Held] = {}  # in the order in which they were used
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def use(self, name: str) -> Generator[ConnectionSessions]:
        """The sessions of a client, for one request; they are not closed meanwhile."""
        key = name if len(name) <= MAX_NAME else hashlib.sha256(name.encode()).hexdigest()
        held = self._held.pop(key, None) or _Held(
            ConnectionSessions(self._client, idle_timeout=IDLE_TIMEOUT)
        )
        self._held[key] = held
        held.requests += 1
        if held.timer is not None:
            held.timer.cancel()
        self._make_room()
        try:
            yield held.desk
        finally:
            held.requests -= 1
            if not held.requests:
                loop = asyncio.get_running_loop()
                held.timer = loop.call_later(CLIENT_SECONDS, self._drop, key)
                self._make_room()

    def _make_room(self) -> None:
        """Close the sets that were not used for longest, if there are too many."""
        idle = [key for key, held in self._held.items() if not held.requests]
        for key in idle[: max(0, len(self._held) - MAX_CLIENTS)]:
            self._drop(key)

    def _drop(self, key: str) -> None:
        held = self._held.pop(key)
        if held.timer is not None:
            held.timer.cancel()
        task = asyncio.ensure_future(held.desk.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for key in list(self._held):
            self._drop(key)
        if self._closing:
            await asyncio.wait(self._closing)


class _Held:
    """The sessions of one client, and how many requests use them now."""

    def __init__(self, desk: ConnectionSessions) -> None:
        self.desk = desk
        self.requests = 0
        self.timer: asyncio.TimerHandle | None = None


def unknown(session_id: str) -> errors.SessionNotFound:
    return errors.SessionNotFound(
        f"session {session_id[:80]} not found",
        hint="sandbox_list_sessions lists yours; leave session_id out to use this connection's own",
    )


def _replacement_note(session_id: str) -> str:
    return f"session {session_id} has ended, and its files with it; this is a new, empty one"
