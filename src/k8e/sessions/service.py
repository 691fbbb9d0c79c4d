"""Sessions as the gateway offers them: create, find, use, extend, destroy, expire, adopt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Generator
from dataclasses import replace
from typing import Any

from k8e import errors, link
from k8e.link import FrameSink
from k8e.model import Phase, Principal, SandboxSpec, Session, SessionSpec, new_id
from k8e.runtimes.base import Binding, Guest
from k8e.runtimes.host import Host
from k8e.runtimes.registry import Runtimes
from k8e.sessions import operations
from k8e.sessions.live import Live
from k8e.sessions.operations import Operation
from k8e.sessions.store import Store
from k8e.settings import Settings

log = logging.getLogger(__name__)

KEEP_ENDED = 24 * 3600.0  # seconds that an ended session can still be asked about
PING_SECONDS = 15.0  # that a busy sandbox may need for the least of answers
DEATH_NOTICE = 2.0  # seconds between the loss of a link and the news that the sandbox died


class Sessions:
    """All sessions of this gateway. Everything runs on one event loop."""

    def __init__(self, settings: Settings, store: Store, host: Host, runtimes: Runtimes) -> None:
        self.runtimes = runtimes
        self._settings = settings
        self._store = store
        self._host = host
        self._live: dict[str, Live] = {}
        self._creating: dict[str, asyncio.Task[Session]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Adopt what is there, then serve until the block ends; sandboxes stay when it does."""
        try:
            await self._adopt()
            yield
        finally:
            for live in self._live.values():
                live.stop()
            await self._stop_creating()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside everything else; its failure is told and ends nothing but itself."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task failed", exc_info=task.exception())

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
        made = await self._make(key or new_id("make"), principal, spec, auto=False)
        _check_same(made, spec)  # another call may have begun it
        return made

    async def _repeated(self, key: str, known: Session, spec: SessionSpec) -> Session:
        _check_same(known, spec)
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
        made = await self._make(key, principal, spec, auto=True)
        # Another call may have begun it, for another runtime.
        return self.auto_now(principal, spec.tenant, spec.runtime) or made

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
        self._begin(session, guest)
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
        connected = live.guest.link
        if connected is None:
            return None
        operation = Operation(call["op"], on_frame, lambda: live.finished(operation))
        live.began(operation, float(call.get("timeout") or 0) if call["op"] == "exec" else 0)
        channel = connected.open(call, operation.receive, lambda: self._lost(live, operation))
        operation.attach(channel)
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

    def _lost(self, live: Live, operation: Operation) -> None:
        if not operation.done:
            self._spawn(self._explain_loss(live, operation))

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
        live.schedule()
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
        live.stop()
        try:
            for operation in list(live.running):
                operation.fail(errors.SandboxDied(reason))
            await live.guest.kill()
        except Exception:
            # Its owner is rid of it; the next start of a gateway tries again to remove the rest.
            log.exception("not everything of session %s could be removed", session_id)
        finally:
            self._live.pop(session_id, None)
            self._store.end(session_id, reason, time.time())
            self._store.forget_ended(time.time() - KEEP_ENDED)

    # Living.

    def _begin(self, session: Session, guest: Guest) -> None:
        live = Live(session, guest, on_due=self._on_due, on_overdue=self._on_overdue)
        self._live[session.session_id] = live
        live.watcher = self._spawn(self._watch(live))
        live.schedule()

    async def _watch(self, live: Live) -> None:
        """Clean up when a sandbox ends by itself."""
        reason = await live.guest.wait()
        if live.ending is None:
            await self._end(live, reason)

    def _on_due(self, live: Live) -> None:
        reason = live.why_over()
        if reason:
            self._spawn(self._end(live, reason))
        else:
            live.schedule()

    def _on_overdue(self, live: Live, operation: Operation) -> None:
        self._spawn(self._check_guest(live))

    async def _check_guest(self, live: Live) -> None:
        """End a session whose guest does not answer: a program can stop what starts others."""
        try:
            connected = await live.guest.connect()
            await link.request(connected, {"op": "ping"}, seconds=PING_SECONDS)
        except errors.K8eError:
            if live.ending is None:
                await self._end(live, "its guest stopped answering")

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
            self._begin(session, guest)
        for guest in guests.values():
            with _told("ending sandbox %s failed", guest.sandbox_id):
                await guest.kill()
        await self._purge_orphans()

    async def _purge_orphans(self) -> None:
        owned = {live.session.sandbox_id for live in self._live.values()}
        found = {path.name for path in self._host.sandboxes.glob("sb-*")}
        for sandbox_id in (found | set(self._host.workspaces.names())) - owned:
            log.info("removing what is left of sandbox %s", sandbox_id)
            with _told("sandbox %s could not be removed", sandbox_id):
                await self.runtimes.purge(sandbox_id)


@contextlib.contextmanager
def _told(message: str, sandbox_id: str) -> Generator[None]:
    """One sandbox that resists must not keep a gateway from serving the others."""
    try:
        yield
    except Exception:
        log.exception(message, sandbox_id)


def _check_same(session: Session, spec: SessionSpec) -> None:
    """A repeated request must be the same in all: an old session may have had weaker limits."""
    if session.spec != spec:
        raise errors.Conflict(
            f"request id {spec.request_id!r} was used for a different session",
            hint="use a new request id for a new request",
        )


def _not_found(session_id: str) -> errors.SessionNotFound:
    # K8E's clients look for the words "not found".
    return errors.SessionNotFound(
        f"session {session_id[:80]} not found", hint="k8e sandbox sessions lists yours"
    )
