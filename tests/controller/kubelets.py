"""A stand-in for scheduler and kubelet: it gives pods a node, an address and a status.

What a pod's annotation ``test/phase`` says, its status becomes: ``Running`` by default;
``Pending``, ``Succeeded``, ``Failed``, ``NotReady`` or ``Unschedulable``.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

from k8e.controller.cache import Cache
from k8e.controller.conditions import timestamp
from k8e.controller.queue import WorkQueue
from k8e.controller.resources import Key, key_of
from k8e.kubernetes.api import NOT_FOUND, Api, ApiError, entries, read_kubeconfig, section

MERGE = "application/merge-patch+json"
WISH = "test/phase"


class Kubelet:
    """Runs all pods of a cluster that no kubelet runs."""

    def __init__(self, kubeconfig: Path, *, nodes: int = 10) -> None:
        server, context, token = read_kubeconfig(kubeconfig)
        self._api = Api(server, context, token=token, most_idle=8, reuse_for_posts=True)
        self.pods = Cache(Api(server, context, token=token), "Pod")
        self.pods.tell(self._changed)
        self._queue: WorkQueue[Key] = WorkQueue("pod", self._look)
        self._nodes = itertools.cycle(range(nodes))
        self._addresses = itertools.count(1)

    def _changed(self, _before: Any, after: Any) -> None:
        if after is not None:
            self._queue.add(key_of(after))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pods.run())
            group.create_task(self._queue.run(16))

    async def _look(self, key: Key) -> float | None:
        pod = self.pods.get(key)
        if pod is None:
            return None
        path = f"/api/v1/namespaces/{key[0]}/pods/{key[1]}"
        try:
            if "deletionTimestamp" in pod["metadata"]:
                body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
                await self._api.call("DELETE", path, body)
                return None
            wish = section(pod["metadata"], "annotations").get(WISH, "Running")
            if not pod["spec"].get("nodeName") and wish != "Unschedulable":
                await self._bind(pod, path)
                return None
            status = self._status(pod, wish)
            if status:
                await self._api.call("PATCH", f"{path}/status", {"status": status}, kind=MERGE)
        except ApiError as error:
            if error.status not in (NOT_FOUND, 409):
                raise
        return None

    async def _bind(self, pod: Any, path: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": f"node-{next(self._nodes)}"}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod["metadata"]["name"]},
            "target": target,
        }
        await self._api.call("POST", f"{path}/binding", body)

    def _status(self, pod: Any, wish: str) -> dict[str, Any] | None:
        has = section(pod, "status")
        phase = {"NotReady": "Running", "Unschedulable": "Pending"}.get(wish, wish)
        ready = "True" if wish == "Running" else "False"
        found = next((one for one in entries(has, "conditions") if one["type"] == "Ready"), None)
        if has.get("phase") == phase and found is not None and found["status"] == ready:
            return None
        now = timestamp(time.time())
        scheduled = "False" if wish == "Unschedulable" else "True"
        conditions = [
            {"type": "Ready", "status": ready, "lastTransitionTime": now},
            {"type": "PodScheduled", "status": scheduled, "lastTransitionTime": now},
        ]
        if wish == "Unschedulable":
            conditions[1] |= {"reason": "Unschedulable", "message": "0/1 nodes are available"}
        made: dict[str, Any] = {"phase": phase, "conditions": conditions}
        if wish in ("Running", "NotReady") and not has.get("podIPs"):
            number = next(self._addresses)
            address = f"10.{42 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
            made |= {"podIP": address, "podIPs": [{"ip": address}], "startTime": now}
        return made


if __name__ == "__main__":
    asyncio.run(Kubelet(Path(sys.argv[1])).run())
