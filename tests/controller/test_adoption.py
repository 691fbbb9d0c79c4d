"""Adoption where the API server's answers get lost, against one that keeps objects in memory."""

from __future__ import annotations

import copy
import ssl
import time
from typing import Any, cast

import pytest

from k8e.controller import blueprints, resources
from k8e.controller.cache import Cache
from k8e.controller.claims import ClaimController
from k8e.controller.events import Events
from k8e.controller.metrics import Metrics
from k8e.controller.resources import Object, key_of, path_of
from k8e.controller.store import RightOfWay, Store
from k8e.kubernetes.api import CONFLICT, NOT_FOUND, Api, ApiError
from tests.controller.clusters import claim, pool, template
from tests.controller.test_decisions import stored

pytestmark = pytest.mark.anyio
KINDS = (resources.SANDBOX, resources.CLAIM, resources.POOL, resources.TEMPLATE)


def merge(has: Object, patch: Object) -> Object:
    """A merge patch (RFC 7396)."""
    made = dict(has)
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            known: Object = made.get(name) or {}
            made[name] = merge(known, cast("Object", value)) if isinstance(value, dict) else value
    return made


class Memory(Api):
    """An API server; its answer to the first change of a sandbox is lost, and so it is done twice,
    as :class:`Api` does where a connection breaks."""

    def __init__(self) -> None:
        super().__init__("https://127.0.0.1:1", ssl.create_default_context())
        self.objects: dict[str, Object] = {}
        self.lost = False
        self._version = 100

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: str = "application/json",
        seconds: float = 30.0,
    ) -> Object:
        del kind, seconds
        path = path.removesuffix("/status")
        if method == "POST":
            return copy.deepcopy(body)
        if path not in self.objects:
            raise ApiError(NOT_FOUND, {}, path)
        if method == "PATCH":
            self._patch(path, copy.deepcopy(body))
            if not self.lost and "/sandboxes/" in path:
                self.lost = True
                self._patch(path, copy.deepcopy(body))
        return copy.deepcopy(self.objects[path])

    def _patch(self, path: str, patch: Object) -> None:
        has = self.objects[path]
        wanted = patch.get("metadata", {}).pop("resourceVersion", None)
        if wanted not in (None, has["metadata"]["resourceVersion"]):
            raise ApiError(CONFLICT, {"message": "it was changed"}, path)
        self._version += 1
        patch.setdefault("metadata", {})["resourceVersion"] = str(self._version)
        self.objects[path] = merge(has, patch)


async def test_a_claim_whose_adoption_was_answered_too_late_takes_no_second_sandbox() -> None:
    api = Memory()
    caches = {kind: Cache(api, kind) for kind in KINDS}
    store = Store(api, caches, at_once=4)
    controller = ClaimController(
        store,
        store,
        Events(api),
        Metrics(),
        right_of_way=RightOfWay(),
        label_domains=(),
        now=time.time,
    )

    def add(kind: str, item: Object) -> Object:
        api.objects[path_of(kind, key_of(item))] = item
        return caches[kind].absorb(copy.deepcopy(item))

    made = add(resources.TEMPLATE, stored(template()))
    owner = add(resources.POOL, stored(pool(replicas=2)))
    for name in ("pool-a", "pool-b"):
        member = stored(blueprints.member(owner, made, name))
        ready = {"type": "Ready", "status": "True", "reason": "DependenciesReady", "message": ""}
        member["status"] = {"conditions": [ready], "podIPs": ["10.0.0.1"], "nodeName": "one"}
        add(resources.SANDBOX, member)
    mine = add(resources.CLAIM, stored(claim("mine")))
    await controller.reconcile(key_of(mine))
    assert api.lost
    sandboxes = [one for path, one in api.objects.items() if "/sandboxes/" in path]
    [given] = [one for one in sandboxes if resources.is_controlled_by(one, mine)]
    told = api.objects[path_of(resources.CLAIM, key_of(mine))]["status"]["sandbox"]
    assert told["name"] == given["metadata"]["name"]
