"""Kinds of early write-ups: templates, claims and warm pools in the group of Sandbox.

Each becomes today's object of its name, which it owns; what that says of itself is told in turn.
Only where the switch ``--legacy`` is on: the names are those of today's kinds, so kubectl needs the
group to tell them apart.
"""

from __future__ import annotations

import copy

from k8e.controller import conditions, resources, upgrade
from k8e.controller.additions import GROUP
from k8e.controller.events import Events
from k8e.controller.queue import WorkQueue
from k8e.controller.resources import Key, Object, key_of
from k8e.controller.store import Store
from k8e.kubernetes.api import CONFLICT, NOT_FOUND, ApiError, section

MADE_FROM = f"{GROUP}/legacy-generation"
"""On today's object: of which generation of the old one it was made."""
NAME_TAKEN = "NameTaken"
_FOREIGN_SECONDS = 60.0

Named = tuple[str, Key]
"""A kind and a key."""


class LegacyController:
    """Keeps today's objects as the old ones say."""

    def __init__(self, store: Store, events: Events) -> None:
        self._store, self._events = store, events
        self.queue: WorkQueue[Named] = WorkQueue("legacy", self.reconcile)
        for name, kind in resources.LEGACY_KINDS.items():
            store.cache(name).tell(lambda _, after, name=name: self._old_changed(name, after))
            store.cache(kind).tell(
                lambda before, after, name=name: self._changed(name, before, after)
            )

    def _old_changed(self, name: str, after: Object | None) -> None:
        if after is not None:
            self.queue.add((name, key_of(after)))

    def _changed(self, name: str, before: Object | None, after: Object | None) -> None:
        key = key_of(after or before or {})
        if self._store.cache(name).get(key) is not None:
            self.queue.add((name, key))

    async def reconcile(self, named: Named) -> float | None:
        """Look at one old object; after how many seconds to look again."""
        name, key = named
        old = self._store.cache(name).get(key)
        if old is None or resources.is_going(old):
            return None
        has = self._store.cache(resources.kind_of(name)).get(key)
        if has is not None and not resources.is_controlled_by(has, old):
            return await self._refuse(name, old)
        if has is None or _made_from(has) != _generation(old):
            kind = resources.kind_of(name)
            message = f"{kind} of {resources.LEGACY_VERSION} is deprecated: k8e manifests upgrade"
            self._events.warn(old, name, "Deprecated", message)
            kept = [await self._keep(name, old, wanted) for wanted in self._wanted(name, old)]
            has = kept[-1]
        if has is None:
            return await self._refuse(name, old)
        if name != resources.LEGACY_TEMPLATE:
            await self._tell(name, old, section(has, "status"))
        return None

    def _wanted(self, name: str, old: Object) -> list[Object]:
        """Today's objects of an old one; that of its own name comes last."""
        metadata: Object = {part: old["metadata"][part] for part in ("name", "namespace")}
        if labels := resources.labels_of(old):
            metadata["labels"] = labels
        metadata["annotations"] = resources.annotations_of(old)
        item: Object = {
            "apiVersion": resources.LEGACY_VERSION,
            "kind": resources.kind_of(name),
            "metadata": metadata,
            "spec": copy.deepcopy(old["spec"]),
        }
        names_none = name == resources.LEGACY_CLAIM and "warmpool" not in old["spec"]
        if names_none and (pool := self._pool_of(old)):
            item["spec"]["warmpool"] = pool
        return upgrade.upgrade([item])[0]

    def _pool_of(self, claim: Object) -> str:
        """A pool of the template that a claim names; empty if there is none."""
        spec = claim["spec"]
        template = spec.get("template") or section(spec, "sandboxTemplateRef").get("name")
        namespace = claim["metadata"]["namespace"]
        pools = (*self._store.cache(resources.POOL), *self._store.cache(resources.LEGACY_POOL))
        names = [
            pool["metadata"]["name"]
            for pool in pools
            if pool["metadata"]["namespace"] == namespace and _template_of(pool) == template
        ]
        return min((name for name in names if not upgrade.is_shadow(name)), default="")

    async def _keep(self, name: str, old: Object, wanted: Object) -> Object | None:
        """Make or change one of today's objects; None if its name is another one's."""
        kind, metadata = wanted["kind"], wanted["metadata"]
        own = metadata["name"] == old["metadata"]["name"]
        metadata["namespace"] = old["metadata"]["namespace"]
        if own:
            metadata["ownerReferences"] = [resources.owner_reference(old, name)]
            metadata["annotations"] = {
                **resources.annotations_of(wanted),
                MADE_FROM: str(_generation(old)),
            }
        has = self._store.cache(kind).get(key_of(wanted))
        if has is None:
            try:
                return await self._store.create(kind, wanted)
            except ApiError as error:
                if error.status != CONFLICT:
                    raise
            has = await self._store.read(kind, key_of(wanted))
        if has is None or not own:
            return has
        if not resources.is_controlled_by(has, old):
            return None
        gone = {part: None for part in has["spec"] if part not in wanted["spec"]}
        change = {"metadata": {"annotations": metadata["annotations"]}}
        return await self._store.patch(kind, has, {**change, "spec": {**wanted["spec"], **gone}})

    async def _refuse(self, name: str, old: Object) -> float:
        kind, own = resources.kind_of(name), old["metadata"]["name"]
        message = f"{kind} {own} of {resources.EXTENSIONS_VERSION} exists and was not made from it"
        self._events.warn(old, name, NAME_TAKEN, message)
        if name == resources.LEGACY_CLAIM:
            told = conditions.condition(conditions.READY, "False", NAME_TAKEN, message)
            made = conditions.merged(old, [told], conditions.seconds_of(_created(old)))
            await self._tell(name, old, {"conditions": made})
        return _FOREIGN_SECONDS

    async def _tell(self, name: str, old: Object, status: Object) -> None:
        has = section(old, "status")
        patch = conditions.status_patch(old, {**dict.fromkeys(has), **status})
        if not patch:
            return
        for part, value in patch["status"].items():
            if isinstance(value, dict) and isinstance(has.get(part), dict):
                patch["status"][part] = {**dict.fromkeys(has[part]), **value}
        try:
            await self._store.patch(name, old, patch, "status")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise


def _template_of(pool: Object) -> str:
    spec = pool["spec"]
    return spec.get("template") or section(spec, "sandboxTemplateRef").get("name") or ""


def _generation(item: Object) -> int:
    return int(item["metadata"].get("generation", 1))


def _made_from(item: Object) -> int:
    found = resources.annotations_of(item).get(MADE_FROM, "")
    return int(found) if found.isdecimal() else 0


def _created(item: Object) -> str:
    return item["metadata"]["creationTimestamp"]
