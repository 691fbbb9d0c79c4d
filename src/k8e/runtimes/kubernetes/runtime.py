"""The runtime ``kubernetes``: a sandbox is a SandboxClaim, and its guest is in the claim's pod.

There is one such runtime for each RuntimeClass that the operator lets sessions ask for. Which one a
session gets never changes by what a cluster lacks: a class that is missing is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from k8e import errors, link
from k8e._version import __version__
from k8e.kubernetes.api import CONFLICT, NOT_FOUND, ApiError, ApiUnreachable, Object
from k8e.model import Limits, Rootfs, SandboxSpec
from k8e.runtimes.base import Guest, NotRemoved, Support
from k8e.runtimes.host import file_facts
from k8e.runtimes.kubernetes import objects, probe
from k8e.runtimes.kubernetes.cluster import Cluster
from k8e.runtimes.kubernetes.guest import PodGuest, identity_of
from k8e.runtimes.kubernetes.link import Dialler
from k8e.runtimes.kubernetes.records import PodRecord

log = logging.getLogger(__name__)

LAUNCH_SECONDS = 120.0
"""For a pod to run, its images pulled; a cluster that scales up may need that long."""
ADOPT_SECONDS = 30.0
REMOVE_SECONDS = 20.0
GUEST_IMAGE = f"k8e.internal/guest:{__version__}"
_STRENGTHS = {"kata": 40, "firecracker": 40, "gvisor": 30}
_TITLES = {"gvisor": "gVisor", "kata": "Kata Containers", "firecracker": "Firecracker"}


class Kubernetes:
    """Sandboxes in pods of one RuntimeClass."""

    weakness = "its pods have the RuntimeClass that was asked for, and no other"
    networked = False

    def __init__(self, cluster: Cluster, runtime_class: str, aliases: Sequence[str] = ()) -> None:
        self.cluster = cluster
        self.name = runtime_class
        self.title = f"{_TITLES.get(runtime_class, runtime_class)} in pods"
        self.aliases: Sequence[str] = aliases
        self.strength = _STRENGTHS.get(runtime_class, 10)
        self._guests = WeakValueDictionary[str, PodGuest]()

    # What it says of itself.

    async def probe(self) -> Support:
        return await probe.probe(self)

    def facts(self) -> Sequence[str]:
        settings = self.cluster.settings
        return [
            # Another file may lead to another cluster, whose network enforces nothing.
            *("kubernetes", file_facts(settings.kubeconfig), settings.pod_namespace),
            *(settings.sandbox_image, settings.guest_image, settings.runtime_classes),
        ]

    def recall(self, support: Support) -> None:
        """It has nothing to choose."""

    def can_change(self, launched: Limits, asked: Limits) -> bool:
        fixed = replace(
            asked, pids=launched.pids, output=launched.output, open_files=launched.open_files
        )
        return fixed == launched and asked.open_files <= launched.open_files

    def excess(self, limits: Limits) -> str:
        return "no limit of files in /workspace (inodes) holds in a pod" if limits.inodes else ""

    async def fetch(self, rootfs: Rootfs) -> None:
        self._image(rootfs)  # the kubelet pulls it

    def _image(self, rootfs: Rootfs) -> str:
        if rootfs.kind == "image":
            return rootfs.source
        if rootfs.kind != "host":
            raise errors.InvalidRequest(
                f"a sandbox in a pod cannot have a root file system of the kind {rootfs.kind!r}",
                hint="name an image that the cluster can pull",
            )
        if not self.cluster.settings.sandbox_image:
            raise errors.RuntimeUnusable(
                "no image is set for sandboxes in pods that name none",
                hint="set K8E_SANDBOX_IMAGE, or use a template with an image",
            )
        return self.cluster.settings.sandbox_image

    def recipe(self, limits: Limits, rootfs: Rootfs) -> objects.Recipe:
        """What the pod of a sandbox is made of."""
        settings, authority = self.cluster.settings, self.cluster.authority
        return objects.Recipe(
            namespace=self.cluster.namespace,
            image=self._image(rootfs),
            guest_image=settings.guest_image or GUEST_IMAGE,
            runtime_class=self.name,
            limits=limits,
            authority=authority.pem,
            fingerprint=authority.fingerprint,
        )

    # Starting.

    async def launch(self, spec: SandboxSpec) -> Guest:
        if spec.workspace_of:
            raise errors.RuntimeUnusable(
                "sub-agents share a workspace with their session, which pods of this release "
                "cannot",
                hint="give the sub-agent a session of its own, and copy files to it",
            )
        recipe = self.recipe(spec.limits, spec.rootfs)
        key = secrets.token_bytes(link.KEY_SIZE).hex()
        template = objects.name_of(recipe)
        record = PodRecord(spec.sandbox_id, self.name, spec.limits, key, template)
        self.cluster.records.save(record)
        patience = asyncio.timeout(LAUNCH_SECONDS)
        try:
            async with patience:
                return await self._launch(record, recipe)
        except BaseException as error:
            with contextlib.suppress(errors.K8eError):  # somebody goes on with it
                await asyncio.shield(self.purge(spec.sandbox_id))
            if isinstance(error, TimeoutError) and patience.expired():
                raise errors.TimedOut(
                    f"no sandbox started in {LAUNCH_SECONDS:g} s: {self._why(record)}",
                    hint="kubectl describe sandboxclaims,pods -n "
                    f"{self.cluster.namespace} shows what the cluster waits for",
                ) from None
            raise

    async def _launch(self, record: PodRecord, recipe: objects.Recipe) -> Guest:
        await self.cluster.prepare(recipe)
        record = await _to_its_end(self._claimed(record, recipe))
        pod = await self._started(record)
        record = replace(
            record, pod=str(pod["metadata"]["name"]), pod_uid=str(pod["metadata"]["uid"])
        )
        guest = self._guest(record, pod, is_taken=False)
        try:
            await guest.connect()
        except BaseException:
            guest.end("its launch failed")
            guest.stop_watching()
            raise
        self.cluster.records.save(record)
        return guest

    async def _claimed(self, record: PodRecord, recipe: objects.Recipe) -> PodRecord:
        """The record of a sandbox whose claim is made."""
        made = await self._claim(recipe, record.sandbox_id)
        record = replace(record, claim_uid=made["metadata"]["uid"])
        self.cluster.records.save(record)
        return record

    async def _claim(self, recipe: objects.Recipe, name: str) -> Object:
        path = self.cluster.path("sandboxclaims")
        try:
            return await self.cluster.api.call("POST", path, objects.claim(recipe, name))
        except ApiError as error:
            if error.status == NOT_FOUND:  # somebody removed the namespace
                self.cluster.forget()
                raise
            if error.status != CONFLICT:
                raise
            # Sent twice: the name is random, so it is ours.
            return await self.cluster.api.get(self.cluster.path("sandboxclaims", name))

    async def _started(self, record: PodRecord) -> Object:
        """The pod of a claim, once its guest runs."""
        started: asyncio.Future[Object] = asyncio.get_running_loop().create_future()

        def note(pod: Object | None) -> None:
            if started.done() or pod is None:
                return
            if reason := objects.end_of(pod) or objects.fault_of(pod):
                started.set_exception(
                    errors.RuntimeUnusable(
                        f"the sandbox's pod did not start: {reason[:600]}",
                        hint="k8e doctor --fresh tries the cluster",
                    )
                )
            elif objects.address_of(pod):
                started.set_result(pod)

        stop = self.cluster.pods.watch(record.claim_uid, note)
        try:
            return await started
        finally:
            stop()

    def _why(self, record: PodRecord) -> str:
        """What is known of a pod that did not start in time."""
        found = self.cluster.records.load(record.sandbox_id) or record
        pod = self.cluster.pods.get(found.claim_uid)
        if pod is None:
            return "its claim got no pod; does agent-sandbox's controller run?"
        return objects.progress_of(pod)

    def _guest(self, record: PodRecord, pod: Object, *, is_taken: bool) -> PodGuest:
        verify = functools.partial(self.cluster.verifier.verify, pod=identity_of(pod))
        dialler = Dialler(
            objects.address_of(pod),
            context=self.cluster.authority.context,
            verify=verify,
            key=bytes.fromhex(record.key),
            is_taken=is_taken,
        )
        guest = PodGuest(record, dialler, self.purge)
        # A link is the newest caller's: two who dial again whenever they have lost it would take
        # it from each other for ever, and end all that runs over it each time.
        if (earlier := self._guests.get(record.sandbox_id)) is not None:
            earlier.leave()
        self._guests[record.sandbox_id] = guest
        dialler.start()
        guest.stop_watching = self.cluster.pods.watch(record.claim_uid, guest.note)
        if self.cluster.pods.get(record.claim_uid) is None:  # it went meanwhile
            guest.note(None)
        return guest

    # What is there already.

    async def adopt(self) -> list[Guest]:
        known = (self.cluster.records.load(name) for name in sorted(self.remains()))
        records = [item for item in known if item is not None and item.runtime == self.name]
        if not records:
            return []
        try:
            await self.cluster.pods.synced(ADOPT_SECONDS)
        except TimeoutError:
            raise errors.RuntimeUnusable(
                f"{len(records)} sandboxes are in pods of a cluster whose API server "
                f"({self.cluster.api.server}) does not answer",
                hint="start the gateway when it does; the sandboxes go on meanwhile",
            ) from None
        guests: list[Guest] = []
        for record in records:
            pod = self.cluster.pods.get(record.claim_uid)
            if pod is None or not record.pod_uid or pod["metadata"]["uid"] != record.pod_uid:
                continue
            if objects.end_of(pod) or not objects.address_of(pod):
                continue
            guests.append(self._guest(record, pod, is_taken=True))
        return guests

    def remains(self) -> set[str]:
        return self.cluster.records.names()

    async def find_greedy(self, sandbox_ids: Iterable[str]) -> Mapping[str, str]:
        return {}

    async def purge(self, sandbox_id: str) -> None:
        if sandbox_id not in self.remains():
            return
        record = self.cluster.records.load(sandbox_id)
        try:
            async with asyncio.timeout(REMOVE_SECONDS):
                await self._remove(sandbox_id, record)
        except (TimeoutError, ApiError, ApiUnreachable) as error:
            # The record stays, and so the next gateway, or the next try, knows of it.
            what = f"its pod: {str(error) or 'the cluster has not ended it yet'}"
            self.cluster.leftovers.note(sandbox_id, what)
            raise NotRemoved(what) from error
        self.cluster.records.remove(sandbox_id)
        self.cluster.leftovers.forget(sandbox_id)

    async def _remove(self, sandbox_id: str, record: PodRecord | None) -> None:
        """Delete claim, sandbox and pod, and wait until the pod is gone.

        The cluster would delete the other two after the claim; that takes it some seconds.
        """
        gone = asyncio.Event()
        stop: Callable[[], None] | None = None
        pod = self.cluster.pods.get(record.claim_uid) if record and record.claim_uid else None
        if record is not None and pod is not None:
            stop = self.cluster.pods.watch(
                record.claim_uid, lambda found: gone.set() if found is None else None
            )
        name = pod["metadata"]["name"] if pod is not None else sandbox_id
        try:
            await self.cluster.delete("sandboxclaims", sandbox_id)
            await self.cluster.delete("sandboxes", name, group="agents")
            await self.cluster.delete("pods", name, group="core")
            if pod is not None:
                await gone.wait()
        finally:
            if stop is not None:
                stop()


async def _to_its_end(work: Coroutine[Any, Any, PodRecord]) -> PodRecord:
    """What work gives; whoever gives it up waits until it is done, or has failed.

    A claim that the API server makes after it was told to delete it would stay for ever.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
