"""The uplink: the wire between the router and the world, and its changes of the host's network.

The world is this host's own network, or another namespace if the operator chose one. The host sends
on what the router lets out and translates its addresses; the host itself cannot be reached from
there, by any address, and connections from outside do not get in. k8e's own table only adds to what
the host has; see ``firewalls`` for what the host has besides, and ``forwarding`` for what has to be
switched on.

The functions block for some milliseconds: call them from threads of this host's own network. All
can be repeated, and where everything is as it should be, they change nothing and wake no watcher.

An operator may flush all rules, restart a firewall or start Docker, and then the uplink must be
repaired. The watcher only reports that something changed; looking at everything again is quick, and
changes nothing where all is well, so that our own repair does not wake us for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import ipaddress
import socket
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.egress import firewalls, forwarding, namespaces, rules
from k8e.egress.firewalls import Firewall
from k8e.egress.forwarding import Guard, Switches
from k8e.egress.netlink import EVERYWHERE, Netlink, NetworkLink, Route, messages
from k8e.egress.nftables import Nftables
from k8e.egress.policy import Address, Network

_NET4 = ipaddress.ip_network("198.19.0.0/16")
_NET6 = ipaddress.ip_network("fd6b:3865:0:2::/64")
MAX_UPLINKS = 256  # the end of the first network is the resolver's
WAIT_SECONDS = 2


@dataclass(frozen=True)
class Ends:
    """The addresses of both ends of an uplink, which follow from its number."""

    number: int

    @property
    def name(self) -> str:
        return f"{forwarding.PREFIX}{self.number}"

    def addresses(self, *, outer: bool) -> tuple[Any, Any]:
        """IPv4 and IPv6, with the lengths of their networks."""
        host = 4 * self.number + (1 if outer else 2)
        return (
            ipaddress.ip_interface(f"{_NET4.network_address + host}/30"),
            ipaddress.ip_interface(f"{_NET6.network_address + host}/126"),
        )

    def hardware(self, *, outer: bool) -> bytes:
        """A fixed hardware address: udev changes one that the kernel chose, some time later."""
        return b"\x02k8e" + (2 * self.number + outer).to_bytes(2, "big")

    def free(self, taken: Iterable[Address]) -> bool:
        """Whether the host uses neither network for something else."""
        networks: list[Network] = [item.network for item in self.addresses(outer=True)]
        return not any(address in network for address in taken for network in networks)


def connect(router: Path, world: Path) -> str:
    """Connect the router's namespace to the world; return the name of the wire's end there.

    The uplink of an earlier gateway is found, and only repaired.
    """
    number = _find(router, world)
    if number is None:
        number = _make(router, world)
    ends = Ends(number)
    # Before the wire is up: from the first packet on, the host is not to be reached.
    protect(world, ends.name)
    families = namespaces.run_in(world, lambda: _families(ends.name))
    if 6 in families:
        families = namespaces.run_in(router, lambda: _families(rules.UPLINK))
    both = ((world, True), (router, False))
    for step in (_settle, _await):
        for path, outer in both:
            namespaces.run_in(path, functools.partial(step, ends, families, outer=outer))
    return ends.name


def protect(world: Path, name: str) -> None:
    """Set up forwarding and translation, shield the host, and pass the host's other firewalls.

    Does nothing if the wire is gone: it may just have been removed.
    """

    def inside() -> None:
        with _tools() as (netlink, nft, firewall):
            if name not in {link.name for link in netlink.links()}:
                return
            plan = forwarding.plan(netlink, name)
            text, digest, count = table(name, plan)
            found = firewall.rules(firewalls.INET, name)
            if len(found) != count or any(rule.comment != digest for rule in found):
                nft.run(f"add table inet {name}\ndelete table inet {name}\n{text}")
            plan.apply()
            firewall.let_through(name)

    namespaces.run_in(world, inside)


def disconnect(world: Path, name: str) -> None:
    """Remove the wire and all that was added for it, even if half of it is gone."""

    def inside() -> None:
        with _tools() as (netlink, _, firewall):
            netlink.delete_link(name)
            if not any(map(forwarding.is_uplink, netlink.links())):
                forwarding.undo(netlink)
            firewall.withdraw(name)

    namespaces.run_in(world, inside)


def seal(world: Path) -> None:
    """Make a namespace that only leads to another one refuse all connections.

    A packet that is not of a connection through it would be refused in its sender's name, and
    end the connection that it belongs to: some programs that carry packets send odd ones.
    """
    table = "inet k8e-world"
    chain = "staying { type filter hook input priority filter; policy accept; }"
    rule = 'staying iifname != "lo" meta l4proto { tcp, udp } drop'

    def inside() -> None:
        with _tools() as (_, nft, _firewall):
            nft.run(f"add table {table}\ndelete table {table}\nadd table {table}")
            nft.run(f"add chain {table} {chain}\nadd rule {table} {rule}")

    namespaces.run_in(world, inside)


def own_addresses(world: Path) -> list[Address]:
    """All addresses by which the host can be reached."""
    return namespaces.run_in(world, _own_addresses)


def near_networks(world: Path) -> list[Network]:
    """All networks in which the host has neighbours."""
    return namespaces.run_in(world, _near_networks)


def _near_networks() -> list[Network]:
    with _opened() as netlink:
        return netlink.near_networks()


def _own_addresses() -> list[Address]:
    with _opened() as netlink:
        found = {address for _, address in netlink.addresses()}
    return sorted(found, key=lambda address: (address.version, address.packed))


# The wire.


def _find(router: Path, world: Path) -> int | None:
    """Find the number of the router's wire; remove a wire that leads elsewhere."""
    inner = namespaces.run_in(router, lambda: _links().get(rules.UPLINK))
    if inner is None:
        return None
    for link in namespaces.run_in(world, _links).values():
        other_end = (link.index, link.peer) == (inner.peer, inner.index)
        if other_end and firewalls.UPLINK_NAME.fullmatch(link.name):
            return int(link.name.removeprefix(forwarding.PREFIX))
    namespaces.run_in(router, lambda: _delete(rules.UPLINK))
    return None


def _make(router: Path, world: Path) -> int:
    taken = namespaces.run_in(world, _prepare)
    with open(world, "rb") as file:
        descriptor = file.fileno()
        return namespaces.run_in(router, lambda: _add(descriptor, taken))


def _prepare() -> list[Address]:
    """In the world: clean up after uplinks that were killed; return the addresses in use."""
    with _tools() as (netlink, _, firewall):
        alive = {link.name for link in netlink.links()}
        for name in firewall.forgotten(alive):
            firewall.withdraw(name)
        return [address for _, address in netlink.addresses()]


def _add(world: int, taken: list[Address]) -> int:
    """In the router: add a wire with the first free number; the kernel lets only one have it."""
    with _opened() as netlink:
        for number in range(MAX_UPLINKS):
            ends = Ends(number)
            if not ends.free(taken):
                continue
            with contextlib.suppress(FileExistsError):
                netlink.add_veth(rules.UPLINK, ends.name, world)
                return number
    raise errors.LimitExceeded(f"more than {MAX_UPLINKS} uplinks on this host")


def _settle(ends: Ends, families: set[int], *, outer: bool) -> None:
    """Add missing addresses, routes and neighbours at one end of the wire."""
    with _opened() as netlink:
        link = _links()[ends.name if outer else rules.UPLINK]
        if link.hardware != ends.hardware(outer=outer):
            netlink.set_hardware_address(link.index, ends.hardware(outer=outer))
        mine = [item for item in ends.addresses(outer=outer) if item.version in families]
        others = [item.ip for item in ends.addresses(outer=not outer) if item.version in families]
        ways = [] if outer else [Route(EVERYWHERE[other.version == 6], other) for other in others]
        present = {address for index, address in netlink.addresses() if index == link.index}
        netlink.configure(
            link.index,
            [item for item in mine if item.ip not in present],
            ways,
            # Known for good: no firewall of the host's can keep the ends from finding each other.
            [(other, ends.hardware(outer=not outer)) for other in others],
        )


def _await(ends: Ends, families: set[int], *, outer: bool) -> None:
    """Wait until packets pass: the kernel finishes some of this a moment later."""
    index = socket.if_nametoindex(ends.name if outer else rules.UPLINK)
    mine = [item.ip for item in ends.addresses(outer=outer) if item.version in families]
    with (
        _opened() as netlink,
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as changes,
    ):
        changes.bind((0, 1 << 0 | 1 << 10))  # of links, and of routes of IPv6
        changes.settimeout(WAIT_SECONDS)
        with contextlib.suppress(TimeoutError):  # then the first packets will take longer
            while not (netlink.link(index).running and all(map(netlink.is_local, mine))):
                changes.recv(65536)


def _families(name: str) -> set[int]:
    """The versions of IP that an interface can use."""
    path = Path("/proc/sys/net/ipv6/conf", name, "disable_ipv6")
    with contextlib.suppress(OSError):
        if path.read_text("ascii").strip() == "0":
            return {4, 6}
    return {4}


def _links() -> dict[str, NetworkLink]:
    with _opened() as netlink:
        return {link.name: link for link in netlink.links()}


def _delete(name: str) -> None:
    with _opened() as netlink:
        netlink.delete_link(name)


@contextlib.contextmanager
def _opened() -> Generator[Netlink]:
    netlink = Netlink()
    try:
        yield netlink
    finally:
        netlink.close()


@contextlib.contextmanager
def _tools() -> Generator[tuple[Netlink, Nftables, Firewall]]:
    """The tools for the namespace of this thread."""
    with _opened() as netlink:
        nft = Nftables()
        try:
            with contextlib.closing(Firewall(nft)) as firewall:
                yield netlink, nft, firewall
        finally:
            nft.close()


# The rules.


def table(name: str, plan: Switches) -> tuple[str, str, int]:
    """The uplink's table; the comment of its rules, which identifies its contents; their number."""
    chains = _chains(name, plan)
    digest = f"k8e {hashlib.sha256(repr(chains).encode()).hexdigest()[:12]}"
    text = ""
    for head, lines in chains.items():
        commented = "".join(f'{line} comment "{digest}"\n' for line in lines)
        text += f"chain {head}\n{commented}}}\n"
    return f"table inet {name} {{\n{text}}}\n", digest, sum(map(len, chains.values()))


def _chains(name: str, plan: Switches) -> dict[str, list[str]]:
    """Rules by the heads of their chains.

    Addresses of the host are refused before any translation: a port that a container publishes is
    one of them. Packets that are translated nevertheless are refused, wherever they lead.
    """
    came, goes = f'iifname "{name}"', f'oifname "{name}"'
    discovery = "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept"
    # Where the way out carries smaller packets than the wire, not every sender hears the router say
    # so.
    segments = "tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu"
    # A route of the host's would do too, but might be in the way of one that the host has.
    slots4, slots6 = rules.SLOTS
    return {
        "refuse {": [
            "meta l4proto tcp reject with tcp reset",
            "meta l4proto udp reject with icmpx port-unreachable",
            "reject with icmpx admin-prohibited",
        ],
        "arriving { type filter hook prerouting priority raw; policy accept;": [
            f"{came} {discovery}",
            f"{came} fib daddr type {{ broadcast, multicast }} drop",
            f"{came} fib daddr type {{ local, anycast }} goto refuse",
        ],
        "staying { type filter hook input priority filter - 10; policy accept;": [
            f"{came} {discovery}",
            f"{came} goto refuse",
        ],
        "forward { type filter hook forward priority filter - 10; policy accept;": [
            f"{came} ct state invalid,untracked drop",
            f"{came} ip daddr {slots4} drop",
            f"{came} ip6 daddr {slots6} drop",
            f"{came} ct status dnat goto refuse",
            f'{came} oifname "{forwarding.PREFIX}*" goto refuse',
            f'{goes} iifname "{forwarding.PREFIX}*" goto refuse',
            f"{goes} ct state != {{ established, related }} drop",
            f"{came} {segments}",
            f"{goes} {segments}",
            *_guard("ipv4", plan.guard4),
            *_guard("ipv6", plan.guard6),
        ],
        "leaving { type nat hook postrouting priority srcnat - 10; policy accept;": [
            f"{came} masquerade"
        ],
    }


def _guard(family: str, guard: Guard) -> list[str]:
    """Keep other traffic from forwarding that was switched on only for sandboxes."""
    if not guard.arriving:
        return []
    arriving, leaving = (", ".join(map(str, ids)) for ids in (guard.arriving, guard.leaving))
    return [f"meta nfproto {family} iif {{ {arriving} }} oif {{ {leaving} }} drop"]


QUICK_SECONDS = 0.1
# Where changes never stop, or another program undoes ours, we look less often.
SLOW_SECONDS = 2.0
_BUFFER, _MESSAGE = 1 << 20, 1 << 17
_SO_RCVBUFFORCE = 33
# Links, addresses of IPv4 and IPv6, and the switches of forwarding.
_ROUTE_GROUPS = (1, 5, 9, 24, 25)
_NFT_GROUPS = (7,)
_PROTOCOLS = (
    (socket.NETLINK_ROUTE, _ROUTE_GROUPS),
    (firewalls.NETLINK_NETFILTER, _NFT_GROUPS),
)
# Tables deleted, chains and rules made or deleted; changed sets do not affect forwarding.
_NFT_KINDS = frozenset(firewalls.NFT | kind for kind in (2, 3, 5, 6, 8))


class NetworkWatcher:
    """Calls ``on_change`` on the running loop, once for all changes that come together."""

    def __init__(self, world: Path, on_change: Callable[[], object], *, rules: bool = True) -> None:
        """Only a namespace's root may watch ``rules`` of firewalls; any user may watch the rest."""
        self._world = world
        self._protocols = _PROTOCOLS if rules else _PROTOCOLS[:1]
        self._on_change = on_change
        self._sockets: list[socket.socket] = []
        self._timer: asyncio.TimerHandle | None = None
        self._delay = QUICK_SECONDS
        self._told = 0.0

    def start(self) -> None:
        """Listen from now on."""
        self._loop = asyncio.get_running_loop()
        self._sockets = namespaces.run_in(self._world, lambda: _listen(self._protocols))
        for item in self._sockets:
            self._loop.add_reader(item, self._read, item)

    def close(self) -> None:
        """Stop listening; ``on_change`` is not called any more."""
        for item in self._sockets:
            self._loop.remove_reader(item)
            item.close()
        self._sockets = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read(self, item: socket.socket) -> None:
        changed = False
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    changed = _matters(item.recv(_MESSAGE)) or changed
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        raise
                    changed = True  # more than the kernel could queue; we look at everything anyway
        if changed and self._timer is None:
            calm = self._loop.time() - self._told > 2 * self._delay
            self._delay = QUICK_SECONDS if calm else min(2 * self._delay, SLOW_SECONDS)
            self._timer = self._loop.call_later(self._delay, self._tell)

    def _tell(self) -> None:
        self._timer = None
        self._told = self._loop.time()
        self._on_change()


def _listen(protocols: tuple[tuple[int, tuple[int, ...]], ...]) -> list[socket.socket]:
    """In the world: open the sockets on which the kernel reports changes."""
    made: list[socket.socket] = []
    for protocol, groups in protocols:
        item = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        try:
            item.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        except PermissionError:  # without root only the groups that are open to all
            item.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        item.bind((0, sum(1 << group - 1 for group in groups)))
        item.setblocking(False)
        made.append(item)
    return made


def _matters(data: bytes) -> bool:
    """Whether a message is about something that an uplink depends on."""
    for kind, _, body in messages(data):
        if kind >> 8 == 0:  # not a firewall's
            return True
        if kind in _NFT_KINDS and body[0] in firewalls.FAMILIES:
            return True
    return False
