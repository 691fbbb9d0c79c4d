"""``k8e server``: a control plane and a node on this machine."""

from __future__ import annotations

import asyncio
import datetime
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from k8e import errors
from k8e.distro import (
    addons,
    certificates,
    cilium,
    cluster_objects,
    configuration,
    control_plane,
    gateway_component,
    join,
    manifests,
    node_services,
    preflight,
    tokens,
)
from k8e.distro.approval import Approver, component_group, component_user
from k8e.distro.certificates import Subject
from k8e.distro.configuration import Configuration
from k8e.distro.layout import COMMANDS, Layout, write_private
from k8e.distro.node import Node
from k8e.distro.node_services import NodeServices, Tell, persist
from k8e.distro.supervisor import Supervisor
from k8e.kubernetes.api import Api, ApiError, ApiUnreachable, Object, by_kubeconfig

log = logging.getLogger(__name__)

READY_SECONDS = 120.0
_LOOK_AGAIN = 0.1  # only until the API server is ready for the first time


class Server:
    """The control plane, its node, and what keeps both right."""

    def __init__(self, config: Configuration, components: Path, tell: Tell) -> None:
        self.config = config
        self.layout = config.layout
        self._components = components
        self._programs = components / "bin"
        self._tell = tell
        self._supervisor = Supervisor(self.layout)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, ready: Callable[[], None]) -> None:
        """Start everything, keep it running until SIGTERM, then end the components."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        starting = asyncio.create_task(self._start(ready))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await stopping
            self._tell("stopping; pods go on")
        finally:
            for task in (starting, stopping, *self._tasks):
                task.cancel()
            await asyncio.wait({starting, stopping, *self._tasks})
            await self._supervisor.stop()

    async def _start(self, ready: Callable[[], None]) -> None:
        began = time.monotonic()
        services = await asyncio.to_thread(self._prepare)
        etcd, api_server, *others = control_plane.components(self.config, self._programs)
        self._supervisor.add(etcd)
        self._supervisor.add(api_server)
        images = services.start_containerd()
        self._tasks.add(images)
        self._tell("etcd, API server and containerd start")
        api = await self._reach_api()
        configuration.note_made(self.config)  # not before: a first start that failed binds nobody
        self._tell("API server is ready")
        for component in others:  # they end if they are not given what they ask for at once
            self._supervisor.add(component)
        if self.config.cni == "cilium":
            self._keep("Cilium's definitions", self._apply_cilium)
        self._keep("certificate requests", Approver(by_kubeconfig(self._identity), self.config).run)
        await services.start_kubelet(images, self._tell)
        await self._apply_first(api)
        self._keep("network", services.run_network)
        if self.config.cni == "cilium":
            self._supervisor.add(cilium.operator(self.config, self._components))
        self._keep("images", services.load_images)
        self._keep("add-ons", lambda: self._apply_addons(services))
        self._keep("renewal of certificates", self._renew)
        self._keep("logs", self._supervisor.keep_logs_short)
        await services.wait_until_ready(api, self._tell)
        await api.apply(control_plane_label(self.config.node_name))
        api.close()
        self._tell(f"node {self.config.node_name} is ready, {time.monotonic() - began:.1f} s")
        if not self.config.disable_sandbox_matrix:
            self._supervisor.add(gateway_component.component(self.config))
            self._tell("the gateway starts; k8e sandbox run works on this machine")
        ready()

    def _keep(self, what: str, work: node_services.Work) -> None:
        task = asyncio.create_task(persist(what, work))
        self._tasks.add(task)

    @property
    def _identity(self) -> Path:
        return self.layout.credentials / "supervisor.kubeconfig"

    # Before the first component.

    def _prepare(self) -> NodeServices:
        config = self.config
        if gateway_component.move_state(self.layout):
            self._tell(f"what the gateway kept is now in {self.layout.gateway}")
        self.layout.make()
        self.layout.make_server()
        preflight.note_release(self.layout)
        configuration.remember(config)
        control_plane.write_certificates(config)
        control_plane.write_policies(config)
        self._write_token()
        found = node_of_server(config)
        write_node_certificates(config, found)
        services = NodeServices(found, self._supervisor, self._components)
        services.prepare()
        node_services.offer_commands(
            self._programs,
            containerd_socket=self.layout.containerd_socket,
            folder=COMMANDS,
            config=config.write_kubeconfig,
        )
        for runtime in services.runtimes:
            self._tell(f"runtime {runtime.name}: found")
        for missing in services.missing:
            self._tell(f"runtime {missing.name}: not on this machine ({missing.why})")
        return services

    def _write_token(self) -> None:
        path, given = self.layout.node_token, self.config.token
        bare = tokens.bare(given) if given else ""
        if not bare and path.exists():
            bare = tokens.parse(path.read_text("ascii")).bare
        authority = certificates.read(self.layout.tls / "server-ca.crt")
        made = tokens.Token(certificates.fingerprint(authority), bare or tokens.new_bare())
        write_private(path, f"{made}\n")

    # When the API server runs.

    async def _reach_api(self) -> Api:
        await self._supervisor.ready("kube-apiserver")
        api = by_kubeconfig(self._identity)
        deadline = time.monotonic() + READY_SECONDS
        while True:  # it serves before it is ready, and tells nobody when it is
            try:
                await api.get("/readyz")
                await api.get("/api/v1/namespaces/kube-system")
            except (ApiError, ApiUnreachable) as error:
                if time.monotonic() > deadline:
                    raise errors.TimedOut(
                        f"the API server is not ready after {READY_SECONDS:g} s: {error}",
                        hint=f"its log is {self.layout.logs / 'kube-apiserver.log'}",
                    ) from None
                await asyncio.sleep(_LOOK_AGAIN)
            else:
                return api

    async def _apply_first(self, api: Api) -> None:
        token = tokens.parse(self.layout.node_token.read_text("ascii"))
        await manifests.apply_all(api, cluster_objects.first(self.config, token.bare))
        await tokens.retire_others(api, token.id)

    async def _apply_cilium(self) -> None:
        wanted = await asyncio.to_thread(cilium.cluster_objects, self._components)
        await manifests.apply_all(by_kubeconfig(self._identity), wanted)

    async def _apply_addons(self, services: NodeServices) -> None:
        api = by_kubeconfig(self._identity)
        applier = manifests.Applier(api, self.layout)
        await applier.apply("k8e-addons", addons.objects(self.config, services.runtimes))
        self._tell("add-ons are applied")
        await manifests.follow_folder(applier, self.layout.manifests)

    async def _renew(self) -> None:
        """Make certificates anew before they expire; components notice new files by themselves."""
        while True:
            await asyncio.to_thread(self._renew_once)
            await node_services.sleep_until(next_renewal(self.layout))

    def _renew_once(self) -> None:
        if control_plane.write_certificates(self.config):
            log.info("certificates of the control plane were renewed")
        write_node_certificates(self.config, node_of_server(self.config))


def next_renewal(layout: Layout) -> datetime.datetime:
    """When the first certificate of the control plane, or of its own node, is to be renewed."""
    paths = [*layout.tls.glob("*.crt"), *layout.pki.glob("*.crt")]
    leaves = [path for path in paths if not path.stem.endswith("-ca")]
    return min(certificates.renewal_time(certificates.read(path)) for path in leaves)


def node_of_server(config: Configuration) -> Node:
    return Node(
        layout=config.layout,
        name=config.node_name,
        address=config.node_ip,
        server=config.api_address,
        cni=config.cni,
        cluster_cidr=config.cluster_cidr,
        service_cidr=config.service_cidr,
        cluster_dns=config.cluster_dns,
        cluster_domain=config.cluster_domain,
        labels=config.node_label,
        taints=config.node_taint,
        allow_swap=config.allow_swap,
    )


def control_plane_label(node: str) -> Object:
    """What a node may not say of itself."""
    labels = {"node-role.kubernetes.io/control-plane": "true"}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}}


def write_node_certificates(config: Configuration, found: Node) -> None:
    """The certificates of the server's own node, which needs no token."""
    layout = config.layout
    signers = control_plane.authorities(layout)
    for name in ("server-ca", "client-ca"):
        write_private(layout.pki / f"{name}.crt", signers[name].pem)
    component = node_services.component_of(config.cni)
    if component:
        user = component_user(component, found.name)
        subject = Subject(user, (component_group(component),))
        path = layout.pki / component
        certificates.leaf(signers["client-ca"], subject, path, days=config.certificate_days)
        join.write_component_config(found, component)
    path = layout.pki / "first-kubelet"
    subject = Subject(f"system:node:{found.name}", ("system:nodes",))
    if not join.has_kubelet_certificate(layout, signers["client-ca"], subject):
        certificates.leaf(signers["client-ca"], subject, path, days=config.certificate_days)
        crt, key = path.with_suffix(".crt"), path.with_suffix(".key")
        join.store_kubelet_certificate(layout, crt.read_bytes() + key.read_bytes())
        crt.unlink()
        key.unlink()
    join.write_kubelet_config(layout, found.server)
