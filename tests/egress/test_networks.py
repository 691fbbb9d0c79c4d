"""Networks of policies, as keys of hash tables."""

from __future__ import annotations

import ipaddress
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.egress import networks
from k8e.egress.nftables import of_mark
from k8e.egress.policy import Address, Network, Rule
from tests.egress.stages import WEB, WEB6, Stage

AROUND = st.sampled_from([0x5DB8D822, 0x5DB8D823, 0x5DB8D800, 0x5DB80000, 0x08080808, 0xFFFFFFFF])


def looked_up(address: Address, port: int, held: set[tuple[str, bytes]]) -> bool:
    """What the rules of the router find, in Python."""
    mark, ports = of_mark(7), port.to_bytes(2, "big") + b"\0\0"
    bits = address.max_prefixlen
    keys = [("addr", address.packed)]
    for length in range(0, bits, networks.STEP):
        start = int(address) >> (bits - length) << (bits - length) | 1 << (bits - length - 1)
        keys.append(("net", start.to_bytes(bits // 8, "big")))
    ported = {"addr": "addrport", "net": "port"}
    return any(
        (f"{kind}{address.version}", mark + key) in held
        or (f"{ported[kind]}{address.version}", mark + key + ports) in held
        for kind, key in keys
    )


@st.composite
def some_networks(draw: st.DrawFn) -> Network:
    length = draw(st.integers(0, 32))
    if draw(st.booleans()):
        return ipaddress.IPv4Network((draw(AROUND), length), strict=False)
    high = draw(AROUND) << 96 | draw(AROUND)
    return ipaddress.IPv6Network((high, draw(st.integers(0, 128))), strict=False)


@given(st.lists(st.tuples(some_networks(), st.sampled_from([0, 80, 443])), max_size=6), AROUND)
def test_an_address_is_found_where_it_lies_in_a_network_and_nowhere_else(
    named: list[tuple[Network, int]], number: int
) -> None:
    made = networks.elements(7, [Rule(network=network, port=port) for network, port in named])
    held = {(item.name, item.key) for item in made}
    assert len(made) == len(held) <= 8 * len(named)
    six = ipaddress.IPv6Address(number << 96 | number)
    for address in (ipaddress.IPv4Address(number), six):
        for port in (80, 443):
            lies = any(address in network and other in (0, port) for network, other in named)
            assert looked_up(address, port, held) == lies


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
async def test_networks_of_every_length_are_what_the_kernel_lets_through(stage: Stage) -> None:
    for length in (1, 2, 5, 7, 8, 12, 15, 16, 19, 24, 27, 28, 29, 30, 31, 32):
        inside = ipaddress.ip_network(f"{WEB}/{length}", strict=False)
        size = int(inside.hostmask) + 1
        beside = ipaddress.ip_network((int(inside.network_address) ^ size, length))
        await stage.allow(str(inside))
        assert await stage.sandbox.connect(WEB) == WEB, length
        if beside.network_address.is_global:
            await stage.allow(str(beside))
            assert await stage.sandbox.connect(WEB) == "ConnectionRefusedError", length
    for length in (4, 7, 20, 33, 64, 95, 125, 127, 128):
        inside6 = ipaddress.ip_network(f"{WEB6}/{length}", strict=False)
        size = int(inside6.hostmask) + 1
        beside6 = ipaddress.ip_network((int(inside6.network_address) ^ size, length))
        await stage.allow(f"[{inside6}]:443")
        assert await stage.sandbox.connect(WEB6, 443) == WEB6, length
        assert await stage.sandbox.connect(WEB6, 80) == "ConnectionRefusedError", length
        if length > 4:
            await stage.allow(f"[{beside6}]:443")
            assert await stage.sandbox.connect(WEB6, 443) == "ConnectionRefusedError", length
