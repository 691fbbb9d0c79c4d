"""Sessions as the gateway offers them: create, find, use, extend, destroy, expire, adopt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

from k8e import errors, link
from k8e.egress.policy import changed, narrows
from k8e.model import DEFAULT_TEMPLATE, Phase, Principal, Session, SessionSpec, new_id
from k8e.runtimes.base import Feature, Guest, Leftover
from k8e.runtimes.registry import Runtimes
from k8e.sessions import adoption, refusals
from k8e.sessions import live as sessions_live
from k8e.sessions.content import Furnisher
from k8e.sessions.creation import Kinship, SessionMaker
from k8e.sessions.disk_watch import DiskWatch
from k8e.sessions.events import EventPage, Events
from k8e.sessions.greed import GreedWatch
from k8e.sessions.journal import Intents
from k8e.sessions.launch import Launcher
from k8e.sessions.lifetime import BY_OWNER, Evictions, LifetimeWatch, SessionEnder
from k8e.sessions.live import Live
from k8e.sessions.network import Network
from k8e.sessions.operations import GuestOperations
from k8e.sessions.pause import Pauses
from k8e.sessions.pool import PoolPolicy, WarmPool
from k8e.sessions.quotas import QuotaHolder, Quotas
from k8e.sessions.secrets import Secrets
from k8e.sessions.snapshots import Snapshots, SnapshotStore
from k8e.sessions.store import SessionStore
from k8e.sessions.subagents import Children
from k8e.sessions.tasks import Tasks
from k8e.sessions.templates import Templates, checker
from k8e.settings import Settings

log = logging.getLogger(__name__)

COUNT_SECONDS = 5.0  # that a guest may need to list its programs for a client
TOKEN_SECONDS = 10.0  # that a guest may need to take a token
END_SECONDS = 10.0  # that a creation waits for the end of the session whose id it asks for


class Make(Protocol):
    """Makes a session, or joins the task that makes the one of this key."""

    def __call__(
        self,
        key: str,
        principal: Principal,
        spec: SessionSpec,
        *,
        auto: bool,
        kin: Kinship | None = None,
    ) -> Awaitable[Session]: ...


class StandingSessions:
    """The standing sessions: one for each tenant, used when it names none."""

    def __init__(
        self,
        runtimes: Runtimes,
        templates: Templates,
        maker: SessionMaker,
        make: Make,
        store: SessionStore,
    ) -> None:
        """``make`` makes a session if the gateway, its quotas and its disk allow another one."""
        self._runtimes = runtimes
        self._templates = templates
        # Each run that names no session comes here, so it costs no query.
        self._live: dict[tuple[str, str], Live] = {}  # by owner and tenant
        self._maker = maker
        self._make = make
        self._store = store

    def begin(self, live: Live) -> None:
        """Remember a live session, if it is a standing one."""
        if live.session.auto:
            self._live[live.session.owner, live.session.spec.tenant] = live

    def forget(self, session: Session) -> None:
        """Forget a session that has ended; its tenant may have the next one already."""
        key = session.owner, session.spec.tenant
        known = self._live.get(key)
        if known is not None and known.session.session_id == session.session_id:
            del self._live[key]

    def find(
        self,
        principal: Principal,
        tenant: str,
        runtime: str = "",
        allowed_hosts: tuple[str, ...] | None = None,
        content: SessionSpec | None = None,
        template: str = "",
    ) -> Session | None:
        """A tenant's live standing session, if there is one and it matches the request."""
        asked = self._runtimes.resolve(runtime)
        live = self._live.get((principal.name, tenant))
        if live is None or live.ending is not None:
            return None
        refusals.check_standing(live.session, asked, allowed_hosts, content, template)
        return live.session

    async def of_fields(self, principal: Principal, fields: dict[str, Any]) -> Session:
        """A tenant's standing session, from a client's fields and, for the rest, a template."""
        asked = self._maker.with_defaults(SessionSpec.from_json(fields))
        known = self._find(principal, asked)
        if known is not None:
            return known
        return await self.get(principal, asked, await self._templates.specify(fields))

    async def get(
        self, principal: Principal, asked: SessionSpec, spec: SessionSpec | None = None
    ) -> Session:
        """A tenant's standing session; made at first use.

        Args:
            principal: its owner.
            asked: the properties that it must have.
            spec: its specification, if that says more.
        """
        spec = self._maker.with_defaults(spec or asked)
        known = self._find(principal, asked)
        if known is not None:
            return known
        await self._await_end(principal, spec.tenant)
        key = f"auto {principal.name} {spec.tenant}"
        try:
            made = await self._make(key, principal, spec, auto=True)
        except errors.Conflict:
            self._refuse_if_elsewhere(principal, spec.tenant)
            raise
        # Another call may have begun it, for another runtime.
        return self._find(principal, asked) or made

    def _refuse_if_elsewhere(self, principal: Principal, tenant: str) -> None:
        for session in self._store.of_owner(principal.name):
            other = self._store.elsewhere(session)
            if other is not None and session.auto and session.spec.tenant == tenant:
                raise refusals.elsewhere(session.session_id, other)

    def _find(self, principal: Principal, asked: SessionSpec) -> Session | None:
        hosts, template = asked.allowed_hosts, asked.template
        return self.find(principal, asked.tenant, asked.runtime, hosts, asked, template)

    async def _await_end(self, principal: Principal, tenant: str) -> None:
        """Wait until a standing session that is being destroyed has made room for the next."""
        live = self._live.get((principal.name, tenant))
        if live is not None and live.ending is not None:
            await asyncio.shield(live.ending)


class Sessions:
    """All sessions of this gateway. Everything runs on one event loop."""

    def __init__(
        self,
        settings: Settings,
        store: SessionStore,
        runtimes: Runtimes,
        snapshots: SnapshotStore | None = None,
    ) -> None:
        """``snapshots`` holds their rows where several gateways share them."""
        self.runtimes = runtimes
        self._settings = settings
        self._store = store
        self._tasks = Tasks()
        self._live: dict[str, Live] = {}
        self._network = Network(settings)
        self.templates = Templates(
            settings.template_dir,
            settings.data_dir / "templates.db",
            checker(runtimes, settings.max_lifetime, settings.default_registry),
            pool_total=settings.pool_total,
        )
        self.snapshots = Snapshots(
            settings.data_dir,
            self,
            max_bytes=settings.max_snapshot_bytes,
            min_free=settings.min_free_disk,
            store=snapshots,
        )
        self.secrets = Secrets(settings.data_dir, settings.secrets_key_file)
        furnisher = Furnisher(self._network, self.snapshots)
        self.events = Events(settings.data_dir / "events")
        """What happened in each session: ``events.write(session, "noun.verb", **fields)``."""
        launcher = Launcher(
            runtimes, self._network, self.events, settings.data_dir, settings.min_free_disk
        )
        self.pool = WarmPool(launcher, settings.pool_total)
        self.warming = PoolPolicy(settings, runtimes, self.pool, self.templates, self._tasks.spawn)
        self._maker = SessionMaker(
            settings,
            store,
            runtimes,
            self._network,
            launcher,
            self.warming,
            furnisher,
            self.secrets,
            self._made,
        )
        self._children = Children(store, self._network, self._maker, settings.max_children)
        self._pauses = Pauses(store)
        self._standing = StandingSessions(runtimes, self.templates, self._maker, self._make, store)
        self.auto_now, self.auto = self._standing.find, self._standing.get
        self.standing = self._standing.of_fields
        self.quotas = Quotas(settings)
        """How many sessions each may have; ``quotas.sessions_of`` knows who has other numbers."""
        store.on_forget.append(self.events.forget)
        store.on_lost.append(self._lost)
        store.most_of = self.quotas.most_of
        self._ender = SessionEnder(self._live, store, self._network, self.events, self._children)
        self._lifetimes = LifetimeWatch(self._tasks.spawn, self._ender.end)
        self._greed = GreedWatch(runtimes, self._live, self._ender.end)
        self._intents = Intents(settings.run_dir / "intents")
        self.operations = GuestOperations(
            self.events,
            self._network,
            self._intents,
            own=self._own,
            on_dead=self._ender.end,
            on_lost=self._lifetimes.lost,
        )
        self.open, self.open_now = self.operations.open, self.operations.open_now
        self.evictions = Evictions(self._live, self.snapshots, self.secrets, self._ender.end)
        self.disk = DiskWatch(runtimes, self._live, self.events, self.snapshots, self._ender.end)
        """The disk that all workspaces share."""
        self._ender.on_end.append(self._standing.forget)
        self.on_end = self._ender.on_end
        """Called with each session that has ended."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Adopt existing sandboxes, then serve until the block ends; sandboxes outlive it."""
        catching_up: list[asyncio.Task[None]] = []
        try:
            await self.templates.start()
            self.runtimes.start()
            self._greed.start()
            catching_up += await self._adopt()
            self._network.sandboxes = self.sandboxes
            self._network.on_late_start.append(self._has_network_now)
            alive = self.sandboxes()
            if self.runtimes.network_fault:
                self._network.do_without(self.runtimes.network_fault)
            else:
                await self._network.start(alive)
            for sandbox_id in alive - self.sandboxes():  # it died before there was a network
                await self._network.detach(sandbox_id)
            await adoption.finish_policies(self._store, self._network, self._live)
            self.runtimes.use_network(self._network.lent)
            await self.snapshots.start()
            catching_up.append(self._tasks.spawn(self.warming.start()))
            catching_up.append(self._tasks.spawn(self.disk.run()))
            yield
        finally:
            for live in self._live.values():
                live.stop()
            for task in catching_up:
                task.cancel()
            await self._greed.stop()
            await self._maker.stop()
            await self._pauses.stop()
            await self.pool.stop()
            await self._tasks.wait()
            await self.runtimes.stop()
            await self._network.close()
            self.snapshots.close()
            self.secrets.close()
            self.templates.close()
            self.events.close()
            self._intents.close()

    async def _adopt(self) -> list[asyncio.Task[None]]:
        """Take over the last gateway's sessions; return tasks that note what happened meanwhile."""
        tasks: list[asyncio.Task[None]] = []
        self.events.start(self._store.sandboxes())
        self.operations.recover(self._store.get)
        before = self._store.unended()
        for session, guest in await adoption.adopt(self._store, self.runtimes):
            live = self._begin(session, guest)
            live.has_background = True  # it may have some: it will be asked
            live.limits.catch_up()
            if live.paused:
                self._pauses.freeze_again(live)
                continue
            tasks.append(self._catch_up(live))
        for live in self._live.values():  # a gateway may have died in the middle of a pause
            parent = live.parent
            if parent is not None and parent.paused and not live.paused:
                self._tasks.spawn(self._pauses.follow(parent, live))
        for session in before:
            ended = self._store.get(session.session_id, session.owner)
            if ended is not None and ended.phase is Phase.ENDED:
                self.events.end(session, ended.ended_reason)
        return tasks

    def _catch_up(self, live: Live) -> asyncio.Task[None]:
        """Note what ended while no gateway was watching."""
        return self._tasks.spawn(self.operations.catch_up(live))

    def sandboxes(self) -> set[str]:
        """The ids of the sandboxes of all live sessions."""
        return {live.session.sandbox_id for live in self._live.values()}

    def _holders(self) -> Iterable[QuotaHolder]:
        for live in self._live.values():
            yield QuotaHolder(live.session.owner, live.session.spec.tenant)
        yield from self._maker.holders()
        for session in self._store.others():
            yield QuotaHolder(session.owner, session.spec.tenant)

    def count(self) -> int:
        """The number of sessions that exist or are being made."""
        return len(self._live) + self._maker.count()

    def warning(self, session: Session) -> str:
        """A warning for clients of a session whose sandbox is weaker than usual."""
        told = [self.runtimes.warning(named=bool(session.spec.runtime))]
        if lacks := self._network.lacks(session):
            told.append(f"this session has no network: {lacks}")
        told.append(self.runtimes.excess(session.runtime, session.spec.limits))
        return "; ".join(filter(None, told))

    def weaker(self, session: Session) -> str:
        """A warning about a session that was made while a stronger runtime did not work."""
        stronger = self.runtimes.stronger(session.runtime)
        if stronger is None or session.spec.runtime or self._settings.default_runtime:
            return ""
        return (
            f"this session uses the runtime {session.runtime}, since {stronger.title} did not work "
            "when it was made; it works now, so a new session is better isolated (k8e sandbox "
            "destroy ends this one)"
        )

    # Finding.

    def get(self, principal: Principal, session_id: str) -> Session:
        session = self._store.get(session_id, principal.name)
        if session is None:
            raise refusals.not_found(session_id)
        return session

    def refuse_if_elsewhere(self, session: Session) -> None:
        """Refuse a call that only the gateway of a session can answer."""
        other = self._store.elsewhere(session)
        if other is not None:
            raise refusals.elsewhere(session.session_id, other)

    def is_elsewhere(self, session: Session) -> bool:
        """Whether another gateway has a session, or is making it."""
        return self._store.elsewhere(session) is not None

    async def settled(self, session: Session) -> Session:
        """A session that another gateway is making, once it is made or has ended."""
        return await self._store.settled(session)

    async def background_runs(self, session: Session) -> int:
        """How many background programs run in a session; 0 if it is not active."""
        live = self._live.get(session.session_id)
        # Most sessions never had one, and then their guests need not be asked.
        if live is None or not live.has_background or session.phase is not Phase.ACTIVE:
            return 0
        return await sessions_live.count_background_runs(live.guest, COUNT_SECONDS)

    def listing(
        self, principal: Principal, *, tenant: str = "", ended: bool = False
    ) -> list[Session]:
        found = self._store.of_owner(principal.name, ended=ended)
        return [item for item in found if not tenant or item.spec.tenant == tenant]

    async def all_events(self, principal: Principal, limit: int = 0, cursor: str = "") -> EventPage:
        """Events of all sessions of a caller, also of those that ended not long ago."""
        return await self.events.read_all(self._store.sandboxes(principal.name), limit, cursor)

    # Creating.

    async def create(self, principal: Principal, spec: SessionSpec) -> Session:
        """A new session, or the existing one if the request id was used for the same request."""
        spec = self._maker.with_defaults(spec)
        key = ""
        if spec.request_id:
            key = f"request {principal.name} {spec.request_id}"
            known = self._store.find_request(principal.name, spec.request_id)
            if known is not None:
                return await self._repeated(key, known, spec)
        await self._vacated(spec.session_id)
        try:
            made = await self._make(key or new_id("make"), principal, spec, auto=False)
        except errors.Conflict:
            # Another gateway may have taken the request just now.
            known = self._store.find_request(principal.name, spec.request_id) if key else None
            if known is None or self._store.elsewhere(known) is None:
                raise
            return await self._repeated(key, known, spec)
        refusals.check_same(made, spec)  # another call may have begun it
        return made

    async def requested(self, principal: Principal, request_id: str) -> Session | None:
        """The session that was made for a request before, once it is there."""
        if (task := self._maker.task(f"request {principal.name} {request_id}")) is not None:
            with contextlib.suppress(errors.Conflict):  # another gateway was quicker
                return await asyncio.shield(task)
        known = self._store.find_request(principal.name, request_id)
        return await self._store.settled(known) if known is not None else None

    def find(self, session_id: str, owner: str) -> Session | None:
        """The newest session with an id and an owner, ended or not."""
        return self._store.get(session_id, owner)

    def alive(self) -> list[Session]:
        """The sessions of this gateway that live."""
        return [live.session for live in self._live.values() if live.ending is None]

    def give_tokens(self, make: Callable[[Session], Awaitable[str]]) -> None:
        """From now on ``make`` says which token a new sandbox finds in itself; empty for none."""
        self._maker.token_of = make

    async def renew_token(self, session_id: str, token: str) -> bool:
        """Put a new token in the place of the old one in a sandbox; False if it is paused or gone.

        Raises:
            GuestFailed: the guest does not answer; one of an older release does not know how.
        """
        live = self._live.get(session_id)
        if live is None or live.ending is not None or live.paused:
            return False
        connected = await live.guest.connect()
        await link.request(connected, {"op": "token", "token": token}, seconds=TOKEN_SECONDS)
        return True

    async def _vacated(self, session_id: str) -> None:
        """Wait for the end of a session whose id is asked for again while it ends."""
        live = self._live.get(session_id) if session_id else None
        if live is not None and live.ending is not None:
            await asyncio.wait([live.ending], timeout=END_SECONDS)

    async def _repeated(self, key: str, known: Session, spec: SessionSpec) -> Session:
        refusals.check_same(known, spec)
        task = self._maker.task(key)
        made = await asyncio.shield(task) if task is not None else await self._store.settled(known)
        if made.phase is Phase.ENDED:
            raise refusals.not_found(made.session_id, f"it ended: {made.ended_reason}")
        return made

    async def run_subagent(
        self, principal: Principal, parent_id: str, kind: str = "", path: str = ""
    ) -> Session:
        """A session for a sub-agent, in the workspace of its parent."""
        parent = self._own(principal, parent_id)
        made = await self._children.make(parent, kind, path, self._make)
        self.events.write(parent.session, "subagent.started", child_id=made.session_id)
        return made

    async def _make(
        self,
        key: str,
        principal: Principal,
        spec: SessionSpec,
        *,
        auto: bool,
        kin: Kinship | None = None,
    ) -> Session:
        if self._maker.task(key) is None:
            if self.count() >= self._settings.max_sessions:
                raise errors.LimitExceeded(
                    f"{self._settings.max_sessions} sessions are alive, the most this gateway "
                    "takes (K8E_MAX_SESSIONS)",
                    hint="destroy some: k8e sandbox sessions, k8e sandbox destroy ID",
                )
            self.events.admit()
            self.quotas.admit(principal, spec.tenant, self._holders())
            if kin is None:  # a sub-agent has its parent's workspace
                self.disk.admit()
        return await self._maker.make(key, principal, spec, auto=auto, kin=kin)

    def _why_not(self, principal: Principal, session_id: str) -> errors.K8eError:
        try:
            session = self.get(principal, session_id)
        except errors.SessionNotFound as error:
            return error
        if session.phase is Phase.ENDED:
            return refusals.not_found(session_id, f"it ended: {session.ended_reason}")
        other = self._store.elsewhere(session)
        if other is not None:
            return refusals.elsewhere(session_id, other)
        return errors.GuestFailed(f"session {session_id} is not ready yet")

    # Changing.

    async def allow(
        self, principal: Principal, session_id: str, words: tuple[str, ...]
    ) -> tuple[Session, list[str]]:
        """Replace what a session and its children may reach, open connections included."""
        live = self._own(principal, session_id)
        return await self._tasks.to_the_end(self._allow(live, lambda _: words))

    async def change_allowed(
        self, principal: Principal, session_id: str, add: tuple[str, ...], remove: tuple[str, ...]
    ) -> tuple[Session, list[str]]:
        """Add words to what a session may reach, and remove others; safe beside other changes."""
        live = self._own(principal, session_id)
        return await self._tasks.to_the_end(
            self._allow(live, lambda before: tuple(changed(before, add=add, remove=remove)))
        )

    async def _allow(
        self, live: Live, edit: Callable[[tuple[str, ...]], tuple[str, ...]]
    ) -> tuple[Session, list[str]]:
        async with live.policy:
            words, policy = await self._network.read(edit(live.session.allowed_hosts))
            if not narrows(live.session.allowed_hosts, words):
                self.events.admit()  # to take away is always allowed
            await self._children.allow(live, words, policy)
            for one in (live, *live.children):
                self.events.write(one.session, "egress.changed", allowed_hosts=words)
            return live.session, policy.words()

    async def pause(self, principal: Principal, session_id: str) -> None:
        """Freeze a session and its children."""
        live = self._own(principal, session_id)
        before = live.paused
        await self._pauses.pause(live)
        if not before:
            self.events.write(live.session, "session.paused")

    async def resume(self, principal: Principal, session_id: str) -> None:
        live = self._own(principal, session_id)
        before = live.paused
        self.events.admit()
        await self._pauses.resume(live)
        if before:
            self.events.write(live.session, "session.resumed")
            for one in (live, *live.children):  # it may have been paused when we adopted it
                self._catch_up(one)

    def egress(self, principal: Principal, session_id: str) -> dict[str, Any]:
        """What a session may reach, and what it was refused."""
        return self._network.describe(self._own(principal, session_id).session)

    def leftovers(self) -> list[Leftover]:
        """Sandboxes that could not be removed yet; the gateway goes on trying."""
        return self.runtimes.leftovers()

    async def removals(self) -> list[dict[str, Any]]:
        """Remains of sandboxes that have ended, also those that only time can remove."""
        disks = await self.runtimes.held_disks()
        told = [{"sandbox_id": name, "what": what} for name, what in disks.items()]
        return [asdict(item) for item in self.leftovers()] + told

    def network_support(self) -> Feature:
        """Whether sandboxes can have a network here, and why not."""
        return self._network.support()

    async def try_network_again(self) -> None:
        """Start the network now, if there was none before and the reason may be gone."""
        await self._network.try_again(at_once=True)

    def _has_network_now(self) -> None:
        """Replace sandboxes that wait without a network, and try runtimes again with one."""
        self.runtimes.forget()
        self.pool.drain()

    def _own(self, principal: Principal, session_id: str) -> Live:
        live = self._live.get(session_id)
        if live is None or live.session.owner != principal.name:
            raise self._why_not(principal, session_id)
        return live

    # Ending.

    async def extend(self, principal: Principal, session_id: str, lifetime: float) -> Session:
        """Let a session live ``lifetime`` seconds from now."""
        live = self._own(principal, session_id)
        self.events.admit()
        deadline, before = (
            sessions_live.boot_time() + self._maker.lifetime(lifetime),
            live.session.deadline,
        )
        self._children.check_extension(live, deadline)
        expires_at = sessions_live.date_of(deadline)
        await self._store.extend(session_id, expires_at, deadline)
        if live.ending is not None:  # while it was written
            raise self._why_not(principal, session_id)
        live.session = replace(live.session, expires_at=expires_at, deadline=deadline)
        live.schedule()
        await self._children.extend(live, before)
        self.events.write(live.session, "session.extended", expires_at=expires_at)
        return live.session

    async def destroy(self, principal: Principal, session_id: str) -> str:
        """End a session; return what of its sandbox could not be removed yet, mostly nothing."""
        live = self._live.get(session_id)
        if live is None or live.session.owner != principal.name:
            found = self._store.get(session_id, principal.name)
            other = self._store.elsewhere(found) if found is not None else None
            if found is not None and other is not None and found.phase is not Phase.ENDED:
                raise refusals.elsewhere(session_id, other)
            raise refusals.not_found(session_id)
        await self._ender.end(live, BY_OWNER)
        return live.left

    def _lost(self, session: Session) -> None:
        """Drop a session of ours that another gateway, which took this one for dead, has ended."""
        live = self._live.get(session.session_id)
        if live is not None and live.session.sandbox_id == session.sandbox_id:
            self._tasks.spawn(self._ender.end(live, session.ended_reason))

    async def destroy_all(self, reason: str) -> None:
        """End every session, for a gateway that must leave nothing behind."""
        await self._maker.stop()
        for live in list(self._live.values()):
            await self._ender.end(live, reason)

    # Living.

    def _begin(self, session: Session, guest: Guest) -> Live:
        live = self._lifetimes.start(session, guest)
        self._live[session.session_id] = live
        self._standing.begin(live)
        live.join(self._live.get(session.parent))
        owner = live.parent.session if live.parent is not None else session
        live.limits.is_bounded = partial(self.runtimes.disk.is_bounded, owner.sandbox_id)
        self.events.begin(session)
        self._lifetimes.watch(live)
        return live

    async def _made(self, session: Session, guest: Guest) -> Session:
        live = self._begin(session, guest)
        self.events.write(
            session,
            "session.created",
            runtime=session.runtime,
            tenant_id=session.spec.tenant,
            allowed_hosts=session.allowed_hosts,
            expires_at=session.expires_at,
            template=session.spec.template or DEFAULT_TEMPLATE,
            **({"parent_id": session.parent} if session.parent else {}),
            **({"snapshot": session.spec.snapshot} if session.spec.snapshot else {}),
        )
        await self.evictions.check(live)
        if live.parent is not None:
            try:
                await self._children.catch_up(live.parent, live)
                await self._pauses.follow(live.parent, live)
            except BaseException as error:
                await self._ender.end(live, f"creation failed: {error}")
                raise
        return live.session
