"""``k8e router``: the router of a cluster, which leads to the pods of Sandbox objects.

A program of its own and no mode of the gateway: it needs no sandbox runtime, keeps no state, may
only read Sandbox objects, and any number of it can run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import Receive, Scope, Send

from k8e import access, admission, errors, http_connections
from k8e.access import HostPolicy
from k8e.agent_sandbox.answers import Answer, Refusal
from k8e.agent_sandbox.forward import forward
from k8e.agent_sandbox.pods import Pods
from k8e.agent_sandbox.principals import AccessFile, Principal
from k8e.agent_sandbox.reach import Network, PodReach
from k8e.agent_sandbox.router import HEALTH, Router
from k8e.agent_sandbox.target import Target
from k8e.agent_sandbox.wake import HOLD_SECONDS, Activity, Waker
from k8e.controller import probes, resources
from k8e.controller.main import connections
from k8e.kubernetes.api import Api

log = logging.getLogger(__name__)

SERVICE = "sandbox-router-svc"
BACKLOG = 512
MAX_REQUESTS = 256
"""Requests of one principal under way, WebSockets included."""
MAX_ALL_REQUESTS = 900
"""Of all principals: fewer than connections, so that one is left to be told so."""
STOP_SECONDS = 20.0
"""For requests under way when the router stops."""


@dataclass(frozen=True)
class Options:
    """How the router runs; the defaults are those of its Deployment."""

    access: Path
    kubeconfig: Path | None = None
    address: str = ":8080"
    probe_address: str = ":8081"
    networks: tuple[Network, ...] = ()
    """Of pods; by default all that can be a pod's."""
    names: tuple[str, ...] = ()
    """Host names of the router, beside those of its service."""
    wake: bool = True
    hold_seconds: float = HOLD_SECONDS


class Requests:
    """How many are under way, of each principal."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[object]] = set()

    @contextlib.contextmanager
    def one(self, name: str) -> Generator[None]:
        if self._open[name] >= MAX_REQUESTS or self._open.total() >= MAX_ALL_REQUESTS:
            raise Refusal(429, "too many requests are under way; end some of them")
        self._open[name] += 1
        task = asyncio.current_task()
        assert task is not None, "requests are served in tasks"  # noqa: S101 - for the type alone
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    async def end(self, grace: float) -> None:
        """Wait for those under way, and then cut off the others."""
        tasks = list(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)


@dataclass
class Cluster:
    """What all requests share."""

    pods: Pods
    waker: Waker
    activity: Activity
    requests: Requests = field(default_factory=Requests)


class PodSandboxes:
    """The sandboxes of a cluster that one principal may use."""

    def __init__(self, cluster: Cluster, principal: Principal, gone: asyncio.Event) -> None:
        """``gone`` is set when the client of the request has left."""
        self._cluster = cluster
        self._principal = principal
        self._gone = gone

    async def check(self, asked: Target) -> None:
        if not self._principal.may_use(asked.namespace):
            text = f"there is no sandbox {asked.sandbox} in the namespace {asked.namespace}"
            raise Refusal(
                404, text
            )  # as if there were none: names of others' are nobody's business
        await self._cluster.waker.ready(asked, self._gone)

    async def serve(
        self, asked: Target, path: str, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        async with self._cluster.activity.of(asked):
            await forward(self._cluster.pods.open(asked), path, scope, receive, answer)


class App:
    """The router's HTTP app: who calls, and then the router."""

    def __init__(self, cluster: Cluster, file: AccessFile, names: tuple[str, ...] = ()) -> None:
        self._cluster = cluster
        self._file = file
        own = (f"{SERVICE}{rest}" for rest in _domains())
        self._host = HostPolicy.of("", "0.0.0.0", [*own, *names])  # noqa: S104 - any bare address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        answer = Answer(send)
        if path == HEALTH and scope["method"] == "GET":
            await answer.tell({"status": "ok"})
            return
        try:
            principal = self._principal(scope)
            with self._cluster.requests.one(principal.name):
                gone = scope["state"][http_connections.GONE]
                router = Router(PodSandboxes(self._cluster, principal, gone))
                await router(path, scope, receive, send)
        except Refusal as refused:
            await answer.refuse(refused)

    def _principal(self, scope: Scope) -> Principal:
        """Who calls; only those of the access file may."""
        principals = self._file.principals()
        if principals is None:
            raise Refusal(503, "the router's access file cannot be read; its log says why")
        headers = scope["headers"]
        if any(key == b"authorization" for key, _ in headers):
            found = principals.of_key(access.credential(headers))
            if found is None:
                raise Refusal(401, "the key is not known; send it as: Authorization: Bearer KEY")
        else:
            client = scope.get("client") or ("", 0)
            found = principals.of_address(client[0])
            if found is None:
                raise Refusal(401, "a key is missing; send it as: Authorization: Bearer KEY")
            # A page in a browser beside the caller has the caller's address, too.
            if (refused := access.judge_place(self._host, headers)) is not None:
                raise Refusal(refused.status, refused.text)
        admission.admit_request(scope)
        return found


def _domains() -> tuple[str, ...]:
    inside = f".{resources.SYSTEM_NAMESPACE}"
    return "", inside, f"{inside}.svc", f"{inside}.svc.cluster.local"


class Server(http_connections.Server):
    """The router's HTTP server."""

    def __init__(self, app: App, requests: Requests) -> None:
        super().__init__(app)
        self._requests = requests

    async def close_app(self) -> None:
        await self._requests.end(STOP_SECONDS)


def cluster_of(options: Options, connect: Callable[[], Api]) -> Cluster:
    """What leads to the sandboxes of a cluster."""
    pods = Pods(connect(), reach=lambda find: PodReach(find, networks=options.networks))
    waker = Waker(pods, connect(), enabled=options.wake, hold_seconds=options.hold_seconds)
    return Cluster(pods, waker, Activity(pods, connect(), enabled=options.wake))


async def run(options: Options) -> None:
    """Run until SIGTERM or SIGINT."""
    cluster = cluster_of(options, connections(options.kubeconfig))
    file = AccessFile(options.access)
    server = Server(App(cluster, file, options.names), cluster.requests)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.told.set)

    def ready() -> tuple[int, bytes]:
        known = cluster.pods.is_known
        return (200, b"ok\n") if known else (503, b"not in touch with the API server\n")

    watched = None
    if options.probe_address not in ("", "0"):
        answers = {"/healthz": lambda: (200, b"ok\n"), "/readyz": ready}
        watched = await probes.serve(options.probe_address, answers)
    following = asyncio.create_task(cluster.pods.run())
    listening = listen(options.address)
    log.info("serving on %s:%d", *listening.getsockname()[:2])
    try:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
        server.told.set()
        await serving
        if following.done():
            following.result()
    finally:
        following.cancel()
        await cluster.activity.close()
        if watched is not None:
            watched.close()


def listen(address: str) -> socket.socket:
    """A socket that listens at ``HOST:PORT``; without a host, at all addresses of both families."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return _bound(family, host, int(port))
        with contextlib.suppress(OSError):  # there are machines without IPv6
            return _bound(socket.AF_INET6, "", int(port))
        return _bound(socket.AF_INET, "", int(port))
    except (OSError, ValueError, OverflowError) as error:
        raise errors.InvalidRequest(
            f"the router cannot listen at {address!r}: {error}", hint="use HOST:PORT, or :PORT"
        ) from None


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # With the protocol named, asyncio turns Nagle's algorithm off.
    found = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if not host else 1)
        found.setblocking(False)
        found.bind((host, port))
        found.listen(BACKLOG)
    except BaseException:
        found.close()
        raise
    return found
