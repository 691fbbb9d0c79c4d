"""Networks of sessions: egress as sessions use it, on hosts where it works and where not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from k8e import errors, rootless
from k8e.egress import denials, namespaces, presets
from k8e.egress.dns import parse_upstreams
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
from k8e.rootless import pasta
from k8e.runtimes.base import Feature
from k8e.settings import Settings

log = logging.getLogger(__name__)

_FIX = "run install.sh again, as root"
_TRY_AGAIN = "then k8e doctor --fresh, or the next session, tries again"
_MADE_BEFORE = "it was made while sandboxes could have none here; a new session has one"
FAILURE_SECONDS = 15.0
"""How long it is believed that there is no network, though nothing has changed."""
RESTORE_SECONDS = 5.0
"""Between two starts of the program that carries packets without root."""


class Network:
    """Gives sandboxes a network with a policy; where that fails, says why they have none."""

    def __init__(self, settings: Settings) -> None:
        self.reason = "egress is not running"
        """Why there is no network; empty where there is one."""
        self._fix = _FIX
        self._settings = settings
        self._trusted = split_words(settings.trusted_hosts)
        self._usual = split_words(settings.default_allowed_hosts)
        self._egress: Egress | None = None
        self._defaults: asyncio.Task[tuple[Rule, ...]] | None = None
        self._quiet = _is_quiet(self._usual)
        self._closed = False
        self._forgone = False
        self._trying = asyncio.Lock()
        self._tried = ("", 0.0)  # the facts that this rests on, and until when it is believed
        self._way_out = -1  # a handle of the program that carries packets without root
        self._restored_at = 0.0
        self._restoring: asyncio.Future[None] | None = None
        self.sandboxes: Callable[[], set[str]] = set
        """The sandboxes that live."""
        self.on_late_start: list[Callable[[], None]] = []
        """Called when there is a network after all: what was made before has none."""

    # Starting and ending.

    async def start(self, alive: set[str]) -> None:
        """Take over the networks of the sandboxes that are ``alive``."""
        parse_policy(self._usual)  # a wrong setting stops the gateway, not the first session
        world = self._settings.uplink_namespace
        inside = None if world else rootless.inside()
        if inside is not None:
            facts = pasta.facts()
            self.reason = await asyncio.to_thread(pasta.ensure, self._settings.run_dir)
            self._tried = facts, time.monotonic() + FAILURE_SECONDS
            if self.reason:
                self._fix = _TRY_AGAIN
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
            self.reason, self._fix = f"egress does not work on this host: {error}", _FIX
            self._tried = self._tried[0], time.monotonic() + FAILURE_SECONDS
            log.warning("sandboxes have no network: %s", self.reason)
            return
        self._egress, self.reason = egress, ""
        if inside is not None:
            self._watch_way_out()
        if DEFAULT in map(tidy, self._usual):
            self._ask_indexes()

    def do_without(self, reason: str) -> None:
        """Have no network as long as this gateway runs; what asks for one is told the reason."""
        parse_policy(self._usual)
        self.reason, self._fix = reason, "start sessions with the policy none"
        self._forgone = True

    def _watch_way_out(self) -> None:
        """Start the program that carries all packets again when it ends."""
        self._let_go_of_way_out()
        loop = asyncio.get_running_loop()
        handle = pasta.open_handle(self._settings.run_dir)
        if handle < 0:
            loop.call_later(RESTORE_SECONDS, self._restore_way_out)
            return
        self._way_out = handle
        loop.add_reader(handle, self._lose_way_out)

    def _lose_way_out(self) -> None:
        log.warning("pasta, which carries the packets of sandboxes, has ended")
        self._let_go_of_way_out()
        # One that ends again and again is not restarted without a break.
        loop = asyncio.get_running_loop()
        due = max(loop.time(), self._restored_at + RESTORE_SECONDS)
        loop.call_at(due, self._restore_way_out)

    def _let_go_of_way_out(self) -> None:
        if self._way_out >= 0:
            asyncio.get_running_loop().remove_reader(self._way_out)
            os.close(self._way_out)
            self._way_out = -1

    def _restore_way_out(self) -> None:
        if not self._closed:
            self._restoring = asyncio.ensure_future(self._start_way_out())

    async def _start_way_out(self) -> None:
        self._restored_at = asyncio.get_running_loop().time()
        reason = await asyncio.to_thread(pasta.ensure, self._settings.run_dir)
        if self._closed:
            return
        if reason:
            log.warning("sandboxes reach nothing: %s", reason)
        self._watch_way_out()

    async def try_again(self, *, at_once: bool = False) -> None:
        """Try to start the network where there was none and something may have changed."""
        if not self.reason or self._closed or self._forgone:
            return
        async with self._trying:
            facts, until = self._tried
            inside = rootless.inside() is not None
            same = not inside or facts == pasta.facts()
            if not self.reason or (same and not at_once and time.monotonic() < until):
                return
            await self.start(self.sandboxes())
        if not self.reason:
            for tell in self.on_late_start:
                tell()

    def lacks(self, session: Session) -> str:
        """Why a session has no network though it should; empty for all others."""
        if self._egress is not None and self._egress.knows(session.sandbox_id):
            return ""
        asked = session.spec.allowed_hosts
        if self._quiet if asked is None else _is_quiet(asked):
            return ""
        return self.reason or _MADE_BEFORE

    async def close(self) -> None:
        self._closed = True
        self._let_go_of_way_out()
        if self._restoring is not None:
            await asyncio.wait([self._restoring])
        if self._defaults is not None:
            self._defaults.cancel()
        if self._egress is not None:
            await self._egress.close()

    def support(self) -> Feature:
        """Whether there is a network here, as ``k8e doctor`` tells it."""
        if self.reason:
            return Feature("egress", False, self.reason, self._fix)
        return Feature("egress", True, "router, nftables and DNS responder are running")

    # Policies.

    async def read(self, words: tuple[str, ...] | None) -> tuple[tuple[str, ...], Policy]:
        """What a client asks for, as words and as a policy; None is the operator's default."""
        asked = words is not None
        words = (words if asked else self._usual) or (NONE,)
        if self.reason and not _is_quiet(words):
            await self.try_again()
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
        """The rules of ``default``: the operator's hosts, and the package indexes of this host."""
        cache = self._settings.data_dir / "indexes.json"
        return (*self._own_rules(), *await asyncio.to_thread(presets.default_rules, cache))

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
                f"this sandbox has no network: {self.reason or _MADE_BEFORE}",
                hint="k8e doctor shows what egress needs; a session of before keeps none",
            )

    async def detach(self, sandbox_id: str) -> None:
        if self._egress is not None:
            await self._egress.detach(sandbox_id)

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncGenerator[str]:
        """A network that leads nowhere, to probe a runtime with; empty where there is none."""
        sandbox_id = new_id("probe")
        path = await self.attach(sandbox_id)
        try:
            yield path
        finally:
            await self.detach(sandbox_id)

    # Denials.

    def mark(self, sandbox_id: str) -> int:
        """A mark for ``denials_since``: how often a sandbox was refused something so far."""
        return self._egress.denied(sandbox_id) if self._egress is not None else 0

    def denials_since(
        self, sandbox_id: str, mark: int, until: int | None = None
    ) -> list[dict[str, Any]]:
        """The refusals between two marks, or from one until now."""
        if self._egress is None:
            return []
        return self._egress.denials_since(sandbox_id, mark, until)

    def take_in(self) -> None:
        """Read all refusals that the kernel has reported: only then the next mark is exact."""
        if self._egress is not None:
            self._egress.drain()

    @staticmethod
    def add_denials(body: bytes, found: list[dict[str, Any]], lacks: str = "") -> bytes:
        """Add refusals to an EXIT; unchanged if there are none.

        ``lacks`` is why there is no network: no one saw what a program tried, but if it failed,
        that may be why.
        """
        if not found and b"denials" not in body and not lacks:
            return body
        try:
            told = wire.unpack_dict(body)
            if lacks and told.get("code"):
                found = [*found, denials.without_network(lacks)]
            # A guest has no say in this.
            return wire.pack({**told, "denials": found})
        except wire.WireError:
            # The guest is hostile; the reader of this frame checks it, and the journal asks us.
            return body

    def describe(self, session: Session) -> dict[str, Any]:
        """What a session may reach, and what it was refused."""
        known = self._egress is not None and self._egress.knows(session.sandbox_id)
        told: dict[str, Any] = {
            "session_id": session.session_id,
            "allowed_hosts": list(session.allowed_hosts),
            "network": known,
            "reason": "" if known else self.reason or _MADE_BEFORE,
            "rules": [NONE],
            "denied": 0,
            "denials": [],
        }
        if self._egress is not None and known:
            told["denials"] = self._egress.denials(session.sandbox_id)
            told["denied"] = self._egress.denied(session.sandbox_id)
            told["rules"] = self._egress.policy(session.sandbox_id).words()
        return told


def _is_quiet(words: tuple[str, ...]) -> bool:
    """Whether a policy allows nothing, and so needs no network."""
    return DEFAULT not in map(tidy, words) and parse_policy(words or (NONE,)).silent
