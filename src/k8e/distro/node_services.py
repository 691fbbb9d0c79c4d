"""A node while it runs: its components, its runtimes and its network."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from k8e import errors
from k8e.distro import (
    basic_network,
    cilium,
    guest_image,
    image_import,
    join,
    kernel_settings,
    node,
    runtime_classes,
)
from k8e.distro.node import Node
from k8e.distro.runtime_classes import Missing, Runtime
from k8e.distro.supervisor import Supervisor
from k8e.kubernetes.api import Api, Object, by_kubeconfig, entries

log = logging.getLogger(__name__)

Tell = Callable[[str], None]
Work = Callable[[], Awaitable[None]]
READY_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_RENEWAL_PAUSE = datetime.timedelta(minutes=1)


class NodeServices:
    """containerd, kubelet and the network of one machine."""

    def __init__(self, found: Node, supervisor: Supervisor, components: Path) -> None:
        self.node = found
        self.runtimes: list[Runtime] = []
        self.missing: list[Missing] = []
        self._supervisor = supervisor
        self._components = components
        self._programs = components / "bin"

    def prepare(self) -> None:
        """Find the runtimes of this machine, and write what components read."""
        path = node.search_path(self._programs)["PATH"]
        self.runtimes, self.missing = runtime_classes.detect(
            lambda name: shutil.which(name, path=path)
        )
        kernel_settings.remember(self.node.layout)
        node.write_files(self.node, self._programs, self.runtimes)

    def start_containerd(self) -> asyncio.Task[None]:
        """Start containerd; the task gives it the images without which no pod starts."""
        containerd, *_ = node.components(self.node, self._programs)
        self._supervisor.add(containerd)
        return asyncio.create_task(self._load_first_images())

    async def _load_first_images(self) -> None:
        await self._supervisor.ready("containerd")
        await image_import.load_first(self.node.layout, self._components)

    async def start_kubelet(self, images: asyncio.Task[None], tell: Tell) -> None:
        """Start the rest, as soon as the images of the node are there."""
        await images
        _, kubelet, *others = node.components(self.node, self._programs)
        for component in (kubelet, *others):
            self._supervisor.add(component)
        if self.node.cni == "cilium":
            # It copies some hundred files, for which the other components need not wait.
            self._supervisor.add(await asyncio.to_thread(cilium.agent, self.node, self._components))
        tell("kubelet starts")

    async def load_images(self) -> None:
        await image_import.load_all(self.node.layout, self._components)
        layout = self.node.layout
        made = await asyncio.to_thread(guest_image.write, layout.agent / "guest")
        await image_import.load(layout, self._components, made)

    async def run_network(self) -> None:
        """What keeps the network right beside its own components."""
        if self.node.cni != "basic":
            return
        nodes = by_kubeconfig(self.node.kubeconfig_of("kube-proxy"))
        await basic_network.run(self.node, join.node_api(self.node), nodes=nodes)

    async def wait_until_ready(self, api: Api, tell: Tell) -> None:
        """Wait until the cluster says that this node is ready, or that it is there.

        Without a network it is not ready before somebody has brought one. However long it takes:
        a node whose server is away goes on with the pods that it has.
        """
        holds = is_ready if self.node.cni != "none" else bool
        selector = f"metadata.name={self.node.name}"
        while True:
            try:
                await api.wait_until(
                    "/api/v1/nodes", holds, seconds=READY_SECONDS, fieldSelector=selector
                )
            except TimeoutError:
                tell(
                    f"the node {self.node.name} is not ready after {READY_SECONDS:g} s; k8e status "
                    "tells what is missing, kubelet.log and containerd.log have more"
                )
            else:
                return


def is_ready(item: Object) -> bool:
    conditions = entries(item, "status", "conditions")
    return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)


def component_of(cni: str) -> str:
    """The component of a node's network that has a certificate of its own; empty if none."""
    return {"basic": "kube-proxy", "cilium": "cilium"}.get(cni, "")


async def keep_certificate(found: Node, component: str) -> None:
    """Renew the certificate of a component each time that it is due."""
    while True:
        due = await join.component_certificate(found, component)
        await sleep_until(due)


async def sleep_until(due: datetime.datetime) -> None:
    """Sleep until a date, whatever anybody does to the clock in between."""
    hour = datetime.timedelta(hours=1)
    while (left := due - datetime.datetime.now(datetime.UTC)) > datetime.timedelta():  # noqa: ASYNC110
        # Never for long: the clock that counts sleeps knows nothing of dates.
        await asyncio.sleep(min(left, hour).total_seconds() + 1)


async def persist(what: str, work: Work) -> None:
    """Do something again, with pauses, until it succeeds: a node does not stop for it.

    Not for a defect of ours either: nobody awaits these tasks, so one that ended by an error would
    end without a word, and certificates would be signed and renewed no more.
    """
    pause = _FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            await work()
        except Exception as error:
            if time.monotonic() - began > _LONGEST_PAUSE:
                pause = _FIRST_PAUSE
            expected = isinstance(error, (errors.K8eError, *errors.UNREADABLE))
            why = error if str(error) else type(error).__name__
            log.warning("%s: %s; again in %g s", what, why, pause, exc_info=not expected)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        else:
            return


def offer_commands(programs: Path, *, containerd_socket: Path, folder: Path, config: Path) -> None:
    """Put ``kubectl`` and ``ctr`` on the PATH, unless the machine has them."""
    for name, lines in (
        ("kubectl", f'KUBECONFIG="${{KUBECONFIG:-{config}}}" exec {programs / "kubectl"} "$@"'),
        ("ctr", f'exec {programs / "ctr"} --address {containerd_socket} "$@"'),
    ):
        path = folder / name
        if shutil.which(name) is None or _is_ours(path):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\n{OURS}\n{lines}\n", "utf-8")
            path.chmod(0o755)


OURS = "# Written by k8e; removed by its uninstall."


def _is_ours(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and OURS.encode() in path.read_bytes()[:200]


def withdraw_commands(folder: Path) -> None:
    for name in ("kubectl", "ctr"):
        if _is_ours(folder / name):
            os.unlink(folder / name)  # noqa: PTH108
