"""What sessions may reach: egress as sessions use it, on hosts where it works and where not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from k8e import errors, rootless
from k8e.egress import indexes, namespaces
from k8e.egress.asking import parse_upstreams
from k8e.egress.policy import (
    DEFAULT,
    NONE,
    Policy,
    Rule,
    parse_policy,
    parse_rule,
    split_words,
    tidy,
)
from k8e.egress.service import Egress
from k8e.guest import wire
from k8e.model import Session, new_id
from k8e.rootless import tether
from k8e.runtimes.base import Feature
from k8e.settings import Settings

log = logging.getLogger(__name__)

_FIX = "run install.sh again, as root"


class Network:
    """Gives sandboxes a network with a policy; where it cannot, they have none, and it says why."""

    def __init__(self, settings: Settings) -> None:
        self.reason = "egress is not running"
        """Why there is no network; empty where there is one."""
        self._settings = settings
        self._trusted = split_words(settings.trusted_hosts)
        self._usual = split_words(settings.default_allowed_hosts)
        self._egress: Egress | None = None
        self._defaults: asyncio.Task[tuple[Rule, ...]] | None = None

    # Starting and ending.

    async def start(self, alive: set[str]) -> None:
        """Take over the networks of the sandboxes that are ``alive``."""
        parse_policy(self._usual)  # a wrong setting stops the gateway, not the first session
        world = self._settings.uplink_namespace
        inside = None if world else rootless.inside()
        if inside is not None:
            self.reason = await asyncio.to_thread(tether.ensure, self._settings.run_dir)
            if self.reason:
                log.warning("sandboxes have no network: %s", self.reason)
                return
        egress = Egress(
            self._settings.run_dir / "net",
            world=Path(world) if world else inside.world if inside else namespaces.OWN,
            home=namespaces.OWN if inside else None,
            upstreams=parse_upstreams(self._settings.resolvers),
        )
        try:
            await egress.start(alive)
        except (OSError, errors.K8eError) as error:
            egress.abandon()
            self.reason = f"egress does not work on this host: {error}"
            log.warning("sandboxes have no network: %s", self.reason)
            return
        self._egress, self.reason = egress, ""
        if DEFAULT in map(tidy, self._usual):
            self._ask_indexes()

    async def close(self) -> None:
        if self._defaults is not None:
            self._defaults.cancel()
        if self._egress is not None:
            await self._egress.close()

    def support(self) -> Feature:
        """Whether there is a network, for whoever asks what works here."""
        if self.reason:
            return Feature("egress", False, self.reason, _FIX)
        return Feature("egress", True, "router, nftables and DNS responder are running")

    # Policies.

    async def read(self, words: tuple[str, ...] | None) -> tuple[tuple[str, ...], Policy]:
        """What a client asks for, as words and as a policy; None is the operator's usual one."""
        asked = words is not None
        words = (words if asked else self._usual) or (NONE,)
        if self.reason:
            if asked and not parse_policy(words).silent:
                raise errors.RuntimeUnusable(
                    f"sandboxes have no network here: {self.reason}",
                    hint="k8e doctor shows what egress needs",
                )
            return (NONE,), Policy()
        # Hosts of ``default`` are trusted when they are named by themselves, too.
        named = DEFAULT in map(tidy, (*words, *self._usual))
        defaults = await asyncio.shield(self._ask_indexes()) if named else self._own_rules()
        return words, parse_policy(words, defaults)

    def _ask_indexes(self) -> asyncio.Task[tuple[Rule, ...]]:
        if self._defaults is None:
            self._defaults = asyncio.create_task(self._default_rules())
        return self._defaults

    async def _default_rules(self) -> tuple[Rule, ...]:
        """What ``default`` allows: the operator's hosts, and the package indexes of this host."""
        cache = self._settings.data_dir / "indexes.json"
        return (*self._own_rules(), *await asyncio.to_thread(indexes.default_rules, cache))

    def _own_rules(self) -> tuple[Rule, ...]:
        return tuple(parse_rule(word, trusted=True) for word in self._trusted)

    # Sandboxes.

    async def attach(self, sandbox_id: str) -> str:
        """The path of a network namespace for a sandbox; empty where there is no network."""
        return str(await self._egress.attach(sandbox_id)) if self._egress is not None else ""

    async def bind(self, sandbox_id: str, policy: Policy) -> None:
        if self._egress is not None and self._egress.knows(sandbox_id):
            await self._egress.bind(sandbox_id, policy)
        elif not policy.silent:
            raise errors.RuntimeUnusable(
                "this sandbox has no network", hint="k8e doctor shows what egress needs"
            )

    async def detach(self, sandbox_id: str) -> None:
        if self._egress is not None:
            await self._egress.detach(sandbox_id)

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncGenerator[str]:
        """A network that leads nowhere, to try a runtime with; empty where there is none."""
        sandbox_id = new_id("probe")
        path = await self.attach(sandbox_id)
        try:
            yield path
        finally:
            await self.detach(sandbox_id)

    # Denials.

    def mark(self, sandbox_id: str) -> int:
        """A point in time, for ``denials_since``: how often a sandbox was refused something."""
        return self._egress.denied(sandbox_id) if self._egress is not None else 0

    def denials_since(
        self, sandbox_id: str, mark: int, until: int | None = None
    ) -> list[dict[str, Any]]:
        """What was refused between two marks, or from one until now."""
        if self._egress is None:
            return []
        return self._egress.denials_since(sandbox_id, mark, until)

    def take_in(self) -> None:
        """Hear all that the kernel has refused: only then the next mark is true."""
        if self._egress is not None:
            self._egress.drain()

    @staticmethod
    def add_denials(body: bytes, found: list[dict[str, Any]]) -> bytes:
        """An EXIT with what was ``found``; as it is where that is nothing."""
        if not found and b"denials" not in body:
            return body
        try:
            # A guest has no say in this.
            return wire.pack({**wire.unpack_dict(body), "denials": found})
        except wire.WireError:
            return body  # the guest is hostile; who reads it will say so, who notes asks us

    def describe(self, session: Session) -> dict[str, Any]:
        """What a session may reach, and what it was refused."""
        known = self._egress is not None and self._egress.knows(session.sandbox_id)
        told: dict[str, Any] = {
            "session_id": session.session_id,
            "allowed_hosts": list(session.allowed_hosts),
            "network": known,
            "reason": "" if known else self.reason or "this sandbox has no network",
            "rules": [NONE],
            "denied": 0,
            "denials": [],
        }
        if self._egress is not None and known:
            told["denials"] = self._egress.denials(session.sandbox_id)
            told["denied"] = self._egress.denied(session.sandbox_id)
            told["rules"] = self._egress.policy(session.sandbox_id).words()
        return told
