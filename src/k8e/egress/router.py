"""The router: a network namespace of k8e's own, between the sandboxes and the world.

Every sandbox has a namespace with one veth whose other end is here, where it can reach none of the
rules that judge it. The router outlives the gateway: without one, its rules stay as they are.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from k8e import errors, model
from k8e.egress import migration, namespaces, nftables, rules
from k8e.egress.netlink import (
    EVERYWHERE,
    RT_TABLE_DEFAULT,
    RT_TABLE_LOCAL,
    RTN_LOCAL,
    Netlink,
    Route,
)
from k8e.egress.nftables import Element, ElementChange, Elements, Nftables, NftFailed
from k8e.egress.policy import Address, Network
from k8e.egress.rules import BoundPolicy

_SLOTS4, _SLOTS6 = rules.SLOTS
MAX_SLOTS = 16_000
# In the router's namespace. Refusals of UDP are ICMP, of which the kernel would send one a second;
# the masks take "unreachable" out of those that it limits.
_SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    "ipv6/conf/all/forwarding": "1",
    "ipv6/conf/default/addr_gen_mode": "1",  # no fe80::/64 on wires that are made from now on
    "ipv4/icmp_ratemask": "6160",
    "ipv6/icmp/ratemask": "0,3-127",
}
# In every sandbox's namespace, before there is a wire. What fills tables that all namespaces share
# is bounded here: neighbours in fe80::/64, to which a link leads that chooses an address itself,
# groups that a socket joins (of IPv4; of IPv6 the runtime refuses it), connections that have ended
# and wait, and what TCP remembers of them.
_SLOT_SETTINGS = {
    "ipv6/conf/default/addr_gen_mode": "1",
    "ipv6/conf/default/accept_ra": "0",
    "ipv4/igmp_max_memberships": "0",
    "ipv4/tcp_max_tw_buckets": "4096",
    "ipv4/tcp_no_metrics_save": "1",
}

T = TypeVar("T")
DNS_ADDRESS = ipaddress.ip_address(model.DNS_ADDRESS)
GROUPS: tuple[Network, Network] = (
    ipaddress.ip_network("224.0.0.0/4"),
    ipaddress.ip_network("ff00::/8"),
)


@dataclass(frozen=True)
class Slot:
    """One sandbox's place at the router; everything follows from its number."""

    number: int

    @property
    def interface(self) -> str:
        return f"sb{self.number}"

    def hardware(self, *, router: bool) -> bytes:
        """The hardware address of an end of the wire, a permanent neighbour of the other end."""
        return b"\x02k8s" + (2 * self.number + router).to_bytes(2, "big")

    def _nth(self, base: Any, which: int) -> Any:
        return base.network_address + 4 * self.number + which

    @cached_property
    def address4(self) -> ipaddress.IPv4Address:
        return self._nth(_SLOTS4, 2)

    @cached_property
    def address6(self) -> ipaddress.IPv6Address:
        return self._nth(_SLOTS6, 2)

    @cached_property
    def routers(self) -> tuple[Address, Address]:
        """The router's addresses on this slot's wire."""
        return self._nth(_SLOTS4, 1), self._nth(_SLOTS6, 1)


def _alone(address: Address) -> Any:
    """An address on a network of its own."""
    return ipaddress.ip_interface(address)


def _write(settings: Mapping[str, str]) -> None:
    """Change settings of the calling thread's namespace."""
    for file, value in settings.items():
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6, or an older one
            Path("/proc/sys/net", file).write_text(value, "ascii")


def _places() -> int:
    """How many connections the kernel keeps, of each namespace alike."""
    try:
        return int(Path("/proc/sys/net/netfilter/nf_conntrack_max").read_text("ascii"))
    except (OSError, ValueError):
        return rules.PLACES


class Router:
    """Makes slots and binds policies to them. One thread of its own does all the work, in order."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "router"
        self._slots = folder / "slots"
        self._resident: namespaces.Resident | None = None

    # Starting and ending.

    def start(self) -> dict[int, int]:
        """Make the router, or find the one that an earlier gateway left and its generations."""
        self._slots.mkdir(parents=True, exist_ok=True)
        if not namespaces.is_mounted(self.path):
            self.path.unlink(missing_ok=True)
            namespaces.make(self.path)
        self._resident = namespaces.Resident(self.path)
        self._nft = self._resident.run(Nftables)
        self._netlink = self._resident.run(Netlink)
        self._elements = self._resident.run(Elements, rules.TABLE.split()[1])
        return self._resident.run(self._set_up)

    def _set_up(self) -> dict[int, int]:
        """Add missing rules, addresses and forwarding in the router's namespace."""
        listed = self._set_up_rules()
        loopback = socket.if_nametoindex("lo")
        self._netlink.configure(loopback, [_alone(DNS_ADDRESS)])
        rules.set_up_routing(self._netlink)
        # Packets under way to a removed sandbox must not leave by the uplink again.
        self._netlink.add_blackholes(rules.SLOTS)
        _write(_SETTINGS)
        return _generations(listed)

    def _set_up_rules(self) -> str:
        """Load the rules of this release; return nft's listing of the generations bound before."""
        base = rules.base(_places())
        try:
            listed = self._nft.run(f"list map {rules.TABLE} generation")
        except NftFailed:
            self._nft.run(base)  # before the first link: fail closed
            return ""
        try:
            self._nft.run(f"list chain {rules.TABLE} {rules.layout(base)}")
        except NftFailed:  # an earlier release made it, or for a kernel with other bounds
            table = self._nft.run_json(f"list table {rules.TABLE}")
            self._nft.run(migration.rebuilt(table, base))
        return listed

    def close(self) -> None:
        """Stop using it; the router and its rules stay."""
        if self._resident is not None:
            self._resident.run(self._nft.close)
            self._resident.run(self._netlink.close)
            self._resident.run(self._elements.close)
            self._resident.close()
            self._resident = None

    def destroy(self) -> None:
        """Remove the router itself, when no sandbox is left."""
        self.close()
        namespaces.unmount(self.path)

    def forget_others(self, slots: Iterable[Slot]) -> bool:
        """Remove what belongs to no such slot from the kernel; return whether that worked."""
        kept = [slot.interface for slot in slots]
        return self._run(self._forget_others, kept)

    def _forget_others(self, kept: list[str]) -> bool:
        found = [item for name in rules.OF_INTERFACES for item in self._elements.listing(name)]
        gone = nftables.of_other_interfaces(found, kept)
        for part in nftables.parts(gone):
            self._elements.change(nftables.removed(part))
        return bool(gone)

    def listing(self, *names: str) -> list[Element]:
        """The kernel's elements of some sets."""
        return self._run(lambda: [item for name in names for item in self._elements.listing(name)])

    def has_uplink(self) -> bool:
        """Whether a gateway, perhaps an earlier one, connected the router to the world."""
        return rules.UPLINK in {name for _, name in self._run(socket.if_nameindex)}

    # Slots.

    def namespace(self, slot: Slot) -> Path:
        return self._slots / str(slot.number)

    def slots(self) -> list[Slot]:
        """The slots that exist."""
        return [Slot(int(path.name)) for path in self._slots.iterdir() if path.name.isdigit()]

    def add_slot(self, slot: Slot) -> int:
        """Make a namespace whose only way out is the router, where it may reach nothing yet.

        Blocks for milliseconds; returns the index of the router's end.
        """
        if not 0 <= slot.number < MAX_SLOTS:
            raise errors.LimitExceeded(f"more than {MAX_SLOTS} sandboxes with a network")
        path = self.namespace(slot)
        router = self.path.open("rb")
        with router:
            namespaces.make(path, lambda: _wire_up(slot, router.fileno()))
        return self._run(self._configure, slot)

    def _configure(self, slot: Slot) -> int:
        index = socket.if_nametoindex(slot.interface)
        there = (slot.address4, slot.address6)
        self._netlink.configure(
            index,
            list(map(_alone, slot.routers)),
            [Route(_alone(address).network) for address in there],
            [(address, slot.hardware(router=False)) for address in there],
            mute=True,
        )
        return index

    def remove_slot(self, slot: Slot) -> None:
        """Remove a slot, to which nothing is bound any more.

        The kernel removes its wire when the last process in the namespace is gone.
        """
        namespaces.unmount(self.namespace(slot))

    def index(self, slot: Slot) -> int:
        return self._run(socket.if_nametoindex, slot.interface)

    # Policies.

    def bind(
        self, slot: Slot, old: BoundPolicy, new: BoundPolicy, carried: list[ElementChange]
    ) -> None:
        """Replace a slot's policy in one transaction; open connections are judged again.

        ``carried`` is what DNS opened before and the new policy still allows.
        """
        changes = rules.change(slot.interface, slot.address4, slot.address6, old, new)
        self.change(changes + carried)

    def disown(self, addresses: list[Address]) -> None:
        """Keep sandboxes away from the host's own addresses, whatever policies say."""
        self.change(rules.own_changes(addresses))

    def bound_near(self, networks: list[Network]) -> None:
        """Limit simultaneous connections into networks in which the host has neighbours."""
        with contextlib.suppress(NftFailed):  # rules that an earlier release made have no such sets
            self._run(self._nft.run, rules.near_commands(networks))

    def change(self, changes: Sequence[ElementChange]) -> None:
        """Change elements on the event loop: the kernel takes less time than a thread to start."""
        self._running()
        self._elements.change(changes)

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """A socket of the router's namespace."""
        return self._run(socket.socket, family, kind, protocol)

    def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return self._running().run(function, *arguments)

    def _running(self) -> namespaces.Resident:
        """The thread in the router's namespace; an error while there is none."""
        if self._resident is None:
            raise errors.K8eError("the router is not running")
        return self._resident


def _wire_up(slot: Slot, router: int) -> None:
    """In a new namespace: connect it to the router, with the only addresses it may use."""
    _write(_SLOT_SETTINGS)
    netlink = Netlink()
    try:
        ends = (slot.hardware(router=False), slot.hardware(router=True))
        index = netlink.add_veth("eth0", slot.interface, router, hardware=ends)
        netlink.configure(socket.if_nametoindex("lo"), [])
        netlink.configure(
            index,
            [_alone(slot.address4), _alone(slot.address6)],
            _ways(slot),
            [(address, ends[1]) for address in slot.routers],
            mute=True,
        )
    finally:
        netlink.close()


def _ways(slot: Slot) -> list[Route]:
    """Routes that make the router the only neighbour of a sandbox.

    The kernel remembers every address that it takes for a neighbour, in one table for all
    namespaces: a sandbox that could fill it would cut all others off. So no network is on the link.
    Groups are sent to the router too, since each would be a neighbour of its own. IPv4 takes
    whatever it finds no route for as a neighbour, if a program names the link and asks for no
    routing; for that, and nothing else, every address is the sandbox's own.
    """
    routers = [Route(_alone(address).network) for address in slot.routers]
    by = slot.routers
    onward = [Route(*way) for way in zip(EVERYWHERE, by, strict=True)]
    # IPv6 has a route for groups itself, for which a link needs no more than to be up.
    groups = [Route(*way, RT_TABLE_LOCAL, priority=1) for way in zip(GROUPS, by, strict=True)]
    return [*routers, *onward, *groups, Route(EVERYWHERE[0], None, RT_TABLE_DEFAULT, RTN_LOCAL)]


def _generations(listed: str) -> dict[int, int]:
    """Slot numbers and generations from nft's listing of the map."""
    found: dict[int, int] = {}
    for part in listed.replace("{", ",").split(","):
        name, colon, mark = part.partition(":")
        if colon and name.strip().startswith('"sb'):
            number = int(name.strip().strip('"').removeprefix("sb"))
            found[number] = int(mark.split("}")[0].strip(), 0)
    return found
