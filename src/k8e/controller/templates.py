"""The reconciler of SandboxTemplate: the network policy of its sandboxes."""

from __future__ import annotations

import logging

from k8e.controller import blueprints, resources
from k8e.controller.events import Events
from k8e.controller.queue import WorkQueue
from k8e.controller.resources import Key, Object, key_of
from k8e.controller.store import Store
from k8e.controller.traces import Tracer
from k8e.kubernetes.api import CONFLICT, ApiError, entries

log = logging.getLogger(__name__)
NOT_OWNED = "NetworkPolicyNotOwned"
_SUFFIX = "-network-policy"
_FOREIGN_SECONDS = 60.0


class TemplateController:
    """Keeps one network policy for each template that wants one managed."""

    def __init__(self, store: Store, events: Events, tracer: Tracer | None = None) -> None:
        self._store, self._events = store, events
        self._tracer = tracer or Tracer()
        self.queue: WorkQueue[Key] = WorkQueue("template", self.reconcile)
        self._templates = store.cache(resources.TEMPLATE)
        self._policies = store.cache("NetworkPolicy")
        self._templates.tell(self._template_changed)
        self._policies.tell(self._policy_changed)

    def _template_changed(self, _before: Object | None, after: Object | None) -> None:
        if after is not None:
            self.queue.add(key_of(after))

    def _policy_changed(self, before: Object | None, after: Object | None) -> None:
        namespace, name = key_of(after or before or {})
        if name.endswith(_SUFFIX):
            self.queue.add((namespace, name.removesuffix(_SUFFIX)))

    async def reconcile(self, key: Key) -> float | None:
        """Look at one template; after how many seconds to look again."""
        template = self._templates.get(key)
        if template is None or resources.is_going(template):
            return None
        with self._tracer.span("ReconcileSandboxTemplate", template):
            return await self._reconcile(key, template)

    async def _reconcile(self, key: Key, template: Object) -> float | None:
        await self._label(template)
        wanted = blueprints.network_policy(template)
        has = self._policies.get((key[0], key[1] + _SUFFIX))
        if has is not None and not resources.is_controlled_by(has, template):
            if wanted is None:
                return None  # somebody else manages it, as the template says
            return self._refuse(template, has)
        if wanted is None:
            if has is not None and not resources.is_going(has):
                await self._store.delete("NetworkPolicy", has)
        elif has is None:
            try:
                await self._store.create("NetworkPolicy", wanted)
            except ApiError as error:
                if error.status != CONFLICT:
                    raise
                found = await self._store.read("NetworkPolicy", (key[0], key[1] + _SUFFIX))
                if found is not None and not resources.is_controlled_by(found, template):
                    return self._refuse(template, found)
        elif _with_defaults(wanted["spec"]) != _with_defaults(has["spec"]):
            gone = {part: None for part in has["spec"] if part not in wanted["spec"]}
            await self._store.patch("NetworkPolicy", has, {"spec": wanted["spec"] | gone})
        return None

    def _refuse(self, template: Object, has: Object) -> float:
        message = f"NetworkPolicy {has['metadata']['name']} is not owned by the template"
        log.error("%s: %s", "/".join(key_of(template)), message)
        self._events.warn(template, resources.TEMPLATE, NOT_OWNED, message)
        return _FOREIGN_SECONDS

    async def _label(self, template: Object) -> None:
        wanted = {resources.TEMPLATE_REF_HASH: resources.name_hash(template["metadata"]["name"])}
        if wanted.items() <= resources.labels_of(template).items():
            return
        await self._store.patch(resources.TEMPLATE, template, {"metadata": {"labels": wanted}})


def _with_defaults(spec: Object) -> Object:
    """A policy's spec as the API server keeps it."""
    found: Object = {part: value for part, value in spec.items() if value}
    for part in ("ingress", "egress"):
        rules: list[Object] = []
        for rule in entries(spec, part):
            made = dict(rule)
            if rule.get("ports"):
                made["ports"] = [{"protocol": "TCP", **port} for port in entries(rule, "ports")]
            rules.append(made)
        if rules:
            found[part] = rules
    return found
