"""Pins: the addresses that DNS opened for one sandbox, and the names that led there.

In the kernel a pin is one element, whatever ports it opens: it leads to a *group*, the number of a
set of ports. Names with the same ports share a group; an address to which several names led has the
group of all their ports. Groups belong to the sandbox's interface, and go with their last pin.

A sandbox chooses how many addresses it asks for, so all of this is bounded: the oldest pins go.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from k8e.egress import nftables
from k8e.egress.nftables import (
    Element,
    ElementChange,
    of_address,
    of_interface,
    of_mark,
    of_port,
    read_mark,
)
from k8e.egress.policy import Address
from k8e.egress.rules import ALL_PORTS

MAX_PINS = 512  # addresses of one sandbox
MAX_NAMES = 64  # of one address
MAX_KNOWN = 2048  # names of all addresses of one sandbox together
MAX_PORTS = 1024  # in all groups of one sandbox together
# Seconds that an address stays open beyond its answer, for a client that is about to use it.
GRACE = 5
_SLACK = 5.0  # seconds that our clock may differ from the kernel's

Ports = frozenset[int]
EVERY_PORT: Ports = frozenset((0,))


@dataclass(frozen=True)
class _Lead:
    """A name that led to an address, with its ports and its expiry."""

    ports: Ports
    until: float


@dataclass
class _Pin:
    """One address: the names that led to it, and its state in the kernel."""

    leads: dict[str, _Lead] = field(default_factory=dict[str, _Lead])
    group: int = 0
    """0 means that the kernel has nothing of it."""
    until: float = 0.0


@dataclass
class PinPlan:
    """Changes to make in the kernel, and the state that results from them."""

    generation: int
    gone: list[Element] = field(default_factory=list[Element])
    """Pins that are to be removed, as the kernel has them."""
    added: dict[Address, Element] = field(default_factory=dict[Address, Element])
    pins: dict[Address, _Pin | None] = field(default_factory=dict[Address, _Pin | None])
    """By address; None for a forgotten one."""
    past: list[Element] = field(default_factory=list[Element])
    """Elements for connections that are open, where the answer is over or soon will be."""
    groups: dict[Ports, int] = field(default_factory=dict[Ports, int])
    """Groups that are new."""
    freed: dict[Ports, int] = field(default_factory=dict[Ports, int])
    unused: dict[Ports, int] = field(default_factory=dict[Ports, int])
    """Groups that no pin has any more, and whose elements are among the leftovers."""

    def cost(self) -> int:
        """How many elements of sets the kernel has to change."""
        ports = sum(map(len, (*self.groups, *self.freed)))
        return len(self.gone) + len(self.added) + len(self.past) + ports


class Pins:
    """The pins of one sandbox. A plan says what to change; it is kept once the kernel has."""

    def __init__(self, interface: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._here = of_interface(interface)
        self._clock = clock
        self._generation = 0
        self._pins: dict[Address, _Pin] = {}  # the newest last
        self._groups: dict[Ports, int] = {}
        self._newest_group = ALL_PORTS
        self._names = self._ports = 0  # in all
        self._past: tuple[list[Element], float] = ([], 0.0)  # until when the kernel has them
        self.dropped = False
        """Whether pins were given up because there were too many."""

    def __len__(self) -> int:
        return len(self._pins)

    # What led where.

    def names(self, address: Address) -> Mapping[str, Ports]:
        """The names that led to an address, with the ports that each of them opened."""
        found = self._pins.get(address)
        return {} if found is None else {name: lead.ports for name, lead in found.leads.items()}

    def open_names(self, address: Address) -> Mapping[str, Ports]:
        """The names whose answers are still valid, with the kernel's grace period."""
        now, found = self._clock(), self._pins.get(address)
        leads = {} if found is None else found.leads
        return {name: lead.ports for name, lead in leads.items() if now < lead.until + GRACE}

    def all_names(self) -> Iterable[tuple[Address, Iterable[str]]]:
        """Every address with the names that led there."""
        return ((address, pin.leads) for address, pin in self._pins.items())

    # Changes.

    def open(
        self, name: str, opened: Mapping[Address, Ports], seconds: int, *, in_kernel: bool = True
    ) -> PinPlan:
        """Open addresses to which ``name`` led; the time of open ones is extended."""
        plan = PinPlan(self._generation)
        until = self._clock() + seconds
        for address, ports in opened.items():
            old = self._pins.get(address, _Pin())
            leads = {other: lead for other, lead in old.leads.items() if other != name}
            leads[name] = _Lead(ports, until)
            while len(leads) > MAX_NAMES:
                del leads[next(iter(leads))]
            self._plan_pin(plan, address, old, _Pin(leads), in_kernel=in_kernel)
        self._make_room(plan)
        return plan

    def carry(
        self,
        generation: int,
        carried: Mapping[Address, Mapping[str, Ports]],
        seconds: int,
        *,
        in_kernel: bool = True,
    ) -> PinPlan:
        """Plan to keep what a new policy allows, under its generation. See :meth:`leftovers`.

        Addresses stay open no longer than before, and closed ones stay closed; only existing
        connections go on.
        """
        plan = PinPlan(generation)
        plan.pins = dict.fromkeys(self._pins)
        now = self._clock()
        for address, names in carried.items():
            old = self._pins[address].leads
            pin = _Pin(
                {
                    name: _Lead(ports, min(old[name].until, now + seconds))
                    for name, ports in names.items()
                }
            )
            self._plan_pin(plan, address, _Pin(), pin, in_kernel=in_kernel)
            if in_kernel and any(lead.until < now + seconds for lead in pin.leads.values()):
                self._plan_past(plan, address, pin, seconds)
        self._make_room(plan)
        used = {pin.group for pin in plan.pins.values() if pin is not None}
        used |= {read_mark(item.data) for item in plan.past}
        groups = ((ports, group) for ports, group in self._groups.items() if group not in used)
        plan.unused = {ports: group for ports, group in groups if ports not in plan.freed}
        return plan

    def leftovers(self, plan: PinPlan) -> list[Element]:
        """The elements that nothing refers to once a new policy is bound, to be removed then."""
        now = self._clock()
        found = [
            self._element(address, pin, now)
            for address, pin in self._pins.items()
            if pin.group and now < pin.until + _SLACK
        ]
        past, until = self._past
        found += past if now < until + _SLACK else ()
        for ports, group in plan.unused.items():
            found += self._port_elements(ports, group)
        return found

    def changes(self, plan: PinPlan) -> list[ElementChange]:
        """The transaction that makes the changes of a plan."""
        # An element with another time or group is removed and made again.
        freed = (item for entry in plan.freed.items() for item in self._port_elements(*entry))
        groups = (item for entry in plan.groups.items() for item in self._port_elements(*entry))
        return [
            *nftables.removed(plan.gone),
            *map(nftables.delete, freed),
            *map(nftables.add, groups),
            *map(nftables.add, plan.added.values()),
            *map(nftables.add, plan.past),
        ]

    def keep(self, plan: PinPlan) -> None:
        """Take over a plan's state, once the kernel has made its changes."""
        if plan.generation != self._generation:
            seconds = max((item.seconds for item in plan.past), default=0)
            self._past = plan.past, self._clock() + seconds
        self._generation = plan.generation
        for address, pin in plan.pins.items():
            old = self._pins.pop(address, None)
            self._names -= len(old.leads) if old is not None else 0
            if pin is not None:
                self._pins[address] = pin
                self._names += len(pin.leads)
        for ports in (*plan.freed, *plan.unused):
            self._groups.pop(ports, None)
            self._ports -= len(ports)
        self._groups |= plan.groups
        self._ports += sum(map(len, plan.groups))
        self._newest_group = max(self._newest_group, *plan.groups.values(), 0)

    def adopt(
        self,
        generation: int,
        pins: Iterable[tuple[Address, int, int]],
        ports: Iterable[tuple[int, int]],
    ) -> list[Element]:
        """Take over an earlier gateway's pins: addresses, groups and seconds; groups and ports.

        The names that led there are not known any more. Malformed and surplus elements are
        returned, to be removed.
        """
        now = self._clock()
        self._generation = generation
        members: dict[int, set[int]] = {}
        for group, port in ports:
            members.setdefault(group, set()).add(port)
        gone: list[Element] = []
        for group, found in members.items():
            if frozenset(found) in self._groups:
                gone += self._port_elements(frozenset(found), group)
            else:
                self._groups[frozenset(found)] = group
        known = {group: held for held, group in self._groups.items()} | {ALL_PORTS: EVERY_PORT}
        left: list[Element] = []
        for address, group, seconds in sorted(pins, key=lambda pin: pin[2]):
            pin = _Pin({}, group, now + seconds)
            if group not in known:
                left.append(self._element(address, pin, now))
                continue
            pin.leads[""] = _Lead(known[group], pin.until)
            self._pins[address] = pin
        while len(self._pins) > MAX_PINS:
            address = next(iter(self._pins))
            left.append(self._element(address, self._pins.pop(address), now))
        self._newest_group = max((ALL_PORTS, *members))
        self._names, self._ports = len(self._pins), sum(map(len, self._groups))
        return left + gone

    def adopt_past(self, found: list[Element]) -> None:
        """Take over an earlier gateway's pins of open connections, under our generation."""
        seconds = max((item.seconds for item in found), default=0)
        self._past = found, self._clock() + seconds

    # Planning.

    def _plan_pin(
        self, plan: PinPlan, address: Address, old: _Pin, new: _Pin, *, in_kernel: bool
    ) -> None:
        """Give an address the group of all its open ports, for as long as any of them is open."""
        now = self._clock()
        plan.pins[address] = new
        if not in_kernel:
            return
        open_leads = [lead for lead in new.leads.values() if lead.until > now]
        ports = frozenset[int]().union(*(lead.ports for lead in open_leads))
        ports = EVERY_PORT if 0 in ports else ports
        if not ports:
            return
        until = max(lead.until for lead in open_leads)
        new.group = self._group(plan, ports)
        if old.group == new.group and old.until >= until:
            new.until = old.until
            return
        new.until = until + GRACE
        if old.group and now < old.until + _SLACK:
            # The kernel refuses another time or group for an element that is there.
            plan.gone.append(self._element(address, old, now))
        plan.added[address] = self._element(address, new, now, plan.generation)

    def _plan_past(self, plan: PinPlan, address: Address, pin: _Pin, seconds: int) -> None:
        """Let connections to an address continue for a while after the answer has expired."""
        ports = frozenset[int]().union(*(lead.ports for lead in pin.leads.values()))
        group = self._group(plan, EVERY_PORT if 0 in ports else ports)
        key = of_mark(plan.generation) + of_address(address)
        plan.past.append(
            Element(f"past{address.version}", key, data=of_mark(group), seconds=seconds)
        )

    def _group(self, plan: PinPlan, ports: Ports) -> int:
        if ports == EVERY_PORT:
            return ALL_PORTS
        group = self._groups.get(ports) or plan.groups.get(ports)
        if group is None:
            group = max(self._newest_group, *plan.groups.values(), 0) + 1
            plan.groups[ports] = group
        return group

    def _make_room(self, plan: PinPlan) -> None:
        """Plan to drop the oldest pins if there are too many, and groups without a pin."""
        fresh = {a: pin for a, pin in plan.pins.items() if pin is not None}
        replaced = [self._pins[address] for address in plan.pins if address in self._pins]
        count = len(self._pins) - len(replaced) + len(fresh)
        names = self._names - sum(len(pin.leads) for pin in replaced)
        names += sum(len(pin.leads) for pin in fresh.values())
        is_full = count > MAX_PINS or names > MAX_KNOWN
        for address in self._oldest(plan) if is_full else ():
            if count <= MAX_PINS and names <= MAX_KNOWN:
                break
            count -= 1
            names -= len(self._give_up(plan, address).leads)
        if self._ports + sum(map(len, plan.groups)) > MAX_PORTS:
            self._make_room_for_ports(plan)

    def _oldest(self, plan: PinPlan) -> Iterator[Address]:
        """All pinned addresses once a plan is done, the oldest first."""
        yield from (address for address in self._pins if address not in plan.pins)
        yield from [address for address, pin in plan.pins.items() if pin is not None]

    def _make_room_for_ports(self, plan: PinPlan) -> None:
        now = self._clock()
        users: dict[int, int] = {}
        addresses = list(self._oldest(plan))
        for address in addresses:
            pin = self._planned(plan, address)
            if pin.group and pin.until > now:
                users[pin.group] = users.get(pin.group, 0) + 1
        groups = {group: ports for ports, group in (self._groups | plan.groups).items()}
        total = sum(map(len, groups.values()))
        for group in [group for group in groups if group not in users]:
            total -= len(self._free(plan, groups[group]))
        for address in addresses:
            if total <= MAX_PORTS:
                break
            group = self._give_up(plan, address).group
            if group in groups and group in users:
                users[group] -= 1
                total -= 0 if users[group] else len(self._free(plan, groups[group]))

    def _planned(self, plan: PinPlan, address: Address) -> _Pin:
        return plan.pins.get(address) or self._pins[address]

    def _give_up(self, plan: PinPlan, address: Address) -> _Pin:
        now = self._clock()
        pin, old = self._planned(plan, address), self._pins.get(address)
        self.dropped = self.dropped or any(lead.until > now for lead in pin.leads.values())
        held = plan.added.pop(address, None) is None
        if held and old is not None and old.group and now < old.until + _SLACK:
            plan.gone.append(self._element(address, old, now))
        plan.pins[address] = None
        return pin

    def _free(self, plan: PinPlan, ports: Ports) -> Ports:
        """Plan to drop a group without a pin."""
        if plan.groups.pop(ports, None) is None:
            plan.freed[ports] = self._groups[ports]
        return ports

    # Elements.

    def _element(
        self, address: Address, pin: _Pin, now: float, generation: int | None = None
    ) -> Element:
        generation = self._generation if generation is None else generation
        seconds = max(1, round(pin.until - now))
        key = of_mark(generation) + of_address(address)
        return Element(f"pins{address.version}", key, data=of_mark(pin.group), seconds=seconds)

    def _port_elements(self, ports: Ports, group: int) -> list[Element]:
        head = self._here + of_mark(group)
        return [Element("ports", head + of_port(port)) for port in sorted(ports)]


def read(element: Element) -> tuple[int, Address, int, int]:
    """A pin as the kernel lists it: its generation, address, group and the seconds left."""
    address = ipaddress.ip_address(element.key[4:])
    return read_mark(element.key), address, read_mark(element.data), element.seconds


def read_port(element: Element) -> tuple[str, int, int]:
    """A port as the kernel lists it: its interface, group and number."""
    interface = element.key[:16].rstrip(b"\0").decode()
    return interface, read_mark(element.key[16:]), int.from_bytes(element.key[20:22], "big")
