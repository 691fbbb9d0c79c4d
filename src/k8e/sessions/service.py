"""Sessions as the gateway offers them: create, find, use, extend, destroy, expire, adopt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from k8e import errors
from k8e.guest import wire
from k8e.link import FrameSink
from k8e.model import Phase, Principal, SandboxSpec, Session, SessionSpec, new_id
from k8e.runtimes.base import Binding, Guest
from k8e.runtimes.host import Host
from k8e.runtimes.registry import Runtimes
from k8e.sessions import operations
from k8e.sessions.operations import Operation
from k8e.sessions.store import Store
from k8e.settings import Settings

log = logging.getLogger(__name__)

KEEP_ENDED = 24 * 3600.0  # seconds that an ended session can still be asked about
DEATH_NOTICE = 2.0  # seconds between the loss of a link and the news that the sandbox died


class Live:
    """A session whose sandbox runs in this gateway."""

    def __init__(self, session: Session, guest: Guest, last_active: float) -> None:
        self.session = session
        self.guest = guest
        self.last_active = last_active
        self.running: set[Operation] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None


class Sessions:
    """All sessions of this gateway. Everything runs on one event loop."""

    def __init__(self, settings: Settings, store: Store, host: Host, runtimes: Runtimes) -> None:
        self.runtimes = runtimes
        self._settings = settings
        self._store = store
        self._host = host
        self._live: dict[str, Live] = {}
        self._creating: dict[str, asyncio.Task[Session]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Adopt what is there, then serve until the block ends; sandboxes stay when it does."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._adopt()
            try:
                yield
            finally:
                for live in self._live.values():
                    if live.timer is not None:
                        live.timer.cancel()
                    if live.watcher is not None:
                        live.watcher.cancel()
                await self._stop_creating()

    async def _stop_creating(self) -> None:
        """Give up what is being made, and wait until nothing is left of it."""
        tasks = list(self._creating.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def count(self) -> int:
        """Sessions that exist or are being made."""
        return len(self._live) + len(self._creating)

    def warning(self, session: Session) -> str:
        """What a client must know about a session that got a weaker runtime than the usual."""
        return self.runtimes.warning() if not session.spec.runtime else ""

    # Finding.

    def get(self, principal: Principal, session_id: str) -> Session:
        session = self._store.get(session_id)
        if session is None or session.owner != principal.name:
            raise _not_found(session_id)
        return session

    def listing(
        self, principal: Principal, *, tenant: str = "", ended: bool = False
    ) -> list[Session]:
        found = self._store.of_owner(principal.name, ended=ended)
        return [item for item in found if not tenant or item.spec.tenant == tenant]

    # Creating.

    async def create(self, principal: Principal, spec: SessionSpec) -> Session:
        """A new session; the one of before if the request id was used for the same request."""
        spec = self._with_defaults(spec)
        key = ""
        if spec.request_id:
            key = f"request {principal.name} {spec.request_id}"
            known = self._store.find_request(principal.name, spec.request_id)
            if known is not None:
                return await self._repeated(key, known, spec)
        return await self._make(key or new_id("make"), principal, spec, auto=False)

    async def _repeated(self, key: str, known: Session, spec: SessionSpec) -> Session:
        # The whole request is compared: an old session may have had weaker limits.
        if known.spec != spec:
            raise errors.Conflict(
                f"request id {spec.request_id!r} was used for a different session",
                hint="use a new request id for a new request",
            )
        task = self._creating.get(key)
        return await asyncio.shield(task) if task is not None else known

    def auto_now(self, principal: Principal, tenant: str, runtime: str = "") -> Session | None:
        """The default session of a tenant, if it has a live one; it must be of ``runtime``."""
        asked = self.runtimes.resolve(runtime)
        known = self._store.find_auto(principal.name, tenant)
        if known is None or known.session_id not in self._live:
            return None
        if asked and asked != known.runtime:
            raise errors.Conflict(
                f"the session of tenant {tenant!r} runs on {known.runtime}, not on {asked}",
                hint=f"k8e sandbox destroy {known.session_id}, or use another --tenant",
            )
        return known

    async def auto(self, principal: Principal, spec: SessionSpec) -> Session:
        """The session that a tenant gets when it names none; made at first use."""
        spec = self._with_defaults(spec)
        known = self.auto_now(principal, spec.tenant, spec.runtime)
        if known is not None:
            return known
        key = f"auto {principal.name} {spec.tenant}"
        return await self._make(key, principal, spec, auto=True)

    async def _make(
        self, key: str, principal: Principal, spec: SessionSpec, *, auto: bool
    ) -> Session:
        """Make a session in its own task, so that a caller who leaves does not half make it."""
        task = self._creating.get(key)
        if task is None:
            if self.count() >= self._settings.max_sessions:
                raise errors.LimitExceeded(
                    f"{self._settings.max_sessions} sessions are alive, the most this gateway "
                    "takes (K8E_MAX_SESSIONS)",
                    hint="destroy some: k8e sandbox sessions, k8e sandbox destroy ID",
                )
            task = asyncio.create_task(self._create(principal, spec, auto))
            self._creating[key] = task
            task.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(task)

    def _made(self, key: str, task: asyncio.Task[Session]) -> None:
        self._creating.pop(key, None)
        if not task.cancelled():
            task.exception()  # every caller may have left; the error was theirs

    async def _create(self, principal: Principal, spec: SessionSpec, auto: bool) -> Session:
        runtime = await self.runtimes.choose(spec.runtime, self._settings.default_runtime)
        now = time.time()
        session = Session(
            session_id=spec.session_id or new_id("sess"),
            owner=principal.name,
            spec=spec,
            runtime=runtime.name,
            sandbox_id=new_id("sb"),
            phase=Phase.CREATING,
            created_at=now,
            expires_at=now + spec.lifetime,
            auto=auto,
        )
        self._store.insert(session)
        try:
            sandbox = SandboxSpec(
                sandbox_id=session.sandbox_id, limits=spec.limits, runtime=runtime.name
            )
            guest = await runtime.launch(sandbox)
            try:
                await guest.bind(Binding(env=spec.env))
            except BaseException:
                await asyncio.shield(guest.kill())
                raise
        except BaseException as error:
            self._store.end(session.session_id, f"creation failed: {error}", time.time())
            raise
        session = self._store.activate(session)
        self._begin(session, guest, now)
        return session

    def _with_defaults(self, spec: SessionSpec) -> SessionSpec:
        idle_timeout = spec.idle_timeout or self._settings.default_idle_timeout
        return replace(spec, lifetime=self._lifetime(spec.lifetime), idle_timeout=idle_timeout)

    def _lifetime(self, asked: float) -> float:
        if asked > self._settings.max_lifetime:
            raise errors.LimitExceeded(
                f"a lifetime of {asked:g} s is above the limit of "
                f"{self._settings.max_lifetime:g} s (K8E_MAX_LIFETIME)"
            )
        return asked or self._settings.default_lifetime

    # Using.

    async def open(
        self, principal: Principal, session_id: str, call: dict[str, Any], on_frame: FrameSink
    ) -> Operation:
        """Start an operation on a session's guest; its frames come to ``on_frame``."""
        operation = self.open_now(principal, session_id, call, on_frame)
        while operation is None:
            # Raises SandboxDied with the reason if the sandbox is gone.
            await self._live[session_id].guest.connect()
            operation = self.open_now(principal, session_id, call, on_frame)
        return operation

    def open_now(
        self, principal: Principal, session_id: str, call: dict[str, Any], on_frame: FrameSink
    ) -> Operation | None:
        """``open`` without a task, for the hot path; None while the guest is dialling."""
        operations.check(call)
        live = self._live.get(session_id)
        if live is None or live.session.owner != principal.name:
            raise self._why_not(principal, session_id)
        link = live.guest.link
        if link is None:
            return None
        operation = Operation(call["op"], on_frame, lambda: self._finished(live, operation))
        live.running.add(operation)
        operation.attach(link.open(call, operation.receive, lambda: self._lost(live, operation)))
        return operation

    def _why_not(self, principal: Principal, session_id: str) -> errors.K8eError:
        try:
            session = self.get(principal, session_id)
        except errors.SessionNotFound as error:
            return error
        if session.phase is Phase.ENDED:
            missing = _not_found(session_id)
            missing.message += f" (it ended: {session.ended_reason})"
            missing.args = (missing.message,)
            return missing
        return errors.GuestFailed(f"session {session_id} is not ready yet")

    def _finished(self, live: Live, operation: Operation) -> None:
        live.running.discard(operation)
        live.last_active = time.time()

    def _lost(self, live: Live, operation: Operation) -> None:
        if self._tasks is not None and not operation.done:
            self._tasks.create_task(self._explain_loss(live, operation))

    async def _explain_loss(self, live: Live, operation: Operation) -> None:
        """Tell whoever waits for an operation why its link broke."""
        try:
            async with asyncio.timeout(DEATH_NOTICE):
                operation.fail(errors.SandboxDied(await live.guest.wait()))
        except TimeoutError:
            operation.fail(errors.GuestFailed("the link to the guest was lost"))

    # Ending.

    def extend(self, principal: Principal, session_id: str, lifetime: float) -> Session:
        """Let a session live ``lifetime`` seconds from now."""
        live = self._live.get(session_id)
        if live is None or live.session.owner != principal.name:
            raise self._why_not(principal, session_id)
        expires_at = time.time() + self._lifetime(lifetime)
        self._store.extend(session_id, expires_at)
        live.session = replace(live.session, expires_at=expires_at)
        self._schedule(live)
        return live.session

    async def destroy(self, principal: Principal, session_id: str) -> None:
        live = self._live.get(session_id)
        if live is None or live.session.owner != principal.name:
            raise _not_found(session_id)
        await self._end(live, "destroyed by its owner")

    async def destroy_all(self, reason: str) -> None:
        """End every session, for a gateway that is told to leave nothing."""
        await self._stop_creating()
        for live in list(self._live.values()):
            await self._end(live, reason)

    async def _end(self, live: Live, reason: str) -> None:
        """End a session once, however many ask for it."""
        if live.ending is None:
            live.ending = asyncio.create_task(self._do_end(live, reason))
        await asyncio.shield(live.ending)

    async def _do_end(self, live: Live, reason: str) -> None:
        session_id = live.session.session_id
        log.info("session %s ends: %s", session_id, reason)
        if live.timer is not None:
            live.timer.cancel()
        if live.watcher is not None and live.watcher is not asyncio.current_task():
            live.watcher.cancel()
        try:
            for operation in list(live.running):
                operation.fail(errors.SandboxDied(reason))
            await live.guest.kill()
        finally:
            self._live.pop(session_id, None)
            self._store.end(session_id, reason, time.time())
            self._store.forget_ended(time.time() - KEEP_ENDED)

    # Living.

    def _begin(self, session: Session, guest: Guest, last_active: float) -> None:
        live = Live(session, guest, last_active)
        self._live[session.session_id] = live
        if self._tasks is not None:
            live.watcher = self._tasks.create_task(self._watch(live))
        self._schedule(live)

    async def _watch(self, live: Live) -> None:
        """Clean up when a sandbox ends by itself."""
        reason = await live.guest.wait()
        if live.ending is None:
            await self._end(live, reason)

    def _schedule(self, live: Live) -> None:
        """Wake up when the session may have expired."""
        if live.timer is not None:
            live.timer.cancel()
        due = min(live.session.expires_at, live.last_active + live.session.spec.idle_timeout)
        if live.running:
            due = min(live.session.expires_at, time.time() + live.session.spec.idle_timeout)
        loop = asyncio.get_running_loop()
        live.timer = loop.call_later(max(0.0, due - time.time()), self._on_due, live)

    def _on_due(self, live: Live) -> None:
        now = time.time()
        idle = not live.running and now >= live.last_active + live.session.spec.idle_timeout
        if now < live.session.expires_at and not idle:
            self._store.touch(live.session.session_id, live.last_active)
            self._schedule(live)
            return
        reason = "its lifetime was over" if now >= live.session.expires_at else "it was idle"
        if self._tasks is not None:
            self._tasks.create_task(self._end(live, reason))

    # Restarting.

    async def _adopt(self) -> None:
        """Take over what a gateway before us left, and remove what it half made."""
        guests: dict[str, Guest] = {}
        for runtime in self.runtimes.all.values():
            for guest in await runtime.adopt():
                guests[guest.sandbox_id] = guest
        for session in self._store.unended():
            guest = guests.pop(session.sandbox_id, None)
            if guest is None or session.phase is not Phase.ACTIVE:
                if guest is not None:
                    guests[session.sandbox_id] = guest
                reason = "its sandbox was gone or half made after a restart of the gateway"
                self._store.end(session.session_id, reason, time.time())
                continue
            log.info("session %s is adopted", session.session_id)
            self._begin(session, guest, self._last_active(session))
        for guest in guests.values():
            await guest.kill()
        await self._purge_orphans()

    def _last_active(self, session: Session) -> float:
        # The gateway may have been killed before it wrote the newest time down; an early end
        # would lose work, a late one costs little.
        return max(self._store.last_active(session.session_id), time.time())

    async def _purge_orphans(self) -> None:
        owned = {live.session.sandbox_id for live in self._live.values()}
        found = {path.name for path in self._host.sandboxes.glob("sb-*")}
        for sandbox_id in (found | set(self._host.workspaces.names())) - owned:
            log.info("removing what is left of sandbox %s", sandbox_id)
            await self.runtimes.purge(sandbox_id)


def _not_found(session_id: str) -> errors.SessionNotFound:
    # K8E's clients look for the words "not found".
    return errors.SessionNotFound(
        f"session {session_id[:80]} not found", hint="k8e sandbox sessions lists yours"
    )


def describe_error(body: bytes) -> Exception:
    """The error in an ERROR frame."""
    return errors.from_wire(wire.unpack_dict(body))
