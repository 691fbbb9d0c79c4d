"""Egress for all sandboxes of a gateway: slots at the router, policies, names, denials."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.egress.dns import Client, Responder, Upstream, host_resolvers
from k8e.egress.policy import Policy, Preset, Rule, parse_rule
from k8e.egress.router import Router, Slot, Target, unmount

log = logging.getLogger(__name__)

KEPT_DENIALS = 200  # per sandbox; the newest


@dataclass(frozen=True)
class Denial:
    """Something that a sandbox was not allowed to reach."""

    at: float
    name: str
    reason: str
    address: str = ""
    port: int = 0

    def to_json(self) -> dict[str, Any]:
        return self.__dict__.copy()


class Egress:
    """Attaches sandboxes to the router and keeps their policies."""

    def __init__(self, folder: Path, *, world: Path | None = None, upstreams: list[Upstream] | None = None) -> None:
        self.folder = folder
        self._router = Router(folder, world=world)
        self._responder = Responder(self._router, upstreams or host_resolvers())
        self._slots: dict[str, Slot] = {}
        self._policies: dict[str, Policy] = {}
        self._denials: dict[str, collections.deque[Denial]] = {}

    async def start(self, alive: set[str]) -> None:
        """Take over what an earlier gateway left for the sandboxes that are ``alive``."""
        await asyncio.to_thread(self._router.start)
        await self._responder.start()
        for sandbox_id, entry in self._load().items():
            slot = Slot(int(entry["slot"]))
            self._slots[sandbox_id] = slot
            policy = _policy(entry["policy"])
            if sandbox_id not in alive:
                self._router.remember(slot, policy)
                await self.detach(sandbox_id)
                continue
            self._router.remember(slot, policy)
            self._know(sandbox_id, slot, policy)

    async def close(self) -> None:
        self._responder.close()
        await asyncio.to_thread(self._router.close)
        if not self._slots:
            await asyncio.to_thread(self._router.destroy)

    def abandon(self) -> None:
        """Leave everything as a gateway does that is killed."""
        self._responder.close()
        self._router.close()

    def path(self, sandbox_id: str) -> Path:
        """Where a sandbox's network namespace is mounted."""
        return self.folder / sandbox_id

    async def attach(self, sandbox_id: str) -> Path:
        """Make a network namespace for a sandbox; it may reach nothing until it is bound."""
        taken = {slot.number for slot in self._slots.values()}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        slot = self._slots[sandbox_id] = Slot(number)
        await asyncio.to_thread(self._router.add_slot, slot, self.path(sandbox_id))
        self._know(sandbox_id, slot, Policy())
        return self.path(sandbox_id)

    async def bind(self, sandbox_id: str, policy: Policy) -> None:
        """Give a sandbox its policy, or a new one; open connections are judged by it too."""
        slot = self._slots.get(sandbox_id)
        if slot is None:
            raise errors.K8eError(f"sandbox {sandbox_id} has no network")
        before = self._responder.clients.get(str(slot.address4))
        opened = before.still_allowed(policy) if before is not None else {}
        # Until the new client is known, answers go out under the old generation, which the
        # kernel no longer knows: what they open, nobody can reach.
        await asyncio.to_thread(self._router.bind, slot, policy, list(opened))
        self._know(sandbox_id, slot, policy, opened)
        self._save()

    async def detach(self, sandbox_id: str) -> None:
        """Remove a sandbox's network; nothing happens where there is none."""
        slot = self._slots.get(sandbox_id)
        if slot is not None:
            self._responder.clients.pop(str(slot.address4), None)
            await asyncio.to_thread(self._router.remove_slot, slot)
            del self._slots[sandbox_id]
        self._policies.pop(sandbox_id, None)
        self._denials.pop(sandbox_id, None)
        await asyncio.to_thread(unmount, self.path(sandbox_id))
        self._save()

    def policy(self, sandbox_id: str) -> Policy:
        return self._policies.get(sandbox_id, Policy())

    def denials(self, sandbox_id: str, since: float = 0.0) -> list[Denial]:
        return [item for item in self._denials.get(sandbox_id, ()) if item.at >= since]

    def _know(
        self,
        sandbox_id: str,
        slot: Slot,
        policy: Policy,
        opened: dict[Target, str] | None = None,
    ) -> None:
        self._policies[sandbox_id] = policy
        kept = self._denials.setdefault(sandbox_id, collections.deque(maxlen=KEPT_DENIALS))

        def on_denial(name: str, reason: str) -> None:
            kept.append(Denial(time.time(), name, reason))
            log.info("egress of %s denied: %s: %s", sandbox_id, name, reason)

        if policy.silent:
            self._responder.clients.pop(str(slot.address4), None)
        else:
            client = Client(self._router.generation(slot), policy, on_denial)
            client.opened = opened or {}
            self._responder.clients[str(slot.address4)] = client

    # What a gateway after us needs to know.

    def _save(self) -> None:
        data = {
            sandbox_id: {"slot": slot.number, "policy": _stored(self.policy(sandbox_id))}
            for sandbox_id, slot in self._slots.items()
        }
        scratch = self.folder / "slots.tmp"
        scratch.write_text(json.dumps(data), "utf-8")
        scratch.rename(self.folder / "slots.json")

    def _load(self) -> dict[str, dict[str, Any]]:
        try:
            return json.loads((self.folder / "slots.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}


def _stored(policy: Policy) -> dict[str, Any]:
    rules = [[str(rule), rule.trusted] for rule in policy.rules]
    return {"preset": str(policy.preset), "rules": rules}


def _policy(data: dict[str, Any]) -> Policy:
    rules: list[Rule] = [parse_rule(text, trusted=trusted) for text, trusted in data["rules"]]
    return Policy(Preset(data["preset"]), tuple(rules))

