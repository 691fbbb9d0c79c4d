"""The gateway's state that all dialects share, and its operations on sessions and on itself."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

from k8e import errors, metrics, rootless
from k8e._version import __version__
from k8e.audit.act import Act
from k8e.auth.keys import Keys
from k8e.auth.rates import Rates
from k8e.gateway import tls
from k8e.gateway.approvals import ApprovalCalls
from k8e.gateway.arguments import text
from k8e.gateway.audit import AuditCalls
from k8e.gateway.conversations import ConversationCalls
from k8e.gateway.images import ImageCalls
from k8e.gateway.keys import ClientCertificates, KeyCalls
from k8e.gateway.operations import (
    ADMIN,
    AGENT,
    ANY,
    NoRow,
    Operations,
    WritesRow,
    declared,
    operation,
)
from k8e.gateway.pool import PoolCalls
from k8e.gateway.ports.exposures import ExposureCalls
from k8e.gateway.secrets import SecretCalls
from k8e.gateway.snapshots import SnapshotCalls
from k8e.gateway.templates import TemplateCalls, broken_templates
from k8e.gateway.tokens import TokenCalls, TokenDesk
from k8e.model import Principal, Role, words_from_json
from k8e.sessions.approvals import Approvals
from k8e.sessions.service import Sessions
from k8e.settings import Settings

NOT_GONE = (
    "the session has ended, but this is left of its sandbox: {}; the gateway tries again until it "
    "is gone (k8e gateway status)"
)
STREAMS = 10.0  # that may be opened for each call that may be made


class SessionCalls:
    """Operations on sessions themselves: their life, and what they may reach."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @operation(roles=AGENT, audit=NoRow.EVENTS, session="spec.session_id")
    async def create_session(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        spec = await self._sessions.templates.specify(_dict(call, "spec"))
        session = await self._sessions.create(principal, spec)
        return {"session": session.to_json(), "warning": self._sessions.warning(session)}

    @operation(roles=AGENT, audit=NoRow.READS)
    async def get_session(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        session = self._sessions.get(principal, text(call, "session_id"))
        background = {"background_runs": await self._sessions.background_runs(session)}
        return {"session": session.to_json() | background}

    @operation(roles=AGENT, audit=NoRow.READS)
    async def list_sessions(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = self._sessions.listing(
            principal, tenant=str(call.get("tenant") or ""), ended=bool(call.get("ended"))
        )
        return {"sessions": [session.to_json() for session in found]}

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def destroy_session(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        left = await self._sessions.destroy(principal, text(call, "session_id"))
        return {"warning": NOT_GONE.format(left)} if left else {}

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def extend_session(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        lifetime = call.get("lifetime")
        if not isinstance(lifetime, (int, float)) or not lifetime > 0:
            raise errors.InvalidRequest("lifetime must be a positive number of seconds")
        session_id = text(call, "session_id")
        session = await self._sessions.extend(principal, session_id, lifetime)
        return {"session": session.to_json()}

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def update_allowed_hosts(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        words = words_from_json(call.get("hosts") or ())
        session, hosts = await self._sessions.allow(principal, text(call, "session_id"), words)
        return {"session": session.to_json(), "hosts": hosts}

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def change_allowed_hosts(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        add, remove = (words_from_json(call.get(key) or ()) for key in ("add", "remove"))
        session_id = text(call, "session_id")
        session, hosts = await self._sessions.change_allowed(principal, session_id, add, remove)
        return {"session": session.to_json(), "hosts": hosts}

    @operation(roles=AGENT, audit=NoRow.READS)
    async def egress(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return self._sessions.egress(principal, text(call, "session_id"))


class SubagentCalls:
    """Operations that make children of sessions, and that pause and resume sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @operation(roles=AGENT, audit=NoRow.EVENTS, session="parent_session_id")
    async def run_subagent(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        session = await self._sessions.run_subagent(
            principal,
            text(call, "parent_session_id"),
            text(call, "agent_type", optional=True),
            text(call, "workspace_path", optional=True),
        )
        return {"session": session.to_json()}

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def pause_session(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self._sessions.pause(principal, text(call, "session_id"))
        return {}

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def resume_session(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self._sessions.resume(principal, text(call, "session_id"))
        return {}


class EventCalls:
    """The operation that lists what happened in sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @operation(roles=AGENT, audit=NoRow.READS)
    async def events(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """The newest events of a session, also of one that has ended not long ago.

        Without a session, the events of all sessions of the caller; with a cursor, those before it.
        """
        limit = call.get("limit") or 0
        if type(limit) is not int or limit < 0:
            raise errors.InvalidRequest("limit must be a number from 0 up")
        if not text(call, "session_id", optional=True):
            cursor = text(call, "cursor", optional=True)
            page = await self._sessions.all_events(principal, limit, cursor)
            found = {"events": page.lines, "returned": len(page.lines), "cursor": page.cursor}
            return {**found, "truncated": bool(page.cursor)}
        session = self._sessions.get(principal, text(call, "session_id"))
        self._sessions.refuse_if_elsewhere(session)
        lines, truncated = await self._sessions.events.read(session, limit)
        return {"events": lines, "truncated": truncated, "returned": len(lines)}


class GatewayCalls:
    """Operations on the gateway as a whole."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._began = time.monotonic()

    @operation(roles=ANY, audit=NoRow.READS)
    async def status(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        known = {
            "version": __version__,
            "sessions": len(self._gateway.sessions.listing(principal)),
            "uptime_s": int(time.monotonic() - self._began),
            "listen": self._gateway.listening_on,
            "http": self._gateway.http_on,
            "runtime_warning": self._gateway.sessions.runtimes.warning(),
            "ca_fingerprint": tls.fingerprint(self._gateway.settings.data_dir / "tls"),
            "caller": principal.shown,
            "roles": sorted(principal.roles),
        }
        if Role.ADMIN not in principal.roles:
            return known  # the rest is only for administrators of this machine
        return known | {
            "pid": rootless.outer_pid(),
            "sessions": self._gateway.sessions.count(),
            "socket": str(self._gateway.settings.socket),
            "data_dir": str(self._gateway.settings.data_dir),
            "disk": self._gateway.sessions.disk.describe(),
            "log_file": str(self._gateway.settings.log_file),
            "removals": [asdict(item) for item in self._gateway.sessions.leftovers()],
            **self._gateway.describe_database(),
        }

    @operation(roles=ADMIN, audit=NoRow.READS)
    async def metrics(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        metrics.set_sessions(self._gateway.sessions.count())
        metrics.set_ready(self._gateway.sessions.pool.ready)
        metrics.set_removals(len(self._gateway.sessions.leftovers()))
        self._gateway.sessions.disk.describe()
        return {"text": metrics.render().decode()}

    @operation(roles=ANY, audit=NoRow.READS)
    async def doctor(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        fresh = bool(call.get("fresh"))
        if fresh and Role.ADMIN not in principal.roles:
            raise errors.Denied("trying everything out again needs the admin role")
        if fresh:
            await self._gateway.sessions.try_network_again()
        found = await self._gateway.sessions.runtimes.support(fresh=fresh)
        admin = Role.ADMIN in principal.roles
        disk = {"disk": self._gateway.sessions.disk.describe()} if admin else {}
        return disk | {
            "removals": await self._gateway.sessions.removals() if admin else [],
            "runtimes": [asdict(item) for item in found],
            "egress": asdict(self._gateway.sessions.network_support()),
            "broken_templates": await broken_templates(self._gateway.sessions.templates),
            "warning": self._gateway.sessions.runtimes.warning(),
        }

    @operation(roles=ADMIN, audit=WritesRow("gateway.stop", ("destroy",), needs_room=False))
    async def stop(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        self._gateway.destroy_on_stop = bool(call.get("destroy"))
        self._gateway.stopping.set()
        return {"sessions": 0 if self._gateway.destroy_on_stop else self._gateway.sessions.count()}


OPERATIONS = declared(
    GatewayCalls,
    SessionCalls,
    SubagentCalls,
    EventCalls,
    ApprovalCalls,
    KeyCalls,
    TemplateCalls,
    SnapshotCalls,
    SecretCalls,
    PoolCalls,
    ExposureCalls,
    ImageCalls,
    ConversationCalls,
    TokenCalls,
    AuditCalls,
)
"""Every operation of a gateway, by name."""


class Gateway:
    """The shared state of all dialects, and the operations that they ask for."""

    def __init__(
        self, settings: Settings, sessions: Sessions, approvals: Approvals, keys: Keys
    ) -> None:
        """The caller adds operations on exposed ports, images, conversations, tokens and audit."""
        self.settings = settings
        self.sessions = sessions
        self.keys = keys
        self.client_certificates = ClientCertificates(keys, settings.data_dir / "tls")
        self.operations = Operations(Rates(settings.call_rate), Rates(settings.call_rate, STREAMS))
        self.tokens: TokenDesk | None = None
        """What recognises tokens of conversations, once there is one."""
        self.listening_on = ""
        """The TCP endpoint, or why there is none; empty until that is known."""
        self.http_on = ""
        """The URL of the HTTP endpoint, or why there is none; empty until that is known."""
        self.on_listening: list[Callable[[str], object]] = []
        """Called with the address of the gRPC endpoint, once there is one."""
        self.describe_database: Callable[[], dict[str, Any]] = dict
        """What an administrator may know of a database that several gateways share."""
        self.connections: set[object] = set()
        self.farewells: set[Callable[[], None]] = set()
        """Called when the gateway has stopped, so that connections can say so."""
        self.on_refusal: list[Callable[[Exception, Act | None], None]] = []
        """Called with each error that a caller gets; no act means the one that is current."""
        self.stopping = asyncio.Event()
        self.destroy_on_stop = False
        self._tasks: set[asyncio.Task[None]] = set()
        for capability in (
            GatewayCalls(self),
            SessionCalls(sessions),
            SubagentCalls(sessions),
            EventCalls(sessions),
            ApprovalCalls(approvals, keys, sessions),
            KeyCalls(keys, approvals, sessions),
            TemplateCalls(sessions),
            SnapshotCalls(sessions),
            SecretCalls(sessions),
            PoolCalls(sessions),
        ):
            self.operations.add(capability)

    @functools.cached_property
    def certificates(self) -> tls.Certificates:
        """The gateway's own certificate, for gRPC and HTTP."""
        return tls.Certificates(self.settings.data_dir / "tls", tls.names_of(self.settings))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside the caller; the gateway holds on to it until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def refused(self, error: Exception, act: Act | None = None) -> None:
        """A caller gets an error instead of an answer."""
        for tell in self.on_refusal:
            tell(error, act)


def _dict(call: dict[str, Any], key: str) -> dict[str, Any]:
    value: Any = call.get(key) or {}
    if not isinstance(value, dict):
        raise errors.InvalidRequest(f"{key} must be a mapping")
    return value  # pyright: ignore[reportUnknownVariableType]
