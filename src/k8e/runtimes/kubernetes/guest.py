"""A sandbox in a pod, as sessions have it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from k8e import errors
from k8e.kubernetes.api import Object
from k8e.link import Link, request
from k8e.runtimes import bundle
from k8e.runtimes.base import Binding
from k8e.runtimes.kubernetes import objects
from k8e.runtimes.kubernetes.identity import PodIdentity
from k8e.runtimes.kubernetes.link import Dialler
from k8e.runtimes.kubernetes.records import PodRecord

CONNECT_SECONDS = 30.0
REDIAL_SECONDS = 10.0
SETTLE_SECONDS = 60.0
CHILD_OOM_SCORE = 500


class PodGuest:
    """A guest in a pod; it ends with the pod, whoever ends that."""

    def __init__(
        self, record: PodRecord, dialler: Dialler, purge: Callable[[str], Awaitable[None]]
    ) -> None:
        self.sandbox_id = record.sandbox_id
        self.record = record
        self._dialler = dialler
        self._purge = purge
        self._patience = CONNECT_SECONDS
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stop_watching: Callable[[], None] = lambda: None
        dialler.on_breach = lambda what: self.end(f"its guest broke the protocol: {what}")

    def note(self, pod: Object | None) -> None:
        """The cluster says something new of the pod."""
        if pod is None:
            self.end("its pod was deleted")
        elif pod["metadata"]["uid"] != self.record.pod_uid:
            self.end("its pod was replaced by another one, and what ran in it is lost")
        elif reason := objects.end_of(pod):
            self.end(reason)

    def end(self, reason: str) -> None:
        """Tell whoever waits that the sandbox is gone, and why; the first reason counts."""
        if not self._gone.done():
            self._gone.set_result(reason)
            self._dialler.close(errors.SandboxDied(reason))

    def leave(self) -> None:
        """Leave the sandbox, which goes on, to whoever adopted it after us."""
        self.stop_watching()
        self._dialler.close(errors.GuestFailed("the sandbox was adopted by another since"))

    @property
    def link(self) -> Link | None:
        return self._dialler.link

    async def connect(self) -> Link:
        ready = await self._dialler.ready(self._patience)
        self._patience = REDIAL_SECONDS
        return ready

    async def settle(self, warm: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        wanted = bundle.warm_languages(self.record.limits)
        call = {
            "op": "settle",
            "warm": {name: list(warm[name]) for name in wanted if name in warm},
            "oom_score_adj": CHILD_OOM_SCORE,
        }
        answer = await request(await self.connect(), call, seconds=SETTLE_SECONDS)
        too_large = [name for name in warm if name not in wanted and name in bundle.WARM]
        return (
            *(f"{name}: the limits leave no room for one that waits" for name in too_large),
            *(str(item) for item in answer.get("left_out") or ()),
        )

    async def bind(self, binding: Binding) -> None:
        limits = binding.limits or self.record.limits
        roomy = bundle.warm_languages(limits) if binding.warm else []
        call = {
            "op": "bind",
            "env": binding.env,
            "cwd": binding.cwd,
            "hidden": list(binding.hidden),
            "warm": {
                name: list(binding.warm.get(name, ()))
                for name in roomy
                if name in {*binding.warm, "node"}
            },
            "limits": dict(vars(limits)),
            # The cluster holds all processes of a node's pods to one number; this is ours.
            "nproc": limits.pids,
            "oom_score_adj": CHILD_OOM_SCORE,
        }
        try:
            await request(await self.connect(), call)
        except OSError as error:
            if not binding.cwd:
                raise
            raise errors.InvalidRequest(
                f"commands cannot start in {binding.cwd[:80]!r}: {error.strerror}"
            ) from None

    async def wait(self) -> str:
        return await asyncio.shield(self._gone)

    def limit_hits(self) -> Mapping[str, int]:
        return {}

    async def freeze(self) -> None:
        raise errors.RuntimeUnusable(
            "a sandbox in a pod cannot be paused: Kubernetes has no way to stop its processes",
            hint="save a snapshot and destroy the session; a new one can begin with it",
        )

    async def thaw(self) -> None:
        """Nothing was frozen."""

    async def heal_workspace(self) -> bool:
        return False

    async def kill(self) -> None:
        self.end("the session was destroyed")
        self.stop_watching()
        await self._purge(self.sandbox_id)


def identity_of(pod: Object) -> PodIdentity:
    """Whom the guest of a pod must prove to be."""
    metadata = pod["metadata"]
    return PodIdentity(metadata["namespace"], objects.ACCOUNT, metadata["name"], metadata["uid"])
