"""Who an address stands for, where something is counted by address."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_HOST_BITS = {4: 32, 6: 64}  # of a prefix that belongs to one host
_RANGE_BITS = {4: 24, 6: 48}  # … and of one that belongs to one network


def group(address: str) -> str:
    """One host. With IPv6 it has a whole /64 to choose its addresses from."""
    return _network(address, _HOST_BITS)


def span(address: str) -> str:
    """One network: whoever has many addresses mostly has those of a few of these."""
    return _network(address, _RANGE_BITS)


def is_loopback(address: str) -> bool:
    """Whether it is of this machine."""
    parsed = _parse(address)
    return parsed is not None and parsed.is_loopback


def _parse(address: str) -> Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    # A listener for both kinds names IPv4 addresses in the words of IPv6.
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _network(address: str, bits: dict[int, int]) -> str:
    parsed = _parse(address)
    if parsed is None:
        return address[:64]
    network = ipaddress.ip_network((parsed, bits[parsed.version]), strict=False)
    return str(parsed) if network.num_addresses == 1 else str(network)
