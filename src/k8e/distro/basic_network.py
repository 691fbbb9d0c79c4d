"""The network of ``--cni=basic``: links and addresses by CNI plugins, routes between nodes by us.

It has no policies: every pod reaches every other. Nodes must be on one network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import subprocess
from pathlib import Path

from k8e.distro import kernel_settings, node
from k8e.distro.node import Node
from k8e.kubernetes.api import Api, Object, entries

log = logging.getLogger(__name__)

WARNING = (
    "the basic network enforces no NetworkPolicy: every pod reaches every other, and the world"
)
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_POD_SECONDS = 120.0
ROUTE_PROTOCOL = "233"
"""Marks routes as ours (a number that nobody else uses), so that they can be removed."""


async def run(found: Node, api: Api, *, nodes: Api) -> None:
    """Configure this node, and keep the routes to the others right.

    Args:
        found: this node.
        api: its own access, which shows it nothing but itself.
        nodes: an access that may follow all nodes.
    """
    own = await api.wait_until(
        "/api/v1/nodes",
        lambda item: bool(item["spec"].get("podCIDR")),
        seconds=_POD_SECONDS,
        fieldSelector=f"metadata.name={found.name}",
    )
    await asyncio.to_thread(_configure, found, str(own["spec"]["podCIDR"]))
    routes: dict[str, str] = {}
    async with contextlib.aclosing(nodes.follow("/api/v1/nodes")) as changes:
        async for change, item in changes:
            if change != "SYNCED" and item["metadata"]["name"] != found.name:
                await asyncio.to_thread(_route, change, item, routes)


def _configure(found: Node, subnet: str) -> None:
    kernel_settings.change(found.layout, {_FORWARDING: "1"})
    node.load_rules(node.masquerade_rules(found.cluster_cidr))
    node.write_basic_network(found, subnet, _mtu())


def _mtu() -> int:
    """Of the link to the world; what is larger would have to be cut there."""
    told = subprocess.run(
        ["ip", "route", "get", "198.51.100.1"], capture_output=True, check=False, timeout=10
    )
    name = re.search(rb"dev (\S+)", told.stdout)
    with contextlib.suppress(OSError, ValueError):
        if name:
            return int(Path(f"/sys/class/net/{name[1].decode()}/mtu").read_text("ascii"))
    return 1500


def _route(change: str, item: Object, routes: dict[str, str]) -> None:
    name, subnet = item["metadata"]["name"], str(item["spec"].get("podCIDR") or "")
    if change == "DELETED":
        gone = routes.pop(name, "")
        if gone:
            _ip("route", "del", gone, "proto", ROUTE_PROTOCOL)
        return
    address = _internal_address(item)
    if not subnet or not address or routes.get(name) == subnet:
        return
    network, gateway = ipaddress.IPv4Network(subnet), ipaddress.IPv4Address(address)
    _ip("route", "replace", str(network), "via", str(gateway), "proto", ROUTE_PROTOCOL)
    routes[name] = subnet


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False, timeout=10)
    if done.returncode:
        log.warning("ip %s: %s", " ".join(arguments), done.stderr.decode("utf-8", "replace"))


def _internal_address(item: Object) -> str:
    for address in entries(item, "status", "addresses"):
        if address["type"] == "InternalIP":
            return str(address["address"])
    return ""
