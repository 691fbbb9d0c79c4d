"""The rule set of the router, as text: one base for all sandboxes, and elements for each.

All sessions share a few sets, because the cost of a change grows with the number of sets and not
with their elements. Every policy that is bound gets a generation, a number that no other has. A
connection carries the generation that allowed it as its mark, and ``live`` holds each interface's
present one: so an expired DNS answer does not cut a download, and a tightened policy does. What DNS
opened is keyed by generation too, and so ends with the policy under which it was asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from k8e.egress.policy import Address, Rule

TABLE = "inet k8e"
UPLINK = "up"
LOG_GROUP = 5
DNS_PORT = 53
# New questions per second that one sandbox may ask before they are dropped.
DNS_RATE = 100

BASE = f"""
table {TABLE} {{
    set members4 {{ type ifname . ipv4_addr; }}
    set members6 {{ type ifname . ipv6_addr; }}
    set live {{ type ifname . mark; }}
    map generation {{ type ifname : mark; }}
    set open {{ type ifname; }}
    set host4 {{ type mark . ipv4_addr . inet_service; flags timeout; }}
    set host6 {{ type mark . ipv6_addr . inet_service; flags timeout; }}
    set any4 {{ type mark . ipv4_addr; flags timeout; }}
    set any6 {{ type mark . ipv6_addr; flags timeout; }}
    set net4 {{ type ifname . ipv4_addr . inet_service; flags interval; }}
    set net6 {{ type ifname . ipv6_addr . inet_service; flags interval; }}
    set private4 {{ type ipv4_addr; flags interval; elements = {{
        0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 168.63.129.16, 169.254.0.0/16,
        172.16.0.0/12, 192.0.0.0/24, 192.168.0.0/16, 198.18.0.0/15, 224.0.0.0/3 }} }}
    set private6 {{ type ipv6_addr; flags interval; elements = {{
        ::/3, 2001::/32, 2002::/16, 4000::/2, 8000::/1 }} }}

    chain refuse {{
        log group {LOG_GROUP} snaplen 128
        meta l4proto tcp reject with tcp reset
        reject with icmpx admin-prohibited
    }}
    chain allow {{
        ct mark set meta mark
        accept
    }}
    chain judge {{
        iifname . ip saddr != @members4 meta nfproto ipv4 goto refuse
        iifname . ip6 saddr != @members6 meta nfproto ipv6 goto refuse
        meta mark set iifname map @generation
        meta mark . ip daddr . th dport @host4 goto allow
        meta mark . ip6 daddr . th dport @host6 goto allow
        meta mark . ip daddr @any4 goto allow
        meta mark . ip6 daddr @any6 goto allow
        iifname . ip daddr . th dport @net4 goto allow
        iifname . ip6 daddr . th dport @net6 goto allow
        iifname @open ip daddr != @private4 goto allow
        iifname @open ip6 daddr != @private6 goto allow
        goto refuse
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        ct state invalid drop
        oifname . ct mark @live ct direction reply accept
        iifname . ct mark @live ct state established accept
        iifname "{UPLINK}" drop
        oifname "{UPLINK}" goto judge
        goto refuse
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname lo accept
        iifname "{UPLINK}" ct state established,related accept
        iifname . ip saddr @members4 udp dport {DNS_PORT} limit rate over {DNS_RATE}/second drop
        iifname . ip saddr @members4 meta l4proto {{ tcp, udp }} th dport {DNS_PORT} accept
        iifname . ip6 saddr @members6 meta l4proto {{ tcp, udp }} th dport {DNS_PORT} accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname "{UPLINK}" drop
        goto refuse
    }}
    chain output {{
        type filter hook output priority filter; policy drop;
        oifname lo accept
        ct state established,related accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        meta l4proto {{ icmp, ipv6-icmp }} accept
        meta l4proto tcp tcp flags rst accept
    }}
    chain nat {{
        type nat hook postrouting priority srcnat;
        oifname "{UPLINK}" masquerade
    }}
}}
"""


@dataclass(frozen=True)
class Pin:
    """An address that a sandbox may reach for a while, because DNS said so."""

    generation: int
    address: Address
    port: int
    """0 means every port."""
    seconds: int


def add_member(interface: str, address4: Address, address6: Address) -> str:
    """A sandbox's interface and the only addresses that it may send from."""
    return (
        f'add element {TABLE} members4 {{ "{interface}" . {address4} }}\n'
        f'add element {TABLE} members6 {{ "{interface}" . {address6} }}\n'
    )


def remove_member(interface: str, address4: Address, address6: Address) -> str:
    return (
        f'delete element {TABLE} members4 {{ "{interface}" . {address4} }}\n'
        f'delete element {TABLE} members6 {{ "{interface}" . {address6} }}\n'
    )


def set_generation(interface: str, old: int, new: int) -> str:
    """Make ``new`` the only generation whose connections live; 0 stands for none."""
    lines = ""
    if old:
        lines += f'delete element {TABLE} live {{ "{interface}" . {old} }}\n'
        lines += f'delete element {TABLE} generation {{ "{interface}" }}\n'
    if new:
        lines += f'add element {TABLE} live {{ "{interface}" . {new} }}\n'
        lines += f'add element {TABLE} generation {{ "{interface}" : {new} }}\n'
    return lines


def network_elements(verb: str, interface: str, rules: Iterable[Rule]) -> str:
    """Add or delete the networks that a policy names."""
    lines = ""
    for rule in rules:
        if rule.network is None:
            continue
        ports = str(rule.port) if rule.port else "0-65535"
        lines += (
            f"{verb} element {TABLE} net{rule.network.version} "
            f'{{ "{interface}" . {rule.network} . {ports} }}\n'
        )
    return lines


def open_element(verb: str, interface: str) -> str:
    return f'{verb} element {TABLE} open {{ "{interface}" }}\n'


def pin_elements(pins: Iterable[Pin]) -> str:
    """Let sandboxes reach addresses; an element that is there already is renewed."""
    lines = ""
    for pin in pins:
        version = pin.address.version
        name, key = f"any{version}", f"{pin.generation} . {pin.address}"
        if pin.port:
            name, key = f"host{version}", f"{key} . {pin.port}"
        # The kernel refuses a changed time-out of an existing element, so it is made anew.
        lines += f"add element {TABLE} {name} {{ {key} timeout {pin.seconds}s }}\n"
        lines += f"delete element {TABLE} {name} {{ {key} }}\n"
        lines += f"add element {TABLE} {name} {{ {key} timeout {pin.seconds}s }}\n"
    return lines
