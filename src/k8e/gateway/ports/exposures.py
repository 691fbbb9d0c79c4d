"""The exposed ports of all sessions: calls, addresses, listeners and their end.

Cookies know no ports. On an address of its own, a service's cookies reach no other service, and
those of the user's other local services never reach a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from k8e import errors, rootless
from k8e.admission import Admission
from k8e.gateway.arguments import text
from k8e.gateway.operations import AGENT, NoRow, operation
from k8e.gateway.ports.listener import MAX_STRANGERS, PortListener
from k8e.guest.ports import DEFAULT_HOST
from k8e.model import Phase, Principal, Session
from k8e.sessions import operations
from k8e.sessions.exposures import Exposure, ExposureStore, new_token
from k8e.sessions.service import Sessions

SHARED = "127.0.0.1"
ATTEMPTS = 20
# Root's own: while a gateway is down, no other user can take such a port and wait for our cookies.
# None of these is on the list of ports that browsers refuse.
PRIVILEGED = range(640, 980)


class ListenSocket(NamedTuple):
    """A socket that listens, and what its user should know about it."""

    socket: socket.socket
    address: str
    port: int
    warning: str = ""


def listen(address: str, port: int) -> socket.socket:
    """A socket that takes connections there; OSError if that cannot be."""
    # With the protocol named: asyncio turns Nagle's algorithm off only where it sees TCP, and with
    # it an answer whose head and body are sent apart takes 40 ms.
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Connections of before may still be dying; two listeners it does not allow.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setblocking(False)
        found.bind((address, port))
        found.listen()
    except BaseException:
        found.close()
        raise
    return found


def find_place() -> ListenSocket:
    """A random address and port; the address that all share only where there is no other."""
    failure: OSError | None = None
    for attempt in range(ATTEMPTS):
        address = _random_address()
        # Root without the right to take such a port gets one of the others.
        port = _random_port() if attempt < ATTEMPTS // 2 else 0
        try:
            return _placed(listen(address, port), address)
        except OSError as error:
            failure = error
    try:
        found = _placed(listen(SHARED, 0), SHARED)
    except OSError as error:
        raise errors.LimitExceeded(f"no loopback port can be had: {error.strerror}") from None
    reason = failure.strerror if failure is not None else "nothing was tried"
    return found._replace(
        warning=f"no loopback address but {SHARED} can be used here ({reason}), so browsers send "
        "the service's cookies to every other service on it, and theirs to this one"
    )


def _placed(found: socket.socket, address: str) -> ListenSocket:
    return ListenSocket(found, address, int(found.getsockname()[1]))


def _random_address() -> str:
    """One of 127.1.0.1 to 127.255.255.254; what is below 127.1 has its users already."""
    first, last = 1 + secrets.randbelow(255), 1 + secrets.randbelow(254)
    return f"127.{first}.{secrets.randbelow(256)}.{last}"


def _random_port() -> int:
    return secrets.choice(PRIVILEGED) if os.geteuid() == 0 and not rootless.inside() else 0


log = logging.getLogger(__name__)

MAX_EXPOSED = 32  # ports of one session


class ExposedPort(NamedTuple):
    """An exposed port, and what its user should know about it."""

    exposure: Exposure
    url: str
    warning: str = ""


class Exposures:
    """All exposed ports of this gateway, on one event loop."""

    def __init__(self, store: ExposureStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions
        self._doors: dict[tuple[str, int], PortListener] = {}
        self._places = Admission(MAX_STRANGERS, MAX_STRANGERS)
        self._lock = asyncio.Lock()  # protects the choice of a new place, one at a time
        sessions.on_end.append(self._session_ended)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Listen again wherever the gateway before us did; sessions must be adopted by then."""
        try:
            for exposure in self._store.all():
                try:
                    await self._restore(exposure)
                except Exception:  # one port must not keep a gateway from starting
                    log.exception("port %d is no longer exposed", exposure.port)
                    self._store.remove(exposure)
            yield
        finally:
            doors = list(self._doors.values())
            self._doors.clear()
            for door in doors:
                door.close()
            for door in doors:
                await door.closed()

    async def _restore(self, exposure: Exposure) -> None:
        if not self._is_alive(exposure):
            self._store.remove(exposure)
            return
        try:
            found = listen(exposure.address, exposure.listen_port)
        except OSError as error:
            # A program that listens there now may have received the token.
            log.warning(
                "port %d of session %s is no longer exposed: %s:%d cannot be had again: %s",
                exposure.port,
                exposure.session_id,
                exposure.address,
                exposure.listen_port,
                error.strerror,
            )
            self._store.remove(exposure)
            return
        await self._open(exposure, ListenSocket(found, exposure.address, exposure.listen_port))

    # Exposing.

    async def expose(
        self, principal: Principal, session_id: str, port: int, host: str = ""
    ) -> ExposedPort:
        """Make a port reachable; one that is exposed already keeps its address."""
        host = host or DEFAULT_HOST
        operations.check_target(host, port)
        async with self._lock:
            session = self._living(principal, session_id)
            known = self._doors.get((session_id, port))
            if known is not None:
                _check_same(known.exposure, host)
                return ExposedPort(known.exposure, known.url)
            if sum(key[0] == session_id for key in self._doors) >= MAX_EXPOSED:
                raise errors.LimitExceeded(
                    f"session {session_id} has {MAX_EXPOSED} ports exposed already",
                    hint="k8e sandbox unexpose PORT ends one",
                )
            place = find_place()
            exposure = Exposure(
                session_id=session_id,
                sandbox_id=session.sandbox_id,
                owner=principal.name,
                port=port,
                host=host,
                address=place.address,
                listen_port=place.port,
                token=new_token(),
                started_at=time.time(),
                cookie_key=new_token(),
            )
            door = await self._open(exposure, place)
            if not self._is_alive(exposure):  # it ended while we opened the door
                self._close(door)
                raise self._gone(session_id)
            self._store.insert(exposure)
        log.info("port %d of session %s is exposed at %s", port, session_id, place.address)
        return ExposedPort(exposure, door.url, place.warning)

    async def _open(self, exposure: Exposure, place: ListenSocket) -> PortListener:
        door = PortListener(self._sessions, exposure, self._places)
        self._doors[exposure.session_id, exposure.port] = door
        try:
            await door.open(place.socket)
        except BaseException:
            self._close(door)
            raise
        return door

    # Finding.

    def listing(self, principal: Principal, session_id: str = "") -> list[ExposedPort]:
        """The ports that a caller has exposed, oldest first."""
        if session_id:
            self._living(principal, session_id)
        found = [
            ExposedPort(door.exposure, door.url)
            for door in self._doors.values()
            if door.exposure.owner == principal.name
            and session_id in ("", door.exposure.session_id)
        ]
        return sorted(found, key=lambda item: item.exposure.started_at)

    def _living(self, principal: Principal, session_id: str) -> Session:
        session = self._sessions.get(principal, session_id)
        if session.phase is Phase.ENDED:
            raise self._gone(session_id)
        return session

    def _gone(self, session_id: str) -> errors.SessionNotFound:
        return errors.SessionNotFound(
            f"session {session_id} not found (it ended, and what it exposed with it)",
            hint="k8e sandbox sessions lists yours",
        )

    def _is_alive(self, exposure: Exposure) -> bool:
        try:
            session = self._living(Principal(exposure.owner), exposure.session_id)
        except errors.SessionNotFound:
            return False
        return session.sandbox_id == exposure.sandbox_id

    # Ending.

    def unexpose(self, principal: Principal, session_id: str, port: int) -> None:
        """Close a listener, and every connection that came through it."""
        self._living(principal, session_id)
        door = self._doors.get((session_id, port))
        if door is None:
            raise errors.NotExposed(
                f"port {port} of session {session_id} is not exposed",
                hint="k8e sandbox exposed lists the ports that are",
            )
        self._store.remove(door.exposure)
        self._close(door)

    def _close(self, door: PortListener) -> None:
        exposure = door.exposure
        if self._doors.get((exposure.session_id, exposure.port)) is door:
            del self._doors[exposure.session_id, exposure.port]
        door.close()

    def _session_ended(self, session: Session) -> None:
        for door in list(self._doors.values()):
            if door.exposure.sandbox_id == session.sandbox_id:
                self._store.remove(door.exposure)
                self._close(door)
        for exposure in self._store.all():  # where we are stopping, and no door is left
            if exposure.sandbox_id == session.sandbox_id:
                self._store.remove(exposure)


def _check_same(known: Exposure, host: str) -> None:
    if known.host != host:
        raise errors.Conflict(
            f"port {known.port} of session {known.session_id} is exposed already, on host "
            f"{known.host}",
            hint=f"k8e sandbox unexpose {known.port} ends that",
        )


_NO_TENANT = "default"


class ExposureCalls:
    """Operations that expose ports of sessions."""

    def __init__(self, exposures: Exposures, sessions: Sessions) -> None:
        self._exposures = exposures
        self._sessions = sessions

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def expose(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Expose a port of a session, or of the standing one of a tenant."""
        port, host = _port(call), text(call, "host", optional=True)
        session_id, warning = text(call, "session_id", optional=True), ""
        if not session_id:
            tenant = text(call, "tenant", optional=True) or _NO_TENANT
            session = await self._sessions.standing(principal, {"tenant": tenant})
            session_id, warning = session.session_id, self._sessions.warning(session)
        self._sessions.events.admit()
        found = await self._exposures.expose(principal, session_id, port, host)
        answer = _describe(found)
        self._note(principal, session_id, "port.exposed", port=port, host=answer["host"])
        warnings = [item for item in (warning, found.warning) if item]
        return {**answer, "warning": "; ".join(warnings)} if warnings else answer

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def unexpose(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        session_id = text(call, "session_id", optional=True)
        if not session_id:
            session_id = self._standing(principal, text(call, "tenant", optional=True))
        port = _port(call)
        self._exposures.unexpose(principal, session_id, port)
        self._note(principal, session_id, "port.unexposed", port=port)
        return {"session_id": session_id}

    def _note(self, principal: Principal, session_id: str, kind: str, **fields: Any) -> None:
        session = self._sessions.get(principal, session_id)
        self._sessions.events.write(session, kind, **fields)

    def _standing(self, principal: Principal, tenant: str) -> str:
        session = self._sessions.auto_now(principal, tenant or _NO_TENANT)
        if session is None:
            raise errors.SessionNotFound(
                f"tenant {tenant or _NO_TENANT!r} has no standing session: not found",
                hint="name the session: k8e sandbox exposed lists ports and their sessions",
            )
        return session.session_id

    @operation(roles=AGENT, audit=NoRow.READS)
    async def list_exposed(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = self._exposures.listing(principal, text(call, "session_id", optional=True))
        return {"services": [_describe(item) for item in found]}


def _port(call: dict[str, Any]) -> int:
    port = call.get("port")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise errors.InvalidRequest("port must be a number from 1 to 65535")
    return port


def _describe(item: ExposedPort) -> dict[str, Any]:
    """An exposed port as its owner sees it; the URL contains the token too."""
    return {
        "session_id": item.exposure.session_id,
        "port": item.exposure.port,
        "host": item.exposure.host,
        "url": item.url,
        "token": item.exposure.token,
        "started_at": item.exposure.started_at,
    }
