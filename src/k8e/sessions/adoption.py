"""Adoption: a gateway takes over the sandboxes of the gateway before it, or removes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Generator, Mapping
from dataclasses import replace

from k8e import errors
from k8e.egress.policy import NONE, Policy
from k8e.model import Phase, Session
from k8e.runtimes.base import Guest, NotRemoved
from k8e.runtimes.registry import Runtimes
from k8e.sessions import live
from k8e.sessions.live import Live
from k8e.sessions.network import Network
from k8e.sessions.store import SessionStore

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Sandboxes that are ended at the same time."""


async def adopt(store: SessionStore, runtimes: Runtimes) -> list[tuple[Session, Guest]]:
    """The adopted sessions, parents first; half-made and ownerless sandboxes are removed."""
    guests = {guest.sandbox_id: guest for guest in await runtimes.adopt()}
    adopted: dict[str, tuple[Session, Guest]] = {}
    offset = live.boot_offset()  # once: children live as long as their parents, to the microsecond
    ending = store.half_ended()
    for session in store.unended():
        if session.session_id in ending:
            await store.end(session.session_id, ending[session.session_id], time.time())
            continue
        guest = guests.get(session.sandbox_id)
        if guest is None or session.phase not in (Phase.ACTIVE, Phase.PAUSED):
            reason = "its sandbox was gone or half made after a restart of the gateway"
            await store.end(session.session_id, reason, time.time())
            continue
        log.info("session %s is adopted", session.session_id)
        if not session.deadline:  # an older release wrote it down
            session = replace(session, deadline=session.expires_at + offset)
        adopted[session.session_id] = session, guests.pop(session.sandbox_id)
    for session, guest in list(adopted.values()):
        if session.parent and session.parent not in adopted:
            del adopted[session.session_id]
            guests[guest.sandbox_id] = guest
            await store.end(session.session_id, "its parent was gone", time.time())
    await _end_all(list(guests.values()))
    found = sorted(adopted.values(), key=lambda item: bool(item[0].parent))
    await _purge_orphans(runtimes, {session.sandbox_id for session, _ in found})
    return found


async def finish_policies(store: SessionStore, network: Network, alive: Mapping[str, Live]) -> None:
    """Finish changes of policy that an earlier gateway wrote down but may not have applied.

    Before any client is served: a session's recorded policy and the one in force are the same then.
    """
    for session in store.half_allowed():
        live = alive.get(session.session_id)
        if live is None:
            continue
        words = session.allowed_hosts
        try:
            words, policy = await network.read(words)
            await network.bind(session.sandbox_id, policy)
        except (errors.K8eError, OSError) as error:
            # It is unknown which of the two policies is in force, so it gets none.
            log.error("session %s has no network now: %s", session.session_id, error)
            words = (NONE,)
            await network.bind(session.sandbox_id, Policy())
        await store.allow(session, words)
        live.session = replace(live.session, allowed_hosts=words)


async def _end_all(guests: list[Guest]) -> None:
    """End sandboxes without a session: half-made ones, and members of the warm pool."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def end(guest: Guest) -> None:
        async with gate:
            with _logged("ending sandbox %s failed", guest.sandbox_id):
                await guest.kill()

    await asyncio.gather(*map(end, guests))


async def _purge_orphans(runtimes: Runtimes, owned: set[str]) -> None:
    for sandbox_id in runtimes.orphans(owned):
        log.info("removing what is left of sandbox %s", sandbox_id)
        with _logged("sandbox %s could not be removed", sandbox_id):
            await runtimes.purge(sandbox_id)


@contextlib.contextmanager
def _logged(message: str, sandbox_id: str) -> Generator[None]:
    """Log a failure of one sandbox, so that the gateway can serve the others."""
    try:
        with contextlib.suppress(NotRemoved):  # logged already, and tried again
            yield
    except Exception:
        log.exception(message, sandbox_id)
