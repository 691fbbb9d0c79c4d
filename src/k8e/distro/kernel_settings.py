"""Kernel settings that components change: recorded before, and restored by uninstall."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from k8e import errors
from k8e.distro.layout import Layout, write_private

_SYS = Path("/proc/sys")
WATCHED = tuple(
    _SYS / name
    for name in (
        # kubelet's
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "kernel/panic",
        "kernel/panic_on_oops",
        "kernel/keys/root_maxkeys",
        "kernel/keys/root_maxbytes",
        # kube-proxy's, Cilium's and our own
        "net/ipv4/ip_forward",
        "net/ipv4/vs/conntrack",
        "net/ipv4/conf/all/rp_filter",
        "net/ipv4/conf/all/forwarding",
        "net/ipv4/conf/all/accept_local",
        "net/ipv4/conf/all/route_localnet",
        "net/ipv4/conf/default/rp_filter",
        "net/ipv4/fib_multipath_use_neigh",
        "net/ipv6/conf/all/forwarding",
        "net/ipv6/conf/all/disable_ipv6",
        "net/core/bpf_jit_enable",
        "net/core/default_qdisc",
        "net/core/fb_tunnels_only_for_init_net",
        "kernel/unprivileged_bpf_disabled",
        "kernel/timer_migration",
        "net/netfilter/nf_conntrack_max",
        "net/netfilter/nf_conntrack_tcp_timeout_established",
        "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
    )
)


def remember(layout: Layout) -> None:
    """Record all settings once: the first start finds them as the machine had them."""
    if not layout.before.exists():
        found = {str(path): value for path in WATCHED if (value := _read(path)) is not None}
        write_private(layout.before, json.dumps(found))


def change(layout: Layout, wanted: Mapping[Path, str]) -> None:
    remember(layout)
    for path, value in wanted.items():
        if _read(path) != value:
            path.write_text(value, "ascii")


def restore(layout: Layout) -> None:
    """Restore all settings as they were before the first start."""
    try:
        found = json.loads(layout.before.read_bytes())
    except errors.UNREADABLE:
        return
    for name, value in found.items():
        path = Path(name)
        if path in WATCHED and _read(path) not in (None, value):
            with contextlib.suppress(OSError):
                path.write_text(str(value), "ascii")


def _read(path: Path) -> str | None:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
