"""How a session ends: once, whoever asks for it, and with nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable

from k8e import errors
from k8e.audit import acting
from k8e.model import Session
from k8e.runtimes.base import NotRemoved
from k8e.sessions import witnessing
from k8e.sessions.children import Children
from k8e.sessions.events import Events
from k8e.sessions.live import Live
from k8e.sessions.network import Network
from k8e.sessions.store import Store

log = logging.getLogger(__name__)

BY_OWNER = "destroyed by its owner"
KEEP_ENDED = 24 * 3600.0  # seconds that an ended session can still be asked about


class Ender:
    """Ends sessions of ``live``, which is the gateway's own table of them."""

    def __init__(
        self,
        live: dict[str, Live],
        store: Store,
        network: Network,
        events: Events,
        children: Children,
    ) -> None:
        self._live = live
        self._store = store
        self._network = network
        self._events = events
        self._children = children
        self.on_end: list[Callable[[Session], None]] = []
        """Called with each session that has ended."""

    async def end(self, live: Live, reason: str) -> None:
        """End a session once, however many ask for it."""
        if live.ending is None:
            live.ending = asyncio.create_task(self._end(live, reason))
        await asyncio.shield(live.ending)

    async def _end(self, live: Live, reason: str) -> None:
        session_id = live.session.session_id
        if reason != BY_OWNER:
            acting.begin(None)  # a timer or a watcher: whoever started that does not do this
        log.info("session %s ends: %s", session_id, reason)
        live.stop()
        with contextlib.suppress(sqlite3.Error):  # a full disk keeps nobody from making room
            self._store.begin_end(session_id, reason)  # a gateway after us would go on with it
        try:
            await self._remove(live, reason)
        except NotRemoved as error:  # its owner is rid of it; somebody goes on with the rest
            live.left = error.message
        except Exception:
            # Its owner is rid of it; the next start of a gateway tries again to remove the rest.
            log.exception("not everything of session %s could be removed", session_id)
        finally:
            self._forget(live, reason)

    async def _remove(self, live: Live, reason: str) -> None:
        """End the sandbox and its network, whatever else fails on the way."""
        try:
            self._tell(live, reason)
            await self._children.end(live, reason, self.end)
        finally:
            try:
                async with live.turning:
                    await live.guest.kill()
            finally:
                await self._disconnect(live)

    async def _disconnect(self, live: Live) -> None:
        """Take its network away, also of one that resists its end: it shall reach nobody."""
        try:
            witnessing.note_rest(self._network, self._events, live)
        finally:
            await self._network.detach(live.session.sandbox_id)

    def _tell(self, live: Live, reason: str) -> None:
        """Note the limits that it met last, and tell whoever waits for it."""
        met = live.limits.tell(live.limits.news())
        witnessing.note_limits(self._events, live.session, met)
        for operation in list(live.running):
            try:
                operation.fail(errors.SandboxDied(reason))
            except Exception:  # one client's trouble is no other's
                log.exception("an operation of session %s", live.session.session_id)

    def _forget(self, live: Live, reason: str) -> None:
        session_id = live.session.session_id
        if self._live.get(session_id) is live:
            del self._live[session_id]
        live.leave()
        try:
            self._store.end(session_id, reason, time.time())
        except sqlite3.Error:  # the next gateway finds no sandbox, and ends it again
            log.exception("the end of session %s cannot be written down", session_id)
        self._events.end(live.session, reason)
        with contextlib.suppress(sqlite3.Error):
            self._store.forget_ended(time.time() - KEEP_ENDED, live.session.owner)
        for tell in self.on_end:
            tell(live.session)
