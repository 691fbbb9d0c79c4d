"""The router: a network namespace of k8e's own, between the sandboxes and the world.

Every sandbox has a namespace with one veth whose other end is here, where it can reach none of the
rules that judge it. The router outlives the gateway: without one, its rules stay as they are.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.egress import namespaces, rules
from k8e.egress.netlink import Netlink
from k8e.egress.nftables import NftFailed, Nftables
from k8e.egress.policy import Address, Policy, Preset

# Ranges set aside for measurements of networks; nobody routes them, and few use them at home.
_SLOTS4 = ipaddress.ip_network("198.18.0.0/16")
_UPLINK4 = ipaddress.ip_network("198.19.255.252/30")
_SLOTS6 = ipaddress.ip_network("fd6b:3865:0:1::/112")
_UPLINK6 = ipaddress.ip_network("fd6b:3865:0:2::/126")
MAX_SLOTS = 16_000
CARRIED_SECONDS = 60  # what was open stays open that long after a change, until it is asked again

Target = tuple[Address, int]
DNS_ADDRESS = ipaddress.ip_address("198.19.255.1")
EVERYWHERE = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))


@dataclass(frozen=True)
class Slot:
    """One sandbox's place at the router; everything follows from its number."""

    number: int

    @property
    def interface(self) -> str:
        return f"sb{self.number}"

    def _pair(self, base: Any) -> tuple[Any, Any]:
        start = base.network_address + 4 * self.number
        return start + 1, start + 2

    @property
    def router4(self) -> ipaddress.IPv4Address:
        return self._pair(_SLOTS4)[0]

    @property
    def address4(self) -> ipaddress.IPv4Address:
        return self._pair(_SLOTS4)[1]

    @property
    def router6(self) -> ipaddress.IPv6Address:
        return self._pair(_SLOTS6)[0]

    @property
    def address6(self) -> ipaddress.IPv6Address:
        return self._pair(_SLOTS6)[1]


def _with_prefix(address: Any, length: int) -> Any:
    return ipaddress.ip_interface(f"{address}/{length}")


class Router:
    """Makes slots and binds policies to them. Methods block for milliseconds: call from a thread."""

    def __init__(self, folder: Path, *, world: Path | None = None) -> None:
        """``world`` is the namespace that the uplink leads to: this host's own by default."""
        self._folder = folder
        self._world = world or Path("/proc/self/ns/net")
        self._resident: namespaces.Resident | None = None
        self._policies: dict[int, Policy] = {}
        self._generations: dict[int, int] = {}
        self._newest = 0

    # Starting and ending.

    def start(self) -> None:
        """Make the router, or find the one that an earlier gateway left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "router"
        if not _is_namespace(path):
            path.unlink(missing_ok=True)
            namespaces.make(path)
        self._resident = namespaces.Resident(path)
        self._nft = self._resident.run(Nftables)
        self._netlink = self._resident.run(Netlink)
        self._resident.run(self._set_up)

    def _set_up(self) -> None:
        """In the router's namespace: whatever is missing of links, forwarding and rules."""
        try:
            listed = self._nft.run(f"list map {rules.TABLE} generation")
        except NftFailed:
            listed = ""
            self._nft.run(rules.BASE)  # before the first link: fail closed
        self._read_generations(listed)
        names = {name for _, name in socket.if_nameindex()}
        if rules.UPLINK not in names:
            self._make_uplink()
        for file in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
                Path("/proc/sys/net", file).write_text("1", "ascii")

    def _read_generations(self, listed: str) -> None:
        for part in listed.replace("{", ",").split(","):
            name, colon, mark = part.partition(":")
            if colon and name.strip().startswith('"sb'):
                number = int(name.strip().strip('"').removeprefix("sb"))
                self._generations[number] = int(mark.split("}")[0].strip(), 0)
        self._newest = max(self._generations.values(), default=0)

    def _make_uplink(self) -> None:
        loopback = socket.if_nametoindex("lo")
        self._netlink.configure(loopback, [_with_prefix(DNS_ADDRESS, 32)])
        outer = self._uplink_name()
        with open(self._world, "rb") as world:
            index = self._netlink.add_veth(rules.UPLINK, outer, world.fileno())
        here4, there4 = _UPLINK4.network_address + 2, _UPLINK4.network_address + 1
        here6, there6 = _UPLINK6.network_address + 2, _UPLINK6.network_address + 1
        routes = [(EVERYWHERE[0], there4), (EVERYWHERE[1], there6)]
        addresses = [_with_prefix(here4, 30), _with_prefix(here6, 126)]

        def in_world() -> None:
            with open(self._world, "rb") as world:
                namespaces.enter(world.fileno())
            netlink = Netlink()
            try:
                netlink.configure(
                    socket.if_nametoindex(outer), [_with_prefix(there4, 30), _with_prefix(there6, 126)]
                )
            finally:
                netlink.close()

        namespaces.run_apart(in_world)
        self._netlink.configure(index, addresses, routes)

    def _uplink_name(self) -> str:
        """A name that no other router on this host has."""
        return f"k8e{abs(hash(str(self._folder))) % 0xFFFFFF:06x}"

    def close(self) -> None:
        """Let go; the router and its rules stay."""
        if self._resident is not None:
            self._resident.run(self._nft.close)
            self._resident.run(self._netlink.close)
            self._resident.close()
            self._resident = None

    def destroy(self) -> None:
        """Remove the router itself, when no sandbox is left."""
        unmount(self._folder / "router")

    def remember(self, slot: Slot, policy: Policy) -> None:
        """Know which policy an earlier gateway bound to a slot."""
        self._policies[slot.number] = policy

    # Slots.

    def add_slot(self, slot: Slot, namespace: Path) -> None:
        """Make a namespace whose only way out is the router, where it may reach nothing yet."""
        if not 0 <= slot.number < MAX_SLOTS:
            raise errors.LimitExceeded(f"more than {MAX_SLOTS} sandboxes with a network")
        namespaces.make(namespace)
        self._run(self._wire, slot, namespace)

        def inside() -> None:
            with open(namespace, "rb") as file:
                namespaces.enter(file.fileno())
            netlink = Netlink()
            try:
                netlink.configure(socket.if_nametoindex("lo"), [])
                netlink.configure(
                    socket.if_nametoindex("eth0"),
                    [_with_prefix(slot.address4, 30), _with_prefix(slot.address6, 126)],
                    [(EVERYWHERE[0], slot.router4), (EVERYWHERE[1], slot.router6)],
                )
            finally:
                netlink.close()

        namespaces.run_apart(inside)

    def _wire(self, slot: Slot, namespace: Path) -> None:
        with open(namespace, "rb") as file:
            index = self._netlink.add_veth(slot.interface, "eth0", file.fileno())
        self._netlink.configure(
            index, [_with_prefix(slot.router4, 30), _with_prefix(slot.router6, 126)]
        )

    def remove_slot(self, slot: Slot) -> None:
        """Take the policy, then the wire; the namespace is its owner's to unmount."""
        self.bind(slot, Policy())
        self._run(self._netlink.delete_link, slot.interface)

    # Policies.

    def bind(self, slot: Slot, policy: Policy, reachable: Iterable[Target] = ()) -> int:
        """Replace a slot's policy in one transaction; open connections are judged anew.

        ``reachable`` is what DNS opened before and the new policy still allows. Returns the
        policy's generation, 0 for a policy that allows nothing.
        """
        before, after = self._generations.get(slot.number, 0), 0
        if not policy.silent:
            self._newest += 1
            after = self._newest
        text = self._change(slot, policy, before, after)
        pins = [rules.Pin(after, address, port, CARRIED_SECONDS) for address, port in reachable]
        self._run(self._nft.run, text + rules.pin_elements(pins))
        self._policies[slot.number] = policy
        self._generations[slot.number] = after
        return after

    def generation(self, slot: Slot) -> int:
        return self._generations.get(slot.number, 0)

    def _change(self, slot: Slot, policy: Policy, before: int, after: int) -> str:
        name = slot.interface
        old = self._policies.get(slot.number, Policy())
        text = rules.network_elements("delete", name, old.rules)
        if old.preset is Preset.OPEN:
            text += rules.open_element("delete", name)
        if not policy.silent:
            if old.silent:
                text += rules.add_member(name, slot.address4, slot.address6)
            text += rules.network_elements("add", name, policy.rules)
            if policy.preset is Preset.OPEN:
                text += rules.open_element("add", name)
        elif not old.silent:
            text += rules.remove_member(name, slot.address4, slot.address6)
        return text + rules.set_generation(name, before, after)

    def pin(self, pins: list[rules.Pin]) -> None:
        """Let sandboxes reach what DNS told them, for as long as it said."""
        self._run(self._nft.run, rules.pin_elements(pins))

    def socket(self, family: int, kind: int) -> socket.socket:
        """A socket of the router's namespace."""
        return self._run(lambda: socket.socket(family, kind))

    def _run(self, function: Any, *arguments: Any) -> Any:
        if self._resident is None:
            raise errors.K8eError("the router is not running")
        return self._resident.run(function, *arguments)


def unmount(path: Path) -> None:
    """Let go of a namespace; it ends when nobody is in it any more."""
    if _is_namespace(path):
        namespaces.unmount(path)
    path.unlink(missing_ok=True)


def _is_namespace(path: Path) -> bool:
    """Whether a namespace is mounted at ``path``."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return any(line.split(" ")[4] == str(path) for line in file)
