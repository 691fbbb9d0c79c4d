"""The exposed ports of all sessions: who may expose what, their listeners, their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import NamedTuple

from k8e import errors
from k8e.admission import Admission
from k8e.gateway import listening
from k8e.gateway.service_doors import MAX_STRANGERS, ServiceDoor
from k8e.guest.ports import DEFAULT_HOST
from k8e.model import Phase, Principal, Session
from k8e.sessions import operations
from k8e.sessions.exposure_store import Exposure, ExposureStore, new_token
from k8e.sessions.service import Sessions

log = logging.getLogger(__name__)

MAX_EXPOSED = 32  # ports of one session


class Exposed(NamedTuple):
    """An exposed port, and what its user should know about it."""

    exposure: Exposure
    url: str
    warning: str = ""


class Exposures:
    """All exposed ports of this gateway, on one event loop."""

    def __init__(self, store: ExposureStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions
        self._doors: dict[tuple[str, int], ServiceDoor] = {}
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
            found = listening.listen(exposure.address, exposure.listen_port)
        except OSError as error:
            # Whoever sits there now may have been shown the token.
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
        await self._open(exposure, listening.Place(found, exposure.address, exposure.listen_port))

    # Exposing.

    async def expose(
        self, principal: Principal, session_id: str, port: int, host: str = ""
    ) -> Exposed:
        """Make a port reachable; what is exposed already stays where it is."""
        host = host or DEFAULT_HOST
        operations.check_target(host, port)
        async with self._lock:
            session = self._living(principal, session_id)
            known = self._doors.get((session_id, port))
            if known is not None:
                _check_same(known.exposure, host)
                return Exposed(known.exposure, known.url)
            if sum(key[0] == session_id for key in self._doors) >= MAX_EXPOSED:
                raise errors.LimitExceeded(
                    f"session {session_id} has {MAX_EXPOSED} ports exposed already",
                    hint="k8e sandbox unexpose PORT ends one",
                )
            place = listening.find_place()
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
        return Exposed(exposure, door.url, place.warning)

    async def _open(self, exposure: Exposure, place: listening.Place) -> ServiceDoor:
        door = ServiceDoor(self._sessions, exposure, self._places)
        self._doors[exposure.session_id, exposure.port] = door
        try:
            await door.open(place.socket)
        except BaseException:
            self._close(door)
            raise
        return door

    # Finding.

    def listing(self, principal: Principal, session_id: str = "") -> list[Exposed]:
        """What a caller has exposed, oldest first."""
        if session_id:
            self._living(principal, session_id)
        found = [
            Exposed(door.exposure, door.url)
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

    def _close(self, door: ServiceDoor) -> None:
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
