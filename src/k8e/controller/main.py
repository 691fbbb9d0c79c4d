"""The controller as a program: connections, caches, reconcilers, and which of many is active."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from k8e import errors
from k8e.controller import policies, probes, resources
from k8e.controller.cache import Cache, trim_pod
from k8e.controller.claims import ClaimController
from k8e.controller.election import Election
from k8e.controller.events import Events
from k8e.controller.legacy import LegacyController
from k8e.controller.metrics import Metrics
from k8e.controller.sandboxes import SandboxController
from k8e.controller.store import RightOfWay, Store
from k8e.controller.templates import TemplateController
from k8e.controller.traces import Tracer
from k8e.controller.warm_pools import WarmPoolController
from k8e.kubernetes.api import Api, ApiError, ApiUnreachable, TokenFile, read_kubeconfig

log = logging.getLogger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CORE = (resources.SANDBOX, "Pod", "PersistentVolumeClaim", "Service")
_EXTENSIONS = (resources.CLAIM, resources.POOL, resources.TEMPLATE, "NetworkPolicy")
_PARTS = ("Pod", "PersistentVolumeClaim", "Service")
_CLAIM_CALLS, _CALLS = 16, 6
_LEGACY_WORKERS = 4
_PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class Options:
    """How the controller runs; the defaults are those of its Deployment."""

    kubeconfig: Path | None = None
    extensions: bool = True
    legacy: bool = False
    leader_elect: bool = True
    leader_election_namespace: str = resources.SYSTEM_NAMESPACE
    leader_election_id: str = f"{resources.CONTROLLER}.k8e"
    cluster_domain: str = "cluster.local"
    metrics_address: str = ":8080"
    probe_address: str = ":8081"
    sandbox_workers: int = 100
    claim_workers: int = 50
    pool_workers: int = 1
    template_workers: int = 1
    trace_endpoint: str = ""


def connections(kubeconfig: Path | None) -> Callable[[], Api]:
    """Makes callers of the API server, each with connections of its own."""
    if kubeconfig is not None:
        server, identity, token = read_kubeconfig(kubeconfig)
    else:
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise errors.InvalidRequest(
                "this is no pod, and no kubeconfig was given",
                hint="k8e controller --kubeconfig PATH",
            )
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        identity = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        token = TokenFile(_ACCOUNT / "token")
    return lambda: Api(server, identity, token=token, most_idle=_CLAIM_CALLS, reuse_for_posts=True)


class Controller:
    """Everything that works while this process is the active one."""

    def __init__(
        self, options: Options, connect: Callable[[], Api], label_domains: tuple[str, ...]
    ) -> None:
        self._options = options
        self.metrics = Metrics()
        api, claims_api = connect(), connect()
        kinds = (*_CORE, *_EXTENSIONS) if options.extensions else _CORE
        legacy = options.extensions and options.legacy
        if legacy:
            kinds = (*kinds, *resources.LEGACY_KINDS)
        followed = {kind: connect() for kind in kinds}
        self.caches = {kind: _cache(api, kind) for kind, api in followed.items()}
        now = followed[resources.SANDBOX].clock
        events = Events(connect())
        way, tracer = RightOfWay(), Tracer(options.trace_endpoint)
        store = Store(api, self.caches, at_once=_CALLS)
        self._sandboxes = SandboxController(
            store,
            events,
            right_of_way=way,
            domain=options.cluster_domain,
            now=now,
            on_ready=lambda before, after: self.metrics.sandbox_is_ready(before, after, now()),
            tracer=tracer,
        )
        sandboxes = self._sandboxes.queue.run(options.sandbox_workers)
        self._works = [sandboxes, events.run(), tracer.run()]
        if options.extensions:
            claims = ClaimController(
                Store(claims_api, self.caches, at_once=_CLAIM_CALLS),
                store,
                events,
                self.metrics,
                right_of_way=way,
                label_domains=label_domains,
                now=now,
                tracer=tracer,
            )
            # Of its own: what a client waits for must not queue behind hundreds of members.
            filling = Store(connect(), self.caches, at_once=_CALLS)
            pools = WarmPoolController(filling, events, right_of_way=way, now=now)
            templates = TemplateController(store, events, tracer)
            self._works += [
                claims.queue.run(options.claim_workers),
                claims.notes.run(4),
                pools.queue.run(options.pool_workers),
                templates.queue.run(options.template_workers),
            ]
            if legacy:
                self._works.append(LegacyController(store, events).queue.run(_LEGACY_WORKERS))
        self.metrics.follow(self.caches[resources.SANDBOX], self.caches.get(resources.POOL))

    def is_synced(self) -> bool:
        return all(cache.synced.is_set() for cache in self.caches.values())

    async def run(self) -> None:
        """Follow and reconcile, for ever."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for cache in self.caches.values():
                group.create_task(cache.run())
            # Before everything is known, what is missing may only not be seen yet.
            for cache in self.caches.values():
                await cache.synced.wait()
            count = sum(map(len, self.caches.values()))
            log.info("synced: %d objects, %.1f s", count, time.monotonic() - began)
            for work in self._works:
                group.create_task(work)


def _cache(api: Api, kind: str) -> Cache:
    labels = resources.NAME_HASH if kind in _PARTS else ""
    return Cache(api, kind, trim=trim_pod if kind == "Pod" else None, labels=labels)


async def _label_domains(api: Api) -> tuple[str, ...]:
    """The allowed domains of labels, read once at start."""
    path = f"/api/v1/namespaces/{resources.SYSTEM_NAMESPACE}/configmaps/{resources.CONFIG_MAP}"
    while True:
        try:
            return policies.allowed_domains(await api.find(path))
        except ApiError as error:
            if error.status == 403:
                return policies.DEFAULT_LABEL_DOMAINS
            log.warning("%s", error)
        except ApiUnreachable as error:
            log.warning("%s", error)
        await asyncio.sleep(_PROBE_SECONDS)


async def run(options: Options) -> None:
    """Run until SIGTERM or SIGINT; LeadershipLost if another one may have taken over."""
    connect = connections(options.kubeconfig)
    active: list[Controller] = []
    idle = Metrics()

    def metrics() -> tuple[int, bytes]:
        return 200, (active[0].metrics if active else idle).text()

    def ready() -> tuple[int, bytes]:
        if active and not active[0].is_synced():
            return 503, b"not synced yet\n"
        return 200, b"ok\n"

    servers = [
        await probes.serve(address, answers)
        for address, answers in (
            (options.metrics_address, {"/metrics": metrics}),
            (options.probe_address, {"/healthz": lambda: (200, b"ok\n"), "/readyz": ready}),
        )
        if address not in ("", "0")
    ]
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    work = asyncio.create_task(_lead(options, connect, active))
    stop = asyncio.create_task(stopped.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    work.cancel()
    for server in servers:
        server.close()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _lead(options: Options, connect: Callable[[], Api], active: list[Controller]) -> None:
    api = connect()
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    election = Election(
        api, options.leader_election_namespace, options.leader_election_id, identity
    )
    if options.leader_elect:
        await election.win()
    try:
        controller = Controller(options, connect, await _label_domains(api))
        active.append(controller)
        async with asyncio.TaskGroup() as group:
            group.create_task(controller.run())
            if options.leader_elect:
                group.create_task(election.keep())
    except ExceptionGroup as failures:
        raise _first(failures) from None
    finally:
        if options.leader_elect:
            await asyncio.shield(election.release())


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended everything, out of the groups of tasks that it went through."""
    found: BaseException = failures
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return found  # pyright: ignore[reportUnknownVariableType]
