"""What the gateway itself answers, as opposed to what it passes on to guests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

from k8e import errors, metrics, rootless
from k8e._version import __version__
from k8e.audit.acting import Act
from k8e.auth.keys import Keys
from k8e.auth.rates import Rates
from k8e.gateway import tls
from k8e.gateway.approving import ApprovalCalls
from k8e.gateway.arguments import text as _text
from k8e.gateway.auditing import AuditCalls
from k8e.gateway.exposing import ExposureCalls
from k8e.gateway.imaging import ImageCalls
from k8e.gateway.keeping import KeyCalls
from k8e.gateway.pooling import PoolCalls
from k8e.gateway.secrets import SecretCalls
from k8e.gateway.snapshotting import SnapshotCalls
from k8e.gateway.steering import SteeringCalls
from k8e.gateway.telling import EventCalls
from k8e.gateway.templating import TemplateCalls
from k8e.model import Principal, Role, words_from_json
from k8e.sessions.approvals import Approvals
from k8e.sessions.service import Sessions
from k8e.settings import Settings

NOT_GONE = (
    "the session has ended, but this is left of its sandbox: {}; the gateway tries again until it "
    "is gone (k8e gateway status)"
)
STREAMS = 10.0  # that may be opened for each call that may be made


class Gateway(
    ApprovalCalls,
    SnapshotCalls,
    SteeringCalls,
    ExposureCalls,
    KeyCalls,
    EventCalls,
    TemplateCalls,
    PoolCalls,
    ImageCalls,
    SecretCalls,
    AuditCalls,
):
    """The shared state of all dialects. A method ``call_x`` answers the operation ``x``."""

    def __init__(
        self, settings: Settings, sessions: Sessions, approvals: Approvals, keys: Keys
    ) -> None:
        ApprovalCalls.__init__(self, approvals)
        KeyCalls.__init__(self, keys, settings.data_dir / "tls")
        self.settings = settings
        self.sessions = sessions
        self.rates = Rates(settings.call_rate)
        self.streams = Rates(settings.call_rate, STREAMS)
        """How often a caller may open a stream of calls; each of these is rated by itself."""
        self.listening_on = ""
        """The TCP endpoint, or why there is none; empty until that is known."""
        self.http_on = ""
        """The URL of the HTTP endpoint, or why there is none; empty until that is known."""
        self.conversations: set[object] = set()
        self.farewells: set[Callable[[], None]] = set()
        """What connections still say when the gateway has stopped."""
        self.on_refusal: list[Callable[[Exception, Act | None], None]] = []
        """Called with what a caller was refused; None stands for who acts now."""
        self.stopping = asyncio.Event()
        self.destroy_on_stop = False
        self._began = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

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

    async def call_status(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        told = {
            "version": __version__,
            "sessions": len(self.sessions.listing(principal)),
            "uptime_s": int(time.monotonic() - self._began),
            "listen": self.listening_on,
            "http": self.http_on,
            "runtime_warning": self.sessions.runtimes.warning(),
            "ca_fingerprint": tls.fingerprint(self.settings.data_dir / "tls"),
            "caller": principal.shown,
            "roles": sorted(principal.roles),
        }
        if Role.ADMIN not in principal.roles:
            return told  # the rest is this machine's own business
        return told | {
            "pid": rootless.outer_pid(),
            "sessions": self.sessions.count(),
            "socket": str(self.settings.socket),
            "data_dir": str(self.settings.data_dir),
            "disk": self.sessions.disk.describe(),
            "log_file": str(self.settings.log_file),
            "removals": [asdict(item) for item in self.sessions.leftovers()],
        }

    async def call_create_session(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        spec = await self.sessions.templates.specify(_dict(call, "spec"))
        session = await self.sessions.create(principal, spec)
        return {"session": session.to_json(), "warning": self.sessions.warning(session)}

    async def call_get_session(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        session = self.sessions.get(principal, _text(call, "session_id"))
        background = {"background_runs": await self.sessions.background_runs(session)}
        return {"session": session.to_json() | background}

    async def call_list_sessions(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        found = self.sessions.listing(
            principal, tenant=str(call.get("tenant") or ""), ended=bool(call.get("ended"))
        )
        return {"sessions": [session.to_json() for session in found]}

    async def call_destroy_session(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        left = await self.sessions.destroy(principal, _text(call, "session_id"))
        return {"warning": NOT_GONE.format(left)} if left else {}

    async def call_extend_session(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        lifetime = call.get("lifetime")
        if not isinstance(lifetime, (int, float)) or not lifetime > 0:
            raise errors.InvalidRequest("lifetime must be a positive number of seconds")
        session_id = _text(call, "session_id")
        return {"session": self.sessions.extend(principal, session_id, lifetime).to_json()}

    async def call_update_allowed_hosts(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        words = words_from_json(call.get("hosts") or ())
        session, hosts = await self.sessions.allow(principal, _text(call, "session_id"), words)
        return {"session": session.to_json(), "hosts": hosts}

    async def call_change_allowed_hosts(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        add, remove = (words_from_json(call.get(key) or ()) for key in ("add", "remove"))
        session_id = _text(call, "session_id")
        session, hosts = await self.sessions.change_allowed(principal, session_id, add, remove)
        return {"session": session.to_json(), "hosts": hosts}

    async def call_egress(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return self.sessions.egress(principal, _text(call, "session_id"))

    async def call_metrics(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        if Role.ADMIN not in principal.roles:
            raise errors.Denied("metrics need the admin role")
        metrics.set_sessions(self.sessions.count())
        metrics.set_ready(self.sessions.pool.ready)
        metrics.set_removals(len(self.sessions.leftovers()))
        self.sessions.disk.describe()
        return {"text": metrics.render().decode()}

    async def call_doctor(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        fresh = bool(call.get("fresh"))
        if fresh and Role.ADMIN not in principal.roles:
            raise errors.Denied("trying everything out again needs the admin role")
        if fresh:
            await self.sessions.try_network_again()
        found = await self.sessions.runtimes.support(fresh=fresh)
        admin = Role.ADMIN in principal.roles
        disk = {"disk": self.sessions.disk.describe()} if admin else {}
        return disk | {
            "removals": await self.sessions.removals() if admin else [],
            "runtimes": [asdict(item) for item in found],
            "egress": asdict(self.sessions.network_support()),
            "broken_templates": await self.broken_templates(),
            "warning": self.sessions.runtimes.warning(),
        }

    async def call_stop(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        if Role.ADMIN not in principal.roles:
            raise errors.Denied("stopping the gateway needs the admin role")
        self.destroy_on_stop = bool(call.get("destroy"))
        self.stopping.set()
        return {"sessions": 0 if self.destroy_on_stop else self.sessions.count()}


def _dict(call: dict[str, Any], key: str) -> dict[str, Any]:
    value: Any = call.get(key) or {}
    if not isinstance(value, dict):
        raise errors.InvalidRequest(f"{key} must be a mapping")
    return value  # pyright: ignore[reportUnknownVariableType]
