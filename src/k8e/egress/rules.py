"""The rule set of the router, as text: one base for all sandboxes, and elements for each.

All sessions share a few sets, because the cost of a change grows with the number of sets and not
with their elements. Every policy that is bound gets a generation, a number that no other ever had.
A connection carries the generation that allowed it as its mark, and ``live`` holds each interface's
present one: so an expired DNS answer does not cut a download, and a tightened policy does.

Networks (see ``networks.py``) and what DNS opened are keyed by generation too; so both end with the
policy under which they came. What DNS opened is called a pin. It is one element, however many ports
it opens: it leads from a generation and an address to the number of a group of ports, and ``ports``
has the ports of each group (see ``pins.py``).

The kernel hands a diverted packet to a listener of ours as if it were addressed to this machine. No
packet of a strict sandbox is ever forwarded as it came: without a listener, it is refused. A mark
on the packet tells routing and the input chain that it was diverted. Packets lose their marks on
the way from one network namespace to another, so no program in a sandbox can set it.

A connection that was diverted keeps that in its own mark. So it still belongs to the proxy after
its sandbox ceased to be strict; the proxy judges it again.

The parts belong into the table of :mod:`k8e.egress.rules` and use its ``members4``, ``members6``
(who may send from which address), ``own4``, ``own6`` (addresses of the host), ``near4``, ``near6``
(networks of its neighbours) and chain ``refuse``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from k8e.egress import networks
from k8e.egress.netlink import EVERYWHERE, Netlink
from k8e.egress.nftables import (
    Element,
    ElementChange,
    add,
    delete,
    flush,
    of_address,
    of_interface,
    of_mark,
)
from k8e.egress.policy import PRIVATE, Address, Network, Policy
from k8e.model import DNS_ADDRESS

# Far away from the generations of policies, which are marks too.
PROXY_MARK = 0x6B386501
UPSTREAM_MARK = 0x6B386502
PROXY_PORT = 17380
ROUTING_TABLE = 107
ROUTING_PRIORITY = 107
# New connections of one sandbox that the proxy has to look at; more are refused.
MAX_NEAR = 256  # connections of all of them together to neighbours of the host
CONNECTION_RATE = "200/second burst 400 packets"

# Buffers of the proxy's sockets: least, first, most. They are memory of the host, and a sandbox can
# have hundreds of connections, so they grow less than usual.
_BUFFERS = {"tcp_rmem": "4096 131072 2097152", "tcp_wmem": "4096 65536 1048576"}

TPROXY_SETS = """
    set strict { type ifname; }
    set connecting { type ifname; size 65536; flags dynamic, timeout; timeout 1m; }
"""
TPROXY_INPUT = f"meta mark {PROXY_MARK:#x} meta l4proto tcp accept"
TPROXY_OUTPUT = f"meta mark {UPSTREAM_MARK:#x} meta l4proto tcp accept"


def tproxy_chain(dns: str, *, uplink: str = "up") -> str:
    """The chains that divert all but questions to the resolver at ``dns``, and guard the dialling.

    What the proxy dials leaves by ``uplink`` and never reaches the host itself, whatever a policy
    says.
    """
    return f"""
    chain divert {{
        type filter hook prerouting priority mangle; policy accept;
        iifname "{uplink}" accept comment "most packets of a download"
        meta mark {PROXY_MARK:#x} meta mark set 0
        meta l4proto != tcp accept
        ct mark {PROXY_MARK:#x} ct direction original goto diverted
        iifname @strict goto strictly
    }}
    chain strictly {{
        iifname . ip saddr != @members4 meta nfproto ipv4 goto refuse
        iifname . ip6 saddr != @members6 meta nfproto ipv6 goto refuse
        ip daddr {dns} tcp dport 53 accept
        tcp flags & (syn | ack) == syn \
update @connecting {{ iifname limit rate over {CONNECTION_RATE} }} goto refuse
        goto diverted
    }}
    chain diverted {{
        ct mark set {PROXY_MARK:#x}
        meta nfproto ipv4 meta l4proto tcp \
tproxy ip to :{PROXY_PORT} meta mark set {PROXY_MARK:#x} accept
        meta nfproto ipv6 meta l4proto tcp \
tproxy ip6 to :{PROXY_PORT} meta mark set {PROXY_MARK:#x} accept
        goto refuse
    }}
    chain dialling {{
        type filter hook output priority filter - 1; policy accept;
        meta mark {UPSTREAM_MARK:#x} goto dialled
    }}
    chain dialled {{
        oifname != "{uplink}" reject with icmpx admin-prohibited
        ip daddr @near4 ct state new ct count over {MAX_NEAR} reject with icmpx admin-prohibited
        ip6 daddr @near6 ct state new ct count over {MAX_NEAR} reject with icmpx admin-prohibited
        ip daddr @own4 reject with icmpx admin-prohibited
        ip6 daddr @own6 reject with icmpx admin-prohibited
    }}
"""


def set_up_routing(netlink: Netlink) -> None:
    """Route diverted packets of any address to this machine, and bound the proxy's buffers.

    For the router's namespace, with ``lo`` up; works twice.
    """
    for name, sizes in _BUFFERS.items():
        with contextlib.suppress(OSError):  # an old kernel has these only once for all namespaces
            Path("/proc/sys/net/ipv4", name).write_text(sizes, "ascii")
    for family, network in zip((socket.AF_INET, socket.AF_INET6), EVERYWHERE, strict=True):
        try:
            netlink.add_local_default(network, ROUTING_TABLE)
        except OSError:
            if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
                continue  # a kernel without IPv6
            raise
        netlink.add_mark_rule(family, PROXY_MARK, ROUTING_TABLE, priority=ROUTING_PRIORITY)


# The addresses of all sandboxes: a range set aside for network benchmarks, which is not routed, and
# one of our own.
SLOTS: tuple[Network, Network] = (
    ipaddress.ip_network("198.18.0.0/16"),
    ipaddress.ip_network("fd6b:3865:0:1::/112"),
)
TABLE = "inet k8e"
UPLINK = "up"
LOG_GROUP = 5
LOG_BYTES = 128  # of a refused packet: its headers
LOG_RATE = "20/second burst 40 packets"  # per sandbox; further refusals are not logged
TOO_MANY = "many"
CROWDED = "crowd"
# Connections of one sandbox to neighbours of the host, whom policies may allow: the kernel asks for
# each of them, remembers a thousand, and then refuses new ones to every program.
MAX_NEAR_FLOWS = 64
# Connections of one sandbox, also to the resolver and the proxy, for as long as the kernel
# remembers them: no sandbox can fill the router's table for the others.
MAX_FLOWS = 8192
# All of them together leave a quarter of the kernel's table to the rest of the machine, whose
# connections by the uplink are ours. A share of it is set apart, so that each sandbox has some
# connections even if others have thousands; those beyond are counted together, in parts by their
# source port, because the kernel walks through all that one count has.
PLACES = 65_536
"""Places in the kernel's table of connections, where it does not say how many there are."""
SURE_FLOWS = 256
SHARERS = 256
"""Sandboxes for whom sure connections are set apart; a small table has fewer for each."""
_LAYOUT = "layout_"
_PARTS, _PART = 64, "th sport & 126"  # kernels choose even ports first
_COUNTED = f"""ct state new add @flows {{ iifname ct count over {MAX_FLOWS} }} goto refuse_more
        ct state new add @sure {{ iifname ct count over $SURE }} jump crowded"""
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
    """The rules that allow packets: those that a sandbox sends, and the answers."""
    sends = sandbox == "iifname"
    allow, private, reply = ("allow", "refuse", "") if sends else ("allow_reply", "end", "_reply")
    lines = [
        f"meta mark set {sandbox} map @generation",
        f"meta mark set meta mark . {address4} map @pins4",
        f"meta mark set meta mark . {address6} map @pins6",
        f"meta mark {ALL_PORTS:#x} goto {allow}",
        f"meta l4proto {{ tcp, udp }} {sandbox} . meta mark . {port} @ports goto {allow}",
        f"meta mark set {sandbox} map @generation",  # where a group may be now
        f"ct state established jump past{reply}",
        f"{sandbox} @{networks.HERE} jump trusted_networks{reply}",
        f"{address4} @private4 goto {private}",
        f"{address6} @private6 goto {private}",
        f"{sandbox} @{networks.HERE} jump networks{reply}",
        f"{sandbox} @open goto {allow}",
    ]
    return "\n        ".join(lines)


def _past_chains() -> str:
    """The rules for open connections of the policy before."""
    chains: list[str] = []
    for reply, side, here, port in (
        ("", "daddr", "iifname", "th dport"),
        ("_reply", "saddr", "oifname", "th sport"),
    ):
        lines = [
            f"meta mark set meta mark . ip {side} map @past4",
            f"meta mark set meta mark . ip6 {side} map @past6",
            f"meta mark {ALL_PORTS:#x} goto allow{reply}",
            f"meta l4proto {{ tcp, udp }} {here} . meta mark . {port} @ports goto allow{reply}",
            f"meta mark set {here} map @generation",
        ]
        chains.append(f"chain past{reply} {{\n        " + "\n        ".join(lines) + "\n    }")
    return "\n    ".join(chains)


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
    map past4 {{ type mark . ipv4_addr : mark; flags timeout; }}
    map past6 {{ type mark . ipv6_addr : mark; flags timeout; }}
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
    set sure {{ type ifname; size 65536; flags dynamic; }}
    set crowd {{ type inet_service; size {_PARTS}; flags dynamic; }}
    set discovery {{ type ifname; size 65536; flags dynamic, timeout; timeout 1m; }}
    set asking {{ type ifname; size 65536; flags dynamic, timeout; timeout 1m; }}
    {TPROXY_SETS}

    chain refuse_more {{
        update @logged {{ iifname limit rate {LOG_RATE} }} \
log prefix "{TOO_MANY}" group {LOG_GROUP} snaplen {LOG_BYTES} queue-threshold 1
        meta l4proto tcp reject with tcp reset
        reject with icmpx port-unreachable
    }}
    chain crowded {{
        add @crowd {{ {_PART} ct count over $PART }} goto refuse_crowd
    }}
    chain refuse_crowd {{
        update @logged {{ iifname limit rate {LOG_RATE} }} \
log prefix "{CROWDED}" group {LOG_GROUP} snaplen {LOG_BYTES} queue-threshold 1
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
    {_past_chains()}
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
    {tproxy_chain(DNS_ADDRESS, uplink=UPLINK)}
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
        {TPROXY_INPUT}
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
        {TPROXY_OUTPUT}
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


def flow_shares(places: int) -> tuple[int, int]:
    """The sure connections of each sandbox, and the shared ones in each part beyond."""
    return max(1, min(SURE_FLOWS, places * 3 // 8 // SHARERS)), max(1, places * 3 // 8 // _PARTS)


def base(places: int = PLACES) -> str:
    """The table without elements, for a kernel that tracks so many connections."""
    sure, part = flow_shares(places)
    text = _BASE.replace("$SURE", str(sure)).replace("$PART", str(part))
    return text.replace("{\n", f"{{\n    chain {_LAYOUT}{zlib.crc32(text.encode()):08x} {{ }}\n", 1)


def layout(table: str) -> str:
    """The name of the empty chain that identifies the rules by which a table was made."""
    at = table.index(_LAYOUT)
    return table[at : at + len(_LAYOUT) + 8]


OF_INTERFACES = (
    *("members4", "members6", "live", "generation", "open", "strict", "ports"),
    networks.HERE,
)
"""The sets whose keys begin with an interface."""
PINS = ("pins4", "pins6")
PAST = ("past4", "past6")
"""What a policy took over from the one before, for connections that were open then."""
OF_HOST = ("own4", "own6")


@dataclass(frozen=True)
class BoundPolicy:
    """A policy and the generation under which it was bound; 0 for one that allows nothing."""

    policy: Policy = field(default_factory=Policy)
    generation: int = 0


def change(
    interface: str, address4: Address, address6: Address, old: BoundPolicy, new: BoundPolicy
) -> list[ElementChange]:
    """Replace what is bound to a sandbox's interface, as one transaction."""
    gone = _bound_elements(interface, address4, address6, old)
    made = _bound_elements(interface, address4, address6, new)
    return [*map(delete, gone), *map(add, made)]


def _bound_elements(
    interface: str, address4: Address, address6: Address, bound: BoundPolicy
) -> list[Element]:
    """The kernel's elements for a sandbox, except networks and pins."""
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


def network_elements(bound: BoundPolicy) -> list[Element]:
    """The kernel's elements for the networks of a policy."""
    return networks.elements(bound.generation, bound.policy.rules) if bound.generation else []


def own_changes(addresses: Iterable[Address]) -> list[ElementChange]:
    """Declare the host's own addresses: out of reach, whatever a policy says."""
    found = [Element(f"own{item.version}", of_address(item)) for item in dict.fromkeys(addresses)]
    return [flush("own4"), flush("own6"), *map(add, found)]


def near_commands(networks: Iterable[Network]) -> str:
    """Commands that declare the networks in which the host has neighbours."""
    lines: list[str] = []
    for version in (4, 6):
        name = f"{TABLE} near{version}"
        found = ", ".join(str(network) for network in networks if network.version == version)
        lines += [f"flush set {name}", *([f"add element {name} {{ {found} }}"] if found else [])]
    return "\n".join(lines)
