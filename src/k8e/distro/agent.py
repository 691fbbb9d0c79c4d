"""``k8e agent``: a node of a cluster whose control plane is elsewhere."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

from k8e.distro import configuration, join, node_services, preflight
from k8e.distro.component_store import ComponentStore
from k8e.distro.configuration import Configuration
from k8e.distro.layout import COMMANDS, KUBECONFIG
from k8e.distro.node_services import NodeServices, Tell, persist
from k8e.distro.supervisor import Supervisor


class Agent:
    """A node that joins, and what keeps it right."""

    def __init__(self, config: Configuration, components: Path, tell: Tell) -> None:
        self.config = config
        self._components = components
        self._tell = tell
        self._supervisor = Supervisor(config.layout)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, ready: Callable[[], None]) -> None:
        """Join, run the node until SIGTERM, then end the components."""
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
        layout = self.config.layout
        layout.make()
        preflight.note_release(layout)
        configuration.remember(self.config)
        found = await join.join(self.config)
        self._tell(f"joined {self.config.server} as {found.name}")
        await asyncio.to_thread(self._check_network, found.cni)
        services = NodeServices(found, self._supervisor, self._components)
        await asyncio.to_thread(services.prepare)
        node_services.offer_commands(
            self._components / "bin",
            containerd_socket=layout.containerd_socket,
            folder=COMMANDS,
            config=KUBECONFIG,
        )
        images = services.start_containerd()
        self._tasks.add(images)
        component = node_services.component_of(found.cni)
        if component:
            if join.has_component_certificate(found, component):
                # Its renewal may wait for a server that is away; the pods here may not.
                join.write_component_config(found, component)
            else:
                await join.component_certificate(found, component)
            self._keep(
                f"the certificate of {component}",
                lambda: node_services.keep_certificate(found, component),
            )
        await services.start_kubelet(images, self._tell)
        self._keep("network", services.run_network)
        self._keep("images", services.load_images)
        self._keep("logs", self._supervisor.keep_logs_short)
        await services.wait_until_ready(join.node_api(found), self._tell)
        self._tell(f"node {found.name} is ready, {time.monotonic() - began:.1f} s")
        ready()

    def _check_network(self, cni: str) -> None:
        """What the network of this cluster needs, of which the machine knew nothing before."""
        preflight.check_kernel(cni)
        preflight.check_components(self.config, "agent", ComponentStore(self._components), cni)

    def _keep(self, what: str, work: node_services.Work) -> None:
        self._tasks.add(asyncio.create_task(persist(what, work)))
