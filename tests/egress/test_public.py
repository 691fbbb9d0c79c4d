"""Which addresses are of the internet, and which of somewhere around here."""

from __future__ import annotations

import ipaddress

import hypothesis
import pytest
from hypothesis import strategies as st

from k8e.egress.policy import (
    is_public,
)

# What is public.


@pytest.mark.parametrize(
    "text",
    [
        "1.1.1.1",
        "8.8.8.8",
        "93.184.216.34",
        "100.63.255.255",
        "100.128.0.0",
        "168.63.129.15",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.1",
        "198.17.255.255",
        "198.20.0.0",
        "223.255.255.255",
        "2606:4700::1111",
        "2a00:1450::1",
        "2003::1",
    ],
)
def test_addresses_on_the_internet_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


NOT_PUBLIC = [
    # This host and its network.
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "10.255.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.0.1",
    # Metadata services.
    "169.254.169.254",
    "169.254.170.2",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    # Shared, for documentation, for measurements, for groups, for nobody.
    "100.64.0.1",
    "100.127.255.255",
    "192.0.2.1",
    "198.18.0.1",
    "198.19.255.253",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "100::1",
    "2001:db8::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    # IPv4 in disguise.
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:168.63.129.16",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::10.0.0.1",
    "2002:a00:1::1",
    "2001:0:a00:1::1",
]
# What the registries have given to nobody, or to another use; all but 2000::/3.
NOT_UNICAST = ["::10.0.0.1", "::ffff:0:10.0.0.1", "5f00::1", "4000::1", "8000::1", "f000::1"]


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_addresses_around_here_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", NOT_UNICAST)
def test_addresses_outside_of_the_global_unicast_range_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@hypothesis.given(st.ip_addresses(v=4))
def test_no_address_is_public_when_it_is_mapped_into_ipv6(address: ipaddress.IPv4Address) -> None:
    assert not is_public(ipaddress.ip_address(f"::ffff:{address}"))
