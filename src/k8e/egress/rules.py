"""The rule set of the router, as text: one base for all sandboxes, and elements for each.

All sessions share a few sets, because the cost of a change grows with the number of sets and not
with their elements. Every policy that is bound gets a generation, a number that no other ever had.
A connection carries the generation that allowed it as its mark, and ``live`` holds each interface's
present one: so an expired DNS answer does not cut a download, and a tightened policy does.

Networks (see ``networks.py``) and what DNS opened are keyed by generation too; so both end with the
policy under which they came. What DNS opened is called a pin. It is one element, however many ports
it opens: it leads from a generation and an address to the number of a group of ports, and ``ports``
has the ports of each group (see ``pins.py``).
"""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from k8e.egress import networks, tproxy
from k8e.egress.elements import (
    Change,
    Element,
    add,
    delete,
    flush,
    of_address,
    of_interface,
    of_mark,
)
from k8e.egress.policy import PRIVATE, Address, Network, Policy
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
# Connections of one sandbox, also to the resolver and the proxy, and for as long as the kernel
# remembers them: nobody fills the router's table for the others.
MAX_FLOWS = 8192
_COUNTED = f"ct state new add @flows {{ iifname ct count over {MAX_FLOWS} }} goto refuse_more"
# What still comes in by a connection that ended with its policy: enough for its owner to answer,
# and so to be told.
END_RATE = "10/second burst 20 packets"
DNS_PORT = 53
DNS_RATE = "100/second burst 200 packets"  # questions of one sandbox; more are refused
# The group of all ports. Groups are above all generations: a packet's mark holds either of them.
ALL_PORTS = 1 << 31
# Sandboxes of earlier releases ask for the router; each question makes a neighbour that the kernel
# remembers, in one table for all namespaces.
DISCOVERY_RATE = "5/second burst 10 packets"
_NEAR = f"add @nearby {{ iifname ct count over {MAX_NEAR_FLOWS} }}"
_DISCOVERY = "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert }"


def _allowing(sandbox: str, address4: str, address6: str, port: str) -> str:
    """The rules that allow something: of what a sandbox sends, and of what answers it."""
    sends = sandbox == "iifname"
    allow, private, reply = ("allow", "refuse", "") if sends else ("allow_reply", "end", "_reply")
    lines = [
        f"meta mark set {sandbox} map @generation",
        f"meta mark set meta mark . {address4} map @pins4",
        f"meta mark set meta mark . {address6} map @pins6",
        f"meta mark {ALL_PORTS:#x} goto {allow}",
        f"meta l4proto {{ tcp, udp }} {sandbox} . meta mark . {port} @ports goto {allow}",
        f"meta mark set {sandbox} map @generation",  # where a group may be now
        f"{sandbox} @{networks.HERE} jump trusted_networks{reply}",
        f"{address4} @private4 goto {private}",
        f"{address6} @private6 goto {private}",
        f"{sandbox} @{networks.HERE} jump networks{reply}",
        f"{sandbox} @open goto {allow}",
    ]
    return "\n        ".join(lines)


def _network_chains() -> str:
    chains: list[str] = []
    for reply, side, direction in (("", "daddr", "dport"), ("_reply", "saddr", "sport")):
        words = (f"ip {side}", f"ip6 {side}"), f"th {direction}"
        for name, trust in (("trusted_networks", "trust"), ("networks", "")):
            made = networks.chain(name + reply, *words, trust=trust, then=f"allow{reply}")
            chains.append(made)
    return "\n    ".join(chains)


def _private(version: int) -> str:
    return ", ".join(str(network) for network in PRIVATE if network.version == version)


# ruff: noqa: S608 - nft's language, which has words in common with SQL
_BASE = f"""
table {TABLE} {{
    set members4 {{ type ifname . ipv4_addr; }}
    set members6 {{ type ifname . ipv6_addr; }}
    set live {{ type ifname . mark; }}
    map generation {{ type ifname : mark; }}
    set open {{ type ifname; }}
    map pins4 {{ type mark . ipv4_addr : mark; flags timeout; }}
    map pins6 {{ type mark . ipv6_addr : mark; flags timeout; }}
    set ports {{ type ifname . mark . inet_service; }}
    {networks.SETS}
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
        ct mark set iifname map @generation accept
    }}
    chain allow_reply {{
        ct mark set oifname map @generation accept
    }}
    {_network_chains()}
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
        {_COUNTED}
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
        {_COUNTED}
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


LAYOUT = f"layout_{zlib.crc32(_BASE.encode()):08x}"
"""An empty chain whose name tells by which rules a table was made."""
BASE = _BASE.replace("{\n", f"{{\n    chain {LAYOUT} {{ }}\n", 1)
OF_INTERFACES = (
    *("members4", "members6", "live", "generation", "open", "strict", "ports"),
    networks.HERE,
)
"""The sets whose keys begin with an interface."""
PINS = ("pins4", "pins6")
OF_HOST = ("own4", "own6")


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
    """Everything that the kernel holds for a sandbox, but for networks and what DNS opened."""
    if not bound.generation:
        return []
    here, mark = of_interface(interface), of_mark(bound.generation)
    elements = [
        Element("members4", here + of_address(address4)),
        Element("members6", here + of_address(address6)),
        Element("live", here + mark),
        Element("generation", here, data=mark),
    ]
    if any(rule.network is not None for rule in bound.policy.rules):
        elements.append(Element(networks.HERE, here))
    if bound.policy.open:
        elements.append(Element("open", here))
    if bound.policy.strict:
        elements.append(Element("strict", here))
    return elements


def network_elements(bound: Bound) -> list[Element]:
    """What the kernel holds for the networks that a policy names."""
    return networks.elements(bound.generation, bound.policy.rules) if bound.generation else []


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
