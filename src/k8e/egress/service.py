"""Egress for all sandboxes of a gateway: slots at the router, policies, names, denials."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k8e import errors, metrics
from k8e.egress import denials, dns_answers, namespaces, networks, nftables, pins, rules, uplink
from k8e.egress.dns import Responder, Upstream
from k8e.egress.dns_answers import AnswerCache, Share
from k8e.egress.nflog import PacketLog
from k8e.egress.nftables import Element, NftFailed
from k8e.egress.policy import Address, Network, Policy
from k8e.egress.proxy import PEEK, Proxy, ProxyDecision, refused
from k8e.egress.records import NetworkRecord, NetworkRecords
from k8e.egress.router import MAX_SLOTS, Router, Slot
from k8e.egress.rules import BoundPolicy
from k8e.egress.sandbox import SandboxEgress
from k8e.egress.sniff import Said
from k8e.egress.uplink import NetworkWatcher

log = logging.getLogger(__name__)

SPARE = 2  # slots that are kept ready


class Egress:
    """Attaches sandboxes to the router and keeps their policies."""

    def __init__(
        self,
        folder: Path,
        *,
        world: Path = namespaces.OWN,
        upstreams: list[Upstream] | None = None,
        home: Path | None = None,
        spare: int = SPARE,
    ) -> None:
        """``world`` is the namespace that the uplink leads to: this host's own by default.

        ``home`` is where this host's resolvers are asked, and whose addresses are out of reach,
        where that is not the world: behind that world, this host may be one of many.
        """
        self._world, self._home = world, home or world
        self._records = NetworkRecords(folder)
        self._router = Router(folder)
        self._answers = Share(dns_answers.TOTAL, dns_answers.EACH, dns_answers.LEAST)
        self._clients: dict[str, SandboxEgress] = {}
        self._by_address: dict[str, SandboxEgress] = {}
        self._by_index: dict[int, SandboxEgress] = {}
        self._indexes: dict[Slot, int] = {}
        self._last = -1
        self._responder = Responder(
            self._router, self._by_address, upstreams or [], self._home_socket
        )
        self._proxy = Proxy(self._router.socket, self._decide, self._tell_too_many)
        self._log: PacketLog | None = None
        self._uplink = ""
        self._connecting = asyncio.Lock()
        self._watchers: list[NetworkWatcher] = []
        self._near: list[Network] | None = None
        self._changed = False  # since mending began
        self._mending: asyncio.Task[None] | None = None
        self._wanted = spare
        self._spare: list[Slot] = []
        self._making: asyncio.Task[None] | None = None

    # Starting and ending.

    async def start(self, alive: set[str]) -> None:
        """Take over the sandboxes that are ``alive`` from an earlier gateway."""
        found = self._records.load()
        self._last = max((record.slot for record in found.values()), default=-1)
        generations = await asyncio.to_thread(self._router.start)
        self._records.skip(max(generations.values(), default=0))
        held = {name: _held(record, generations) for name, record in found.items()}
        known = [Slot(found[name].slot) for name, bound in held.items() if bound is not None]
        if await asyncio.to_thread(self._router.forget_others, known):
            log.error("the kernel had policies of which no record tells; they are gone")
        await self._responder.start()
        await self._proxy.start()
        self._log = PacketLog(self._router.socket)
        asyncio.get_running_loop().add_reader(self._log.fileno(), self.drain)
        for sandbox_id, record in found.items():
            await self._adopt(sandbox_id, record, held[sandbox_id] or BoundPolicy())
        await self._adopt_pins()
        for sandbox_id, record in found.items():
            if sandbox_id not in alive or not self._indexes[Slot(record.slot)]:
                await self.detach(sandbox_id)
            elif self._clients[sandbox_id].bound is not record.bound:
                await self.bind(sandbox_id, record.bound.policy)  # a change that was not finished
        owned = {client.slot for client in self._clients.values()}
        for slot in self._router.slots():
            if slot not in owned:
                await asyncio.to_thread(self._router.remove_slot, slot)
        if await asyncio.to_thread(self._router.has_uplink):
            await self._connect()
        self._refill()

    async def _adopt(self, sandbox_id: str, record: NetworkRecord, held: BoundPolicy) -> None:
        """Recognise a sandbox, and the kernel's elements for it."""
        slot = Slot(record.slot)
        client = self._new_client(sandbox_id, slot)
        try:
            index = await asyncio.to_thread(self._router.index, slot)
        except OSError:
            index = 0  # its wire went with its sandbox; the gateway was killed before its record
        self._know(client, index)
        client.bound = held

    async def _adopt_pins(self) -> None:
        """Recognise the pins of each sandbox; remove those of no policy."""
        found = await asyncio.to_thread(self._router.listing, *rules.PINS)
        ports = await asyncio.to_thread(self._router.listing, "ports")
        past = await asyncio.to_thread(self._router.listing, *rules.PAST)
        named = await asyncio.to_thread(self._router.listing, *networks.NAMES)
        by_generation: dict[int, list[Element]] = {}
        by_interface: dict[str, list[tuple[int, int]]] = {}
        for item in found:
            by_generation.setdefault(pins.read(item)[0], []).append(item)
        for item in ports:
            interface, group, port = pins.read_port(item)
            by_interface.setdefault(interface, []).append((group, port))
        bound = {client.bound.generation for client in self._clients.values()}
        gone = [item for item in named if nftables.read_mark(item.key) not in bound]
        gone += [item for item in past if nftables.read_mark(item.key) not in bound]
        for client in self._clients.values():
            generation = client.bound.generation
            client.pins.adopt_past(
                [item for item in past if nftables.read_mark(item.key) == generation]
            )
            own = [pins.read(item)[1:] for item in by_generation.pop(generation, ())]
            groups = by_interface.get(client.slot.interface, [])
            gone += client.pins.adopt(generation, own, groups)
        gone += (item for items in by_generation.values() for item in items)
        for part in nftables.parts(gone):
            self._router.change(nftables.removed(part))

    async def close(self) -> None:
        """Stop; if sandboxes are left, everything stays as it is."""
        self._wanted = 0
        if self._making is not None:
            await asyncio.wait([self._making])  # a thread that makes a slot cannot be stopped
        if self._mending is not None:
            await asyncio.wait([self._mending])
        self.abandon()
        await self._proxy.wait_closed()
        for slot in self._spare:
            await asyncio.to_thread(namespaces.unmount, self._router.namespace(slot))
        if not self._clients:
            if self._uplink:
                await asyncio.to_thread(uplink.disconnect, self._world, self._uplink)
            await asyncio.to_thread(self._router.destroy)

    def abandon(self) -> None:
        """Leave everything as a killed gateway does."""
        for watcher in self._watchers:
            watcher.close()
        if self._log is not None:
            asyncio.get_running_loop().remove_reader(self._log.fileno())
            self._log.close()
            self._log = None
        self._responder.close()
        self._proxy.close()
        self._router.close()

    # Sandboxes.

    async def attach(self, sandbox_id: str) -> Path:
        """A network namespace for a sandbox; it may reach nothing until it is bound."""
        slot = self._spare.pop() if self._spare else await self._new_slot()
        client = self._new_client(sandbox_id, slot)
        self._records.save(sandbox_id, NetworkRecord(slot.number))
        self._know(client, self._indexes[slot])
        self._refill()
        return self._router.namespace(slot)

    def _new_client(self, sandbox_id: str, slot: Slot) -> SandboxEgress:
        return SandboxEgress(sandbox_id, slot, AnswerCache(self._answers))

    def _know(self, client: SandboxEgress, index: int) -> None:
        self._clients[client.sandbox_id] = client
        self._by_address[str(client.slot.address4)] = client
        self._by_address[str(client.slot.address6)] = client
        self._by_index[index] = client
        self._indexes[client.slot] = index

    async def _new_slot(self) -> Slot:
        """A slot whose number was not used for long: its last wire may still exist."""
        while True:
            self._last = (self._last + 1) % MAX_SLOTS
            slot = Slot(self._last)
            if slot in self._indexes:
                continue
            self._indexes[slot] = 0  # taken, from now on
            making = asyncio.ensure_future(asyncio.to_thread(self._router.add_slot, slot))
            try:
                self._indexes[slot] = await asyncio.shield(making)
                return slot
            except FileExistsError:
                self._indexes.pop(slot)
            except asyncio.CancelledError:
                # The thread goes on; the slot that it makes goes to another sandbox.
                await asyncio.wait([making])
                self._keep(slot, making)
                raise
            except BaseException:
                self._indexes.pop(slot)
                raise

    def _keep(self, slot: Slot, made: asyncio.Future[int]) -> None:
        if made.exception() is None:
            self._indexes[slot] = made.result()
            self._spare.append(slot)
        else:
            self._indexes.pop(slot)

    def _refill(self) -> None:
        if len(self._spare) < self._wanted and (self._making is None or self._making.done()):
            self._making = asyncio.create_task(self._make_spare())

    async def prepare(self, count: int) -> None:
        """Make slots ahead until ``count`` are ready."""
        while len(self._spare) < count:
            self._spare.append(await self._new_slot())

    async def _make_spare(self) -> None:
        try:
            while len(self._spare) < self._wanted:
                self._spare.append(await self._new_slot())
        except (OSError, errors.K8eError):
            log.exception("a network slot could not be made ahead")

    async def bind(self, sandbox_id: str, policy: Policy) -> None:
        """Give a sandbox its policy, or a new one; open connections are judged by it too."""
        client = self._client(sandbox_id)
        if not policy.silent:
            await self._connect()
        async with client.binding:
            old = client.bound
            new = BoundPolicy(policy, 0 if policy.silent else self._records.next_generation())
            self._records.save(client.sandbox_id, NetworkRecord(client.slot.number, new, old))
            try:
                await self._prepare(new)
                self._replace(client, new)
            except (
                NftFailed,
                asyncio.CancelledError,
            ):  # all is as before, also for the next gateway
                self._records.save(client.sandbox_id, NetworkRecord(client.slot.number, old, old))
                raise
            client.unswept += rules.network_elements(old)
            try:
                await self._sweep(client)
            except NftFailed as error:  # nothing refers to them, but they take up room
                log.warning("elements of a former policy of %s are left: %s", sandbox_id, error)

    async def _prepare(self, new: BoundPolicy) -> None:
        """Add the networks of a policy, a few at a time; they open nothing until it is bound."""
        added: list[Element] = []
        try:
            for part in nftables.parts(rules.network_elements(new)):
                self._router.change(list(map(nftables.add, part)))
                added += part
                await asyncio.sleep(0)
        except (NftFailed, asyncio.CancelledError):
            with contextlib.suppress(NftFailed):
                for part in nftables.parts(added):
                    self._router.change(nftables.removed(part))
            raise

    def _replace(self, client: SandboxEgress, new: BoundPolicy) -> None:
        """Bind a policy whose networks are in place. Never waits: no task sees half of it."""
        plan = client.carry(new)
        leftovers = client.pins.leftovers(plan)
        self._router.bind(client.slot, client.bound, new, client.pins.changes(plan))
        client.pins.keep(plan)
        client.unswept += leftovers
        client.cache.clear()
        client.bound = new
        self._proxy.rejudge(str(client.slot.address4))
        self._proxy.rejudge(str(client.slot.address6))

    async def _sweep(self, client: SandboxEgress) -> None:
        """Remove elements without references, a few at a time; the next call continues."""
        while client.unswept:
            self._router.change(nftables.removed(client.unswept[-nftables.AT_ONCE :]))
            del client.unswept[-nftables.AT_ONCE :]
            await asyncio.sleep(0)

    async def detach(self, sandbox_id: str) -> None:
        """Remove a sandbox's network; nothing happens where there is none."""
        client = self._clients.get(sandbox_id)
        if client is None:
            return
        await self.bind(sandbox_id, Policy())
        async with client.binding:  # nothing stays of an interface that another sandbox will have
            await self._sweep(client)
        client.cache.close()
        self._clients.pop(sandbox_id, None)
        for address in (client.slot.address4, client.slot.address6):
            self._by_address.pop(str(address), None)
        self._by_index.pop(self._indexes.get(client.slot, 0), None)
        await asyncio.to_thread(self._router.remove_slot, client.slot)
        self._indexes.pop(client.slot, None)
        self._records.remove(sandbox_id)

    def knows(self, sandbox_id: str) -> bool:
        """Whether a sandbox has a network."""
        return sandbox_id in self._clients

    def _client(self, sandbox_id: str) -> SandboxEgress:
        client = self._clients.get(sandbox_id)
        if client is None:
            raise errors.K8eError(f"sandbox {sandbox_id} has no network")
        return client

    # The world.

    async def _connect(self) -> None:
        """Make the uplink when a policy first needs it; a host without sessions stays as it is."""
        async with self._connecting:
            if self._uplink:
                return
            if self._home != self._world:
                await asyncio.to_thread(uplink.seal, self._world)
            if not self._watchers:  # before anything that could change meanwhile
                self._watchers.append(NetworkWatcher(self._world, self._on_change))
                if self._home != self._world:  # an address that this host gets is out of reach too
                    self._watchers.append(NetworkWatcher(self._home, self._on_change, rules=False))
                for watcher in self._watchers:
                    watcher.start()
            await self._mend()

    async def _mend(self) -> None:
        """Make or repair the uplink; the host's own addresses stay out of reach."""
        self._uplink = await asyncio.to_thread(uplink.connect, self._router.path, self._world)
        own = await asyncio.to_thread(uplink.own_addresses, self._world)
        if self._home != self._world:  # this host is not to be reached by that way either
            own += await asyncio.to_thread(uplink.own_addresses, self._home)
        self._router.disown(own)
        near = await asyncio.to_thread(uplink.near_networks, self._world)
        if near != self._near:
            await asyncio.to_thread(self._router.bound_near, near)
            self._near = self._proxy.near = near

    def _on_change(self) -> None:
        """Handle a change of the host's addresses or firewall."""
        self._changed = True
        if self._mending is None or self._mending.done():
            self._mending = asyncio.create_task(self._mend_again())

    async def _mend_again(self) -> None:
        try:
            while self._changed:
                self._changed = False
                async with self._connecting:
                    await self._mend()
        except (OSError, errors.K8eError):
            log.exception("the host's side of the uplink could not be renewed")

    def _home_socket(self, family: int, kind: int) -> Any:
        return namespaces.socket_in(self._home, family, kind)

    # Asking.

    def policy(self, sandbox_id: str) -> Policy:
        return self._client(sandbox_id).bound.policy

    def denied(self, sandbox_id: str) -> int:
        """How often a sandbox was refused something: a mark for ``denials_since``."""
        client = self._clients.get(sandbox_id)
        return client.ledger.total if client is not None else 0

    def denials_since(
        self, sandbox_id: str, mark: int, until: int | None = None
    ) -> list[dict[str, Any]]:
        """Refusals after ``mark``, with all that the kernel has reported until now."""
        self.drain()
        client = self._clients.get(sandbox_id)
        return client.ledger.since(mark, until) if client is not None else []

    def denials(self, sandbox_id: str) -> list[dict[str, Any]]:
        self.drain()
        return self._client(sandbox_id).ledger.listing()

    def drain(self) -> None:
        """Read the kernel's reports of refusals."""
        if self._log is None:
            return
        for packet in self._log.read():
            client = self._by_index.get(packet.index)
            if client is not None:
                client.deny_packet(packet)

    def _tell_too_many(self, source: str, destination: Address, port: int) -> None:
        client = self._by_address.get(source)
        if client is not None:
            client.deny(denials.FLOWS, address=str(destination), port=port, protocol="tcp")

    def _decide(
        self, source: str, destination: Address, port: int, said: Said | None, again: bool
    ) -> ProxyDecision:
        client = self._by_address.get(source)
        if client is None:
            return refused("unknown sandbox")
        decision = client.decide(destination, port, said, again=again)
        if decision is not PEEK:
            metrics.count_connection(decision.verdict)
        return decision


def _held(record: NetworkRecord, generations: Mapping[int, int]) -> BoundPolicy | None:
    """What the kernel has bound for a slot; None if its record does not know it.

    That happens after a restart of the machine, if the records survived it.
    """
    generation = generations.get(record.slot, 0)
    return next((b for b in (record.bound, record.before) if b.generation == generation), None)
