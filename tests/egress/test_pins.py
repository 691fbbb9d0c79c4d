"""Pins of one sandbox, beside a kernel of Python that is as strict as the real one."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from k8e.egress import nftables, pins, rules
from k8e.egress.nftables import Element, ElementChange
from k8e.egress.pins import GRACE, MAX_KNOWN, MAX_NAMES, MAX_PINS, MAX_PORTS, Pins
from k8e.egress.policy import Address

FIRST = ipaddress.ip_address("93.184.216.1")
FIRST6 = ipaddress.ip_address("2606:4700::1")


class Kernel:
    """Sets whose elements have a time, and that refuse what nftables refuses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.held: dict[tuple[str, bytes], tuple[bytes, float]] = {}

    def clock(self) -> float:
        return self.now

    def change(self, changes: list[ElementChange]) -> None:
        for change in changes:
            item = change.element
            assert item is not None
            key = item.name, item.key
            held = self.held.get(key)
            if held is not None and held[1] <= self.now:
                held = self.held.pop(key) and None
            if change.verb == "delete":
                assert held is not None, f"{item} is not there"
                del self.held[key]
            elif held is None:
                until = self.now + item.seconds if item.seconds else float("inf")
                self.held[key] = item.data, until
            else:
                assert held[0] == item.data, f"{item} is there with other data"

    def alive(self) -> list[Element]:
        return [
            Element(name, key, b"", data, int(until - self.now) if name != "ports" else 0)
            for (name, key), (data, until) in self.held.items()
            if until > self.now
        ]

    def is_open(self, generation: int, address: Address, port: int) -> bool:
        """What the rules find for a packet."""
        key = nftables.of_mark(generation) + nftables.of_address(address)
        data, until = self.held.get((f"pins{address.version}", key), (b"", 0.0))
        if until <= self.now:
            return False
        if nftables.read_mark(data) == rules.ALL_PORTS:
            return True
        key = nftables.of_interface("sb1") + data + nftables.of_port(port)
        return ("ports", key) in self.held


class Sandbox:
    """Pins whose every change goes to such a kernel."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.pins = Pins("sb1", self.kernel.clock)
        self.generation = 0
        self.carry(7)

    def open(self, name: str, *addresses: Address, ports: set[int], seconds: int = 60) -> None:
        opened = {address: frozenset(ports) for address in addresses}
        plan = self.pins.open(name, opened, seconds)
        self.kernel.change(self.pins.changes(plan))
        self.pins.keep(plan)

    def carry(self, generation: int, ports: set[int] | None = None) -> None:
        carried = {
            address: {name: frozenset(ports or ()) for name in names if name}
            for address, names in self.pins.all_names()
            if ports
        }
        plan = self.pins.carry(generation, carried, 60)
        left = self.pins.leftovers(plan)
        self.kernel.change(self.pins.changes(plan))
        self.pins.keep(plan)
        self.kernel.change(nftables.removed(left))
        self.generation = generation

    def is_open(self, address: Address, port: int) -> bool:
        return self.kernel.is_open(self.generation, address, port)


def test_a_pin_is_one_element_however_many_ports_it_has() -> None:
    sandbox = Sandbox()
    many = set(range(1, 256))
    for number in range(40):
        sandbox.open("a.test", FIRST + number, ports=many)
    names = [name for name, _ in sandbox.kernel.held]
    assert names.count("pins4") == 40
    assert names.count("ports") == 255
    assert sandbox.is_open(FIRST, 255)
    assert not sandbox.is_open(FIRST, 256)


def test_an_address_of_several_names_has_the_ports_of_all_while_they_last() -> None:
    sandbox = Sandbox()
    sandbox.open("a.test", FIRST, ports={80}, seconds=30)
    sandbox.open("b.test", FIRST, ports={443}, seconds=600)
    assert sandbox.is_open(FIRST, 80)
    assert sandbox.is_open(FIRST, 443)
    sandbox.kernel.now += 60
    sandbox.open("b.test", FIRST, ports={443}, seconds=600)
    assert not sandbox.is_open(FIRST, 80)
    assert sandbox.is_open(FIRST, 443)


def test_a_short_answer_does_not_shorten_a_long_one() -> None:
    sandbox = Sandbox()
    sandbox.open("a.test", FIRST, ports={0}, seconds=600)
    sandbox.open("b.test", FIRST, ports={0}, seconds=30)
    sandbox.kernel.now += 599
    assert sandbox.is_open(FIRST, 22)
    sandbox.kernel.now += GRACE + 2
    assert not sandbox.is_open(FIRST, 22)


def test_an_answer_that_is_told_again_changes_nothing_in_the_kernel() -> None:
    sandbox = Sandbox()
    sandbox.open("a.test", FIRST, ports={443})
    again = sandbox.pins.open("a.test", {FIRST: frozenset((443,))}, 60)
    assert sandbox.pins.changes(again) == []


def test_pins_are_bounded_and_the_newest_are_open() -> None:
    sandbox = Sandbox()
    for number in range(MAX_PINS + 200):
        sandbox.open("a.test", FIRST + number, FIRST6 + number, ports={443})
    held = [name for name, _ in sandbox.kernel.held if name != "ports"]
    assert len(held) == len(sandbox.pins) == MAX_PINS
    assert sandbox.is_open(FIRST + MAX_PINS + 199, 443)
    assert not sandbox.is_open(FIRST, 443)
    assert sandbox.pins.dropped


def test_names_of_addresses_are_bounded() -> None:
    sandbox = Sandbox()
    for number in range(MAX_NAMES + 10):
        sandbox.open(f"n{number}.test", FIRST, ports={443})
    assert len(sandbox.pins.names(FIRST)) == MAX_NAMES
    for number in range(MAX_KNOWN // 8 + 50):
        for name in range(8):
            sandbox.open(f"n{name}.test", FIRST + number, ports={443})
    assert sum(len(list(names)) for _, names in sandbox.pins.all_names()) <= MAX_KNOWN


def test_another_policy_opens_nothing_that_is_closed_but_connections_go_on() -> None:
    sandbox = Sandbox()
    sandbox.open("a.test", FIRST, ports={443}, seconds=30)
    sandbox.open("b.test", FIRST + 1, ports={443}, seconds=600)
    sandbox.kernel.now += 30 + GRACE + 1
    sandbox.carry(8, {443})
    assert not sandbox.is_open(FIRST, 443)
    assert sandbox.is_open(FIRST + 1, 443)
    past = [item for item in sandbox.kernel.alive() if item.name == "past4"]
    assert [pins.read(item)[1] for item in past] == [FIRST]
    sandbox.carry(9)
    assert sandbox.kernel.alive() == []


def test_unions_of_ports_are_bounded() -> None:
    sandbox = Sandbox()
    for number in range(60):
        for port in range(1, 40):
            sandbox.open(f"n{port}.test", FIRST + number, ports={port + number * 40})
    ports = [key for name, key in sandbox.kernel.held if name == "ports"]
    assert len(ports) <= MAX_PORTS
    assert sandbox.is_open(FIRST + 59, 39 + 59 * 40)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "carry", "wait", "adopt"]),
            st.integers(0, 5),
            st.sets(st.sampled_from([0, 22, 80, 443, 8080]), min_size=1, max_size=3),
            st.sampled_from([30, 60, 600]),
        ),
        max_size=40,
    )
)
def test_whatever_happens_the_kernel_has_what_was_opened_and_nothing_else(
    steps: list[tuple[str, int, set[int], int]],
) -> None:
    sandbox = Sandbox()
    generation = 7
    for what, number, ports, seconds in steps:
        if what == "open":
            sandbox.open(f"n{number % 3}.test", FIRST + number, ports=ports, seconds=seconds)
            assert all(sandbox.is_open(FIRST + number, port or 1) for port in ports)
        elif what == "carry":
            generation += 1
            sandbox.carry(generation, ports if number % 2 else None)
        elif what == "wait":
            sandbox.kernel.now += seconds
        else:
            adopt(sandbox)
    found = sandbox.kernel.alive()
    assert {pins.read(item)[0] for item in found if item.name != "ports"} <= {generation}
    sandbox.carry(generation + 1)
    assert sandbox.kernel.alive() == []


def adopt(sandbox: Sandbox) -> None:
    """A new gateway takes over from one that was killed."""
    everything = sandbox.kernel.alive()
    found = [item for item in everything if not item.name.startswith("past")]
    held = [pins.read(item) for item in found if item.name != "ports"]
    ports = [pins.read_port(item)[1:] for item in found if item.name == "ports"]
    sandbox.pins = Pins("sb1", sandbox.kernel.clock)
    own = [pin[1:] for pin in held if pin[0] == sandbox.generation]
    sandbox.pins.adopt_past([item for item in everything if item.name.startswith("past")])
    gone = sandbox.pins.adopt(sandbox.generation, own, ports)
    sandbox.kernel.change(nftables.removed(gone))
