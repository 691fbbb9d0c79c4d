"""The rule set of the router, as text: one base for all sandboxes, and elements for each.

All sessions share a few sets, because the cost of a change grows with the number of sets and not
with their elements. Every policy that is bound gets a generation, a number that no other ever had.
A connection carries the generation that allowed it as its mark, and ``live`` holds each interface's
present one: so an expired DNS answer does not cut a download, and a tightened policy does. What DNS
opened is keyed by generation too, and so ends with the policy under which it was asked.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from k8e.egress import tproxy
from k8e.egress.elements import (
    Change,
    Element,
    add,
    delete,
    flush,
    of_address,
    of_interface,
    of_mark,
    of_network,
    of_port,
    renewed,
)
from k8e.egress.policy import PRIVATE, Address, Network, Policy, Rule
from k8e.model import DNS_ADDRESS

# Where all sandboxes have their addresses: a range set aside for measurements of networks, which
# nobody routes, and one of our own.
SLOTS: tuple[Network, Network] = (
    ipaddress.ip_network("198.18.0.0/16"),
    ipaddress.ip_network("fd6b:3865:0:1::/112"),
)
TABLE = "inet k8e"
UPLINK = "up"
LOG_GROUP = 5
LOG_BYTES = 128  # of a refused packet: its headers
LOG_RATE = "20/second burst 40 packets"  # per sandbox; more is refused without being told
TOO_MANY = "many"
# Connections of one sandbox to neighbours of the host, whom policies may allow: the kernel asks for
# each of them, remembers a thousand, and refuses more to everybody.
MAX_NEAR_FLOWS = 64
MAX_FLOWS = 8192  # connections of one sandbox: nobody fills the router's table for the others
# What still comes in by a connection that ended with its policy: enough for its owner to answer,
# and so to be told.
END_RATE = "10/second burst 20 packets"
DNS_PORT = 53
DNS_RATE = "100/second burst 200 packets"  # questions of one sandbox; more are refused
# Sandboxes of earlier releases ask for the router; each question makes a neighbour that the kernel
# remembers, in one table for all namespaces.
DISCOVERY_RATE = "5/second burst 10 packets"
_NEAR = f"add @nearby {{ iifname ct count over {MAX_NEAR_FLOWS} }}"
_DISCOVERY = "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert }"


def _allowing(sandbox: str, address4: str, address6: str, port: str) -> str:
    """The rules that allow something: of what a sandbox sends, and of what answers it."""
    lines = [f"meta mark set {sandbox} map @generation"]
    for version, address in ((4, address4), (6, address6)):
        private = "goto refuse" if sandbox == "iifname" else "goto end"
        lines += [
            f"meta mark . {address} . {port} @host{version} goto allow",
            f"meta mark . {address} @any{version} goto allow",
            f"{sandbox} . {address} @trustnet{version} goto allow",
            f"{sandbox} . {address} . {port} @trustport{version} goto allow",
            f"{address} @private{version} {private}",
            f"{sandbox} . {address} @net{version} goto allow",
            f"{sandbox} . {address} . {port} @port{version} goto allow",
        ]
    lines.append(f"{sandbox} @open goto allow")
    return "\n        ".join(lines)


def _private(version: int) -> str:
    return ", ".join(str(network) for network in PRIVATE if network.version == version)


# ruff: noqa: S608 - nft's language, which has words in common with SQL
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
    set trustnet4 {{ type ifname . ipv4_addr; flags interval; }}
    set trustnet6 {{ type ifname . ipv6_addr; flags interval; }}
    set trustport4 {{ type ifname . ipv4_addr . inet_service; flags interval; }}
    set trustport6 {{ type ifname . ipv6_addr . inet_service; flags interval; }}
    set net4 {{ type ifname . ipv4_addr; flags interval; }}
    set net6 {{ type ifname . ipv6_addr; flags interval; }}
    set port4 {{ type ifname . ipv4_addr . inet_service; flags interval; }}
    set port6 {{ type ifname . ipv6_addr . inet_service; flags interval; }}
    set own4 {{ type ipv4_addr; }}
    set own6 {{ type ipv6_addr; }}
    set private4 {{ type ipv4_addr; flags interval; elements = {{ {_private(4)} }} }}
    set private6 {{ type ipv6_addr; flags interval; elements = {{ {_private(6)} }} }}
    set logged {{ type ifname; size 65536; flags dynamic, timeout; timeout 1m; }}
    set ending {{ type ifname; size 65536; flags dynamic, timeout; timeout 1m; }}
    set near4 {{ type ipv4_addr; flags interval; auto-merge; }}
    set near6 {{ type ipv6_addr; flags interval; auto-merge; }}
    set nearby {{ type ifname; size 65536; flags dynamic; }}
    set flows {{ type ifname; size 65536; flags dynamic; }}
    set discovery {{ type ifname; size 65536; flags dynamic, timeout; timeout 1m; }}
    set asking {{ type ifname; size 65536; flags dynamic, timeout; timeout 1m; }}
    {tproxy.SETS}

    chain refuse_more {{
        update @logged {{ iifname limit rate {LOG_RATE} }} \
log prefix "{TOO_MANY}" group {LOG_GROUP} snaplen {LOG_BYTES} queue-threshold 1
        meta l4proto tcp reject with tcp reset
        reject with icmpx port-unreachable
    }}
    chain refuse {{
        update @logged {{ iifname limit rate {LOG_RATE} }} \
log group {LOG_GROUP} snaplen {LOG_BYTES} queue-threshold 1
        meta l4proto tcp reject with tcp reset
        meta l4proto udp reject with icmpx port-unreachable
        reject with icmpx admin-prohibited
    }}
    chain allow {{
        ct mark set meta mark
        accept
    }}
    chain arrive {{
        type filter hook prerouting priority mangle - 10; policy accept;
        iifname {{ "lo", "{UPLINK}" }} accept
        {_DISCOVERY} update @discovery {{ iifname limit rate {DISCOVERY_RATE} }} accept
        {_DISCOVERY} drop
        ip daddr {SLOTS[0]} goto refuse comment "also of who is gone: routing drops it silently"
        ip6 daddr {SLOTS[1]} goto refuse
        iifname . ip saddr @members4 accept
        iifname . ip6 saddr @members6 accept
        meta l4proto ipv6-icmp ip6 daddr ff02::/16 drop comment "what every IPv6 stack says"
        fib saddr . iif oif 0 drop comment "a refusal would go to somebody else"
        goto refuse
    }}
    chain judge {{
        ip daddr @own4 goto refuse
        ip6 daddr @own6 goto refuse
        ip daddr @near4 ct state new {_NEAR} goto refuse_more
        ip6 daddr @near6 ct state new {_NEAR} goto refuse_more
        ct state new add @flows {{ iifname ct count over {MAX_FLOWS} }} goto refuse_more
        {_allowing("iifname", "ip daddr", "ip6 daddr", "th dport")}
        goto refuse
    }}
    chain judge_reply {{
        {_allowing("oifname", "ip saddr", "ip6 saddr", "th sport")}
        goto end
    }}
    chain end {{
        meta l4proto tcp update @ending {{ oifname limit rate {END_RATE} }} accept
        drop
    }}
    {tproxy.chain(DNS_ADDRESS, uplink=UPLINK)}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        oifname . ct mark @live ct direction reply accept
        iifname . ct mark @live ct state established accept
        ct state invalid drop
        iifname "{UPLINK}" oifname "{UPLINK}" drop comment "nothing turns round here"
        iifname "{UPLINK}" ct direction reply ct state established,related goto judge_reply
        iifname "{UPLINK}" drop
        oifname "{UPLINK}" goto judge
        goto refuse
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname lo accept
        iifname "{UPLINK}" ct state established,related accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname "{UPLINK}" drop
        {tproxy.INPUT}
        ip daddr {DNS_ADDRESS} iifname . ip saddr @members4 goto ask
        goto refuse
    }}
    chain ask {{
        udp dport {DNS_PORT} \
update @asking {{ iifname limit rate over {DNS_RATE} }} goto refuse_more
        tcp dport {DNS_PORT} tcp flags & (syn | ack) == syn \
update @asking {{ iifname limit rate over {DNS_RATE} }} goto refuse_more
        meta l4proto {{ tcp, udp }} th dport {DNS_PORT} accept
        goto refuse
    }}
    chain output {{
        type filter hook output priority filter; policy drop;
        oifname lo accept
        ct state established accept
        {tproxy.OUTPUT}
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        oifname "{UPLINK}" drop comment "no refusal leaves the router, whoever it is for"
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


@dataclass(frozen=True)
class Bound:
    """A policy and the generation under which it was bound; 0 for one that allows nothing."""

    policy: Policy = field(default_factory=Policy)
    generation: int = 0


def change(
    interface: str, address4: Address, address6: Address, old: Bound, new: Bound
) -> list[Change]:
    """Replace what is bound to a sandbox's interface, as one transaction."""
    gone = _bound_elements(interface, address4, address6, old)
    made = _bound_elements(interface, address4, address6, new)
    return [*map(delete, gone), *map(add, made)]


def _bound_elements(
    interface: str, address4: Address, address6: Address, bound: Bound
) -> list[Element]:
    """Everything that the kernel holds for a sandbox, but for what DNS opened."""
    if not bound.generation:
        return []
    here, mark = of_interface(interface), of_mark(bound.generation)
    elements = [
        Element("members4", here + of_address(address4)),
        Element("members6", here + of_address(address6)),
        Element("live", here + mark),
        Element("generation", here, data=mark),
        *_networks(here, bound.policy.rules, trusted=False),
        *_networks(here, bound.policy.rules, trusted=True),
    ]
    if bound.policy.open:
        elements.append(Element("open", here))
    if bound.policy.strict:
        elements.append(Element("strict", here))
    return elements


def _networks(here: bytes, rules: Iterable[Rule], *, trusted: bool) -> list[Element]:
    """The networks that a policy names; one that lies in another is left to that one."""
    found = {
        (rule.network, rule.port)
        for rule in rules
        if rule.network is not None and rule.trusted == trusted
    }
    kept: list[Element] = []
    for network, port in found:
        if any(_covers(outer, (network, port)) for outer in found):
            continue
        kind, ports = ("port", of_port(port)) if port else ("net", b"")
        name = f"{'trust' if trusted else ''}{kind}{network.version}"
        first, last = of_network(network)
        kept.append(Element(name, here + first + ports, here + last + ports))
    return kept


def _covers(outer: tuple[Network, int], inner: tuple[Network, int]) -> bool:
    """Whether ``inner`` adds nothing: the intervals of a set must not overlap."""
    if outer == inner or outer[0].version != inner[0].version or outer[1] not in (0, inner[1]):
        return False
    return inner[0].network_address in outer[0] and inner[0].prefixlen >= outer[0].prefixlen


def pin_changes(pins: Iterable[Pin]) -> list[Change]:
    """Let sandboxes reach addresses; what is open already stays so for as long again."""
    elements: list[Element] = []
    for pin in pins:
        name, key = "any", of_mark(pin.generation) + of_address(pin.address)
        if pin.port:
            name, key = "host", key + of_port(pin.port)
        elements.append(Element(f"{name}{pin.address.version}", key, seconds=pin.seconds))
    return renewed(elements)


def own_changes(addresses: Iterable[Address]) -> list[Change]:
    """What the host itself is called: out of reach, whatever a policy says."""
    found = [Element(f"own{item.version}", of_address(item)) for item in dict.fromkeys(addresses)]
    return [flush("own4"), flush("own6"), *map(add, found)]


def near_commands(networks: Iterable[Network]) -> str:
    """Commands that say which networks the host has neighbours in."""
    lines: list[str] = []
    for version in (4, 6):
        name = f"{TABLE} near{version}"
        found = ", ".join(str(network) for network in networks if network.version == version)
        lines += [f"flush set {name}", *([f"add element {name} {{ {found} }}"] if found else [])]
    return "\n".join(lines)
