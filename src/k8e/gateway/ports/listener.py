"""The listener of one exposed port, and its clients' sockets, bounded both ways."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from importlib import import_module

from k8e.admission import Admission, UnknownConnection
from k8e.bounded_sockets import BoundedSocket
from k8e.gateway import identity
from k8e.gateway.ports.access import PortAccess
from k8e.gateway.ports.tunnel import Tunnel
from k8e.model import Principal
from k8e.sessions.exposures import Exposure
from k8e.sessions.service import Sessions


class ClientSocket(BoundedSocket):
    """One connection of a client."""

    def __init__(self, on_visit: Callable[[ClientSocket], None]) -> None:
        super().__init__()
        self._on_visit = on_visit
        self._user: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._on_visit(self)

    def user(self) -> str:
        """Which user of this machine the client is; empty where the kernel cannot tell."""
        if self._user is None and self._transport is not None:
            ends = [self._transport.get_extra_info(what) for what in ("peername", "sockname")]
            client, server = (identity.endpoint(*end[:2]) for end in ends)
            uid = identity.owner(client, server)
            self._user = "" if uid is None else str(uid)
        return self._user or ""


log = logging.getLogger(__name__)

MAX_KNOWN = 128
"""Connections of clients that have shown the token."""
MAX_STRANGERS = 512
"""Connections of clients that have not, of all exposed ports together."""
WELCOMES = 16
"""Connections that are accepted in a row, before earlier ones are served."""
CLOSE_SECONDS = 5.0


class PortListener:
    """One exposed port, from its first connection to its last."""

    def __init__(self, sessions: Sessions, exposure: Exposure, places: Admission) -> None:
        """``places`` are for strangers, and shared by all exposed ports."""
        self.exposure = exposure
        self._places = places
        authority = f"{exposure.address}:{exposure.listen_port}"
        self._door = PortAccess(
            authority.encode(), exposure.token.encode(), exposure.cookie_key.encode()
        )
        self._sessions = sessions
        self._server: asyncio.Server | None = None
        self._visits: dict[asyncio.Task[None], ClientSocket] = {}
        self._strangers: dict[ClientSocket, UnknownConnection] = {}
        self._closing = False

    @property
    def url(self) -> str:
        return self._door.url.decode()

    async def open(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            # Now, and not at the start: most gateways expose nothing.
            await asyncio.to_thread(import_module, "k8e.gateway.ports.proxy")
            self._server = await loop.create_server(
                lambda: ClientSocket(self._welcome), sock=listening, backlog=WELCOMES
            )
            listening.listen(MAX_KNOWN)  # those may wait for that
        except BaseException:
            listening.close()
            raise
        if self._closing:  # meanwhile
            self._server.close()

    def _welcome(self, visitor: ClientSocket) -> None:
        from k8e.gateway.ports.proxy import Visit

        if self._closing:
            visitor.abort()
            return
        # Who floods one port drives out others of this port, and not those of the next.
        stranger = self._places.enter(self.exposure.address, visitor.abort, group=self.url)
        self._strangers[visitor] = stranger
        visit = Visit(self._door, visitor, self._open_tunnel, lambda: self._admit(visitor))
        task = asyncio.get_running_loop().create_task(visit.run())
        self._visits[task] = visitor
        task.add_done_callback(self._left)

    def _admit(self, visitor: ClientSocket) -> bool:
        """A client has shown the token; whether there is room for it."""
        if visitor in self._strangers:
            if len(self._visits) - len(self._strangers) >= MAX_KNOWN:
                return False
            self._strangers.pop(visitor).leave()
        return True

    def _left(self, task: asyncio.Task[None]) -> None:
        stranger = self._strangers.pop(self._visits.pop(task), None)
        if stranger is not None:
            stranger.leave()
        if not task.cancelled() and task.exception() is not None:
            log.error("a connection to an exposed port failed", exc_info=task.exception())

    def _open_tunnel(self) -> Tunnel:
        exposure = self.exposure
        call = {"host": exposure.host, "port": exposure.port}
        return Tunnel(self._sessions, Principal(exposure.owner), exposure.session_id, call)

    def close(self) -> None:
        """Stop listening, and close every connection."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for task in list(self._visits):
            task.cancel()

    async def closed(self) -> None:
        """Wait until the last one is gone."""
        if self._visits:
            await asyncio.wait(list(self._visits), timeout=CLOSE_SECONDS)
