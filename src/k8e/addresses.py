"""Who an address stands for, where something is counted by address."""

from __future__ import annotations

import ipaddress


def group(address: str) -> str:
    """An IPv6 host has a whole /64 to choose its addresses from."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if parsed.version == 4:
        return str(parsed)
    return str(ipaddress.ip_network((parsed.packed[:8] + bytes(8), 64)))
