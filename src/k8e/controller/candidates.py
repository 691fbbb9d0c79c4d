"""Members of warm pools that a claim may be given, in memory, fed by the watch of sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from k8e.controller import conditions, desired, resources
from k8e.controller.resources import Key, Object, key_of, uid_of
from k8e.kubernetes.api import section


@dataclass
class _Members:
    """The idle members of one pool, by how much of a sandbox they are."""

    ready: dict[str, dict[Key, Object]] = field(default_factory=dict[str, dict[Key, Object]])
    """By node."""
    addressed: dict[Key, Object] = field(default_factory=dict[Key, Object])
    """Not ready, but with an address: their pod runs."""
    starting: dict[Key, Object] = field(default_factory=dict[Key, Object])


class Candidates:
    """Hands out members, each to one claim at a time."""

    def __init__(self, on_available: Callable[[str], None]) -> None:
        """``on_available`` is told the uid of a pool one of whose members can be had now."""
        self._on_available = on_available
        self._pools: dict[str, _Members] = {}
        self._held: set[str] = set()

    def change(self, before: Object | None, after: Object | None) -> None:
        """Follow a cache of sandboxes."""
        was = before is not None and self._remove(before)
        if after is None or not is_member(after):
            return
        pool = resources.owner_uid(after, resources.POOL)
        found, key = self._pools.setdefault(pool, _Members()), key_of(after)
        if resources.is_true(after, conditions.READY):
            node = section(after, "status").get("nodeName") or ""
            found.ready.setdefault(node, {})[key] = after
        elif section(after, "status").get("podIPs"):
            found.addressed[key] = after
        else:
            found.starting[key] = after
            return
        if not was:
            self._on_available(pool)

    def _remove(self, item: Object) -> bool:
        """Forget a member; whether it could be had."""
        pool, key = resources.owner_uid(item, resources.POOL), key_of(item)
        found = self._pools.get(pool)
        if found is None:
            return False
        found.starting.pop(key, None)
        was = found.addressed.pop(key, None) is not None
        node = section(item, "status").get("nodeName") or ""
        if (on_node := found.ready.get(node)) is not None:
            was |= on_node.pop(key, None) is not None
            if not on_node:
                del found.ready[node]
        if not (found.starting or found.addressed or found.ready):
            del self._pools[pool]
        return was

    def take(self, pool: str, fits: Callable[[Object], bool]) -> Object | None:
        """Hold the best member: ready, on the node that has most left, the oldest there."""
        found = self._pools.get(pool)
        if found is None:
            return None
        for members in (*sorted(found.ready.values(), key=len, reverse=True), found.addressed):
            free = [item for item in members.values() if uid_of(item) not in self._held]
            for best in sorted(free, key=_age):
                if fits(best):
                    self._held.add(uid_of(best))
                    return best
        return None

    def release(self, item: Object) -> None:
        """Give up a hold: the member is a claim's now, or nobody's."""
        self._held.discard(uid_of(item))

    def is_starting(self, pool: str) -> bool:
        """Whether a pool has members that may be ready in a moment."""
        found = self._pools.get(pool)
        return found is not None and bool(found.starting)


def is_member(sandbox: Object, pool: str = "") -> bool:
    """Whether a sandbox is an idle member of the pool that owns it, and nothing else.

    With a name, of that pool. The labels are the controller's; asking for them and for the owner
    keeps others from putting a sandbox of their own into a pool.
    """
    owner = resources.controller_of(sandbox)
    labels = resources.labels_of(sandbox)
    return (
        owner is not None
        and owner["kind"] == resources.POOL
        and pool in ("", owner["name"])
        and labels.get(resources.POOL_HASH) == resources.name_hash(owner["name"])
        and resources.TEMPLATE_REF_HASH in labels
        and not resources.is_going(sandbox)
        and not desired.is_suspended(sandbox)
    )


def _age(item: Object) -> tuple[str, str]:
    return item["metadata"]["creationTimestamp"], item["metadata"]["name"]
