"""Creation of sessions: written down, launched, bound; a failure leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from k8e import errors, metrics
from k8e.egress.policy import Policy
from k8e.model import Phase, Principal, Session, SessionSpec, new_id
from k8e.runtimes.base import Binding, Guest
from k8e.runtimes.registry import Runtimes
from k8e.sessions import launch, live
from k8e.sessions.content import Furnisher
from k8e.sessions.launch import Launcher
from k8e.sessions.network import Network
from k8e.sessions.pool import PoolPolicy
from k8e.sessions.quotas import QuotaHolder
from k8e.sessions.secrets import Secrets, hidden
from k8e.sessions.store import SessionStore
from k8e.settings import Settings

log = logging.getLogger(__name__)

BIND_SECONDS = 10.0
"""That sandboxes from the pool have to become a session's; another one is started then."""
CLAIMS_MOST = 2
"""Sandboxes from the pool that are tried: if it is the session's fault, others would fail too."""
LOG_SECONDS = 0.05  # until a line of the log is written; no caller waits for it

T = TypeVar("T")


@dataclass(frozen=True)
class Kinship:
    """What a sub-agent's session inherits beside its specification."""

    parent: Session
    cwd: str
    """Where its commands start; empty for ``/workspace``."""


@dataclass(frozen=True)
class SandboxTerms:
    """Terms of a sandbox that come from its session but are no part of the specification."""

    policy: Policy
    secrets: dict[str, str] = field(repr=False)
    """Values by variable; given to the guest, and kept nowhere."""
    token: str = field(default="", repr=False)
    """The sandbox's own token, if it gets one."""


class SessionMaker:
    """Makes sessions, each in a task of its own: one who disconnects leaves no half-made one."""

    def __init__(
        self,
        settings: Settings,
        store: SessionStore,
        runtimes: Runtimes,
        network: Network,
        launcher: Launcher,
        warming: PoolPolicy,
        furnisher: Furnisher,
        secrets: Secrets,
        on_made: Callable[[Session, Guest], Awaitable[Session]],
    ) -> None:
        self._settings = settings
        self._store = store
        self._runtimes = runtimes
        self._network = network
        self._launcher = launcher
        self._warming = warming
        self._furnisher = furnisher
        self._secrets = secrets
        self._on_made = on_made
        self.token_of: Callable[[Session], Awaitable[str]] | None = None
        """Makes the token that a new sandbox finds in itself; empty for none. Never asked for
        sub-agents."""
        self._creating: dict[str, asyncio.Task[Session]] = {}
        self._holders: dict[str, QuotaHolder] = {}  # by the same keys: the holders

    def holders(self) -> Iterable[QuotaHolder]:
        """The holders for whom sessions are being made."""
        return self._holders.values()

    def count(self, prefix: str = "") -> int:
        """The number of sessions that are being made under keys that begin with ``prefix``."""
        return sum(key.startswith(prefix) for key in self._holders)

    def task(self, key: str) -> asyncio.Task[Session] | None:
        """The task that makes a session under ``key``."""
        return self._creating.get(key)

    def tasks(self, prefix: str) -> list[asyncio.Task[Session]]:
        """The tasks that make sessions under keys that begin with ``prefix``."""
        return [task for key, task in self._creating.items() if key.startswith(prefix)]

    async def make(
        self,
        key: str,
        principal: Principal,
        spec: SessionSpec,
        *,
        auto: bool,
        kin: Kinship | None = None,
    ) -> Session:
        """Make a session, or join the task that is making the one of this key."""
        task = self._creating.get(key)
        if task is None:
            task = asyncio.create_task(self._create(key, principal, spec, auto, kin))
            self._creating[key] = task
            self._holders[key] = QuotaHolder(principal.name, spec.tenant)
            task.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(task)

    def _made(self, key: str, task: asyncio.Task[Session]) -> None:
        self._creating.pop(key, None)
        self._holders.pop(key, None)
        if not task.cancelled():
            task.exception()  # every caller may have disconnected; the error was theirs

    async def stop(self) -> None:
        """Cancel the creation under way, and wait until nothing is left of it."""
        tasks = list(self._creating.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def with_defaults(self, spec: SessionSpec) -> SessionSpec:
        idle_timeout = spec.idle_timeout or self._settings.default_idle_timeout
        return replace(spec, lifetime=self.lifetime(spec.lifetime), idle_timeout=idle_timeout)

    def lifetime(self, asked: float) -> float:
        if asked > self._settings.max_lifetime:
            raise errors.LimitExceeded(
                f"a lifetime of {asked:g} s is above the limit of "
                f"{self._settings.max_lifetime:g} s (K8E_MAX_LIFETIME)"
            )
        return asked or self._settings.default_lifetime

    async def _create(
        self, key: str, principal: Principal, spec: SessionSpec, auto: bool, kin: Kinship | None
    ) -> Session:
        began = time.monotonic()
        self._furnisher.check(principal.name, spec)
        session, terms = await self._plan(principal, spec, auto, kin)
        planned = session.sandbox_id
        if _can_be_meant_by_others(spec) or auto or kin:
            session, guest = await self._make_written(session, terms, kin, claim=kin is None)
        elif (guest := await self._claim(session, terms)) is not None:
            # Written once, when it is complete. A gateway that is killed before that leaves a
            # sandbox without a session, like those of the pool, and the next gateway removes it.
            session = replace(session, sandbox_id=guest.sandbox_id, phase=Phase.ACTIVE)
            await self._or_discard(guest, self._write(session))
        else:
            session, guest = await self._make_written(session, terms, None, claim=False)
        if kin is None:
            # A sandbox of the pool has an id of its own, not the one that was meant for a new one.
            warm = session.sandbox_id != planned
            metrics.observe_claim(time.monotonic() - began, warm=warm)
        # Egress knows sandboxes only, so this links the two in the log. No caller waits for it.
        said = "session %s is sandbox %s", session.session_id, session.sandbox_id
        asyncio.get_running_loop().call_later(LOG_SECONDS, log.info, *said)
        self._holders.pop(key, None)  # from here on it counts as a session that lives
        return await self._on_made(session, guest)

    async def _plan(
        self, principal: Principal, spec: SessionSpec, auto: bool, kin: Kinship | None
    ) -> tuple[Session, SandboxTerms]:
        """The session to make, and the terms of its sandbox."""
        runtime = await self._runtimes.choose(spec.runtime, self._settings.default_runtime)
        words, policy = await self._network.read(spec.allowed_hosts)
        values = await self._secrets.resolve(principal.name, spec.tenant, spec.secret_refs)
        now = time.time()
        session = Session(
            session_id=spec.session_id or new_id("sub" if kin else "sess"),
            owner=principal.name,
            spec=spec,
            runtime=runtime.name,
            sandbox_id=new_id("sb"),
            phase=Phase.CREATING,
            created_at=now,
            expires_at=kin.parent.expires_at if kin else now + spec.lifetime,
            deadline=kin.parent.deadline if kin else live.boot_time() + spec.lifetime,
            auto=auto,
            allowed_hosts=words,
            parent=kin.parent.session_id if kin else "",
        )
        token = "" if kin or self.token_of is None else await self.token_of(session)
        return session, SandboxTerms(policy, values, token)

    async def _write(self, session: Session) -> None:
        await self._store.insert(session)

    async def _make_written(
        self, session: Session, terms: SandboxTerms, kin: Kinship | None, *, claim: bool
    ) -> tuple[Session, Guest]:
        """Make a session that is written down before anything of it exists."""
        await self._store.insert(session)
        try:
            session, guest = await self._give_sandbox(session, terms, kin, claim)
            return await self._or_discard(guest, self._activate(session)), guest
        except BaseException as error:
            try:
                await self._store.end(session.session_id, f"creation failed: {error}", time.time())
            except (
                sqlite3.Error,
                errors.StoreUnreachable,
            ):  # the next gateway finds it half made, and ends it
                log.exception("the end of session %s cannot be written down", session.session_id)
            raise

    async def _activate(self, session: Session) -> Session:
        return await self._store.activate(session)

    async def _give_sandbox(
        self, session: Session, terms: SandboxTerms, kin: Kinship | None, claim: bool
    ) -> tuple[Session, Guest]:
        """A sandbox for this session alone, from the pool or new; bound and furnished."""
        # A child needs the workspace of its parent, and with it the uids of its parent.
        guest = await self._claim(session, terms) if claim else None
        if guest is None:
            recipe = launch.of_session(session.spec, session.runtime)
            guest = await self._launcher.launch(
                recipe, session.sandbox_id, kin.parent.sandbox_id if kin else ""
            )
            await self._or_discard(guest, self._bind(guest, session, terms, kin))
        session = replace(session, sandbox_id=guest.sandbox_id)
        if session.spec.snapshot or session.spec.manifest:
            session = await self._or_discard(guest, self._furnisher.furnish(session, guest))
        return session, guest

    async def _claim(self, session: Session, terms: SandboxTerms) -> Guest | None:
        """A sandbox of the pool, bound to this session; None if there is no healthy one."""
        recipe = launch.of_session(session.spec, session.runtime)
        now = asyncio.get_running_loop().time
        until = now() + BIND_SECONDS
        for turn in range(CLAIMS_MOST):
            guest = self._warming.claim(recipe, again=turn > 0) if now() < until else None
            if guest is None:
                break
            try:
                async with asyncio.timeout_at(until):
                    await self._or_discard(guest, self._bind(guest, session, terms))
            except (errors.K8eError, OSError) as error:
                log.warning("sandbox %s waited and cannot be used: %s", guest.sandbox_id, error)
                self._warming.count(recipe, "unhealthy")
                continue
            self._warming.count(recipe, "hit")
            return guest
        self._warming.count(recipe, "miss")
        return None

    async def _bind(
        self,
        guest: Guest,
        session: Session,
        terms: SandboxTerms,
        kin: Kinship | None = None,
    ) -> None:
        """Give a sandbox its policy and its session, both at once; neither runs anything.

        Until then the kernel refuses everything, and no client can ask the guest for a program.
        """
        spec, cwd = session.spec, kin.cwd if kin else ""
        env, secrets = {**spec.env, **terms.secrets}, hidden(terms.secrets)
        binding = Binding(env, cwd, spec.limits, dict(spec.warm), secrets, terms.token)
        bound = asyncio.create_task(guest.bind(binding))
        try:
            await asyncio.sleep(0)  # it asks the guest, which works while we do
            await self._network.bind(guest.sandbox_id, terms.policy)
            await bound
        finally:
            if bound.cancel():
                await asyncio.wait([bound])
            elif not bound.cancelled():
                bound.exception()  # refused, or less than what is being refused

    async def _or_discard(self, guest: Guest, work: Awaitable[T]) -> T:
        """The result of ``work``; if it fails, discard the sandbox."""
        try:
            return await work
        except BaseException:
            await asyncio.shield(self._launcher.discard(guest))
            raise


def _can_be_meant_by_others(spec: SessionSpec) -> bool:
    """Whether a second call can refer to the same session, or making it takes long."""
    return bool(spec.session_id or spec.request_id or spec.snapshot or spec.manifest)
