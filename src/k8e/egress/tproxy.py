"""How the router diverts TCP of strict sandboxes to the proxy: parts of its rules, and routing.

The kernel hands a diverted packet to a listener of ours as if it were addressed to this machine. No
packet of a strict sandbox is ever forwarded as it came: where nobody listens, it is refused. A mark
on the packet tells routing and the input chain that it was diverted. Packets lose their marks on
the way from one network namespace to another, so nobody in a sandbox can set it.

A connection that was diverted keeps that in its own mark. So it still belongs to the proxy after
its sandbox ceased to be strict; the proxy judges it anew.

The parts belong into the table of :mod:`k8e.egress.rules` and use its ``members4``, ``members6``
(who may send from which address), ``own4``, ``own6`` (addresses of the host), ``near4``, ``near6``
(networks of its neighbours) and chain ``refuse``.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from k8e.egress.netlink import EVERYWHERE, Netlink

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

SETS = """
    set strict { type ifname; }
    set connecting { type ifname; size 65536; flags dynamic, timeout; timeout 1m; }
"""
INPUT = f"meta mark {PROXY_MARK:#x} meta l4proto tcp accept"
OUTPUT = f"meta mark {UPSTREAM_MARK:#x} meta l4proto tcp accept"


def chain(dns: str, *, uplink: str = "up") -> str:
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
"""  # noqa: S608 - these are rules of nftables, not SQL


def set_up_routing(netlink: Netlink) -> None:
    """Make diverted packets ours, whatever their address, and bound what the proxy buffers.

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
