"""The network of ``--cni=basic``: links and addresses by CNI plugins, routes between nodes by us.

It has no policies: every pod reaches every other. Nodes must be on one network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
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
    wanted: dict[str, Route] = {}
    there: set[Route] | None = None
    async with contextlib.aclosing(nodes.follow("/api/v1/nodes")) as changes:
        async for change, item in changes:
            if change != "SYNCED":
                note(wanted, change, item, own=found.name)
            # Not before all nodes were told: routes of the others would be taken for old ones.
            if change == "SYNCED" or there not in (None, set(wanted.values())):
                there = await asyncio.to_thread(set_routes, set(wanted.values()))


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


Route = tuple[str, str]
"""The network of a node's pods, and the address of the node."""


def note(wanted: dict[str, Route], change: str, item: Object, *, own: str) -> None:
    """Bring the routes that this node needs up to date with one change of the cluster's nodes."""
    name = str(item["metadata"]["name"])
    if name == own:
        return
    if change == "DELETED":
        wanted.pop(name, None)
        return
    subnet, address = str(item["spec"].get("podCIDR") or ""), _internal_address(item)
    if not subnet or not address:
        return
    try:  # a node says itself what its address is
        route = str(ipaddress.IPv4Network(subnet)), str(ipaddress.IPv4Address(address))
    except ValueError as error:
        log.warning("node %s gets no route: %s", name, error)
        wanted.pop(name, None)
        return
    wanted[name] = route


def set_routes(wanted: set[Route]) -> set[Route]:
    """Make the kernel's routes of ours those that are wanted; which there are then."""
    there = _routes()
    networks = {network for network, _ in wanted}
    for network, _ in there - wanted:
        if network not in networks:  # else it is replaced
            _ip("route", "del", network, "proto", ROUTE_PROTOCOL)
    for network, gateway in wanted - there:
        _ip("route", "replace", network, "via", gateway, "proto", ROUTE_PROTOCOL)
    return _routes() if wanted != there else there


def _routes() -> set[Route]:
    said = _ip("-json", "route", "show", "proto", ROUTE_PROTOCOL)
    found: list[dict[str, str]] = json.loads(said or b"[]")
    return {(item["dst"], item.get("gateway", "")) for item in found}


def _ip(*arguments: str) -> bytes:
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False, timeout=10)
    if done.returncode:
        log.warning("ip %s: %s", " ".join(arguments), done.stderr.decode("utf-8", "replace"))
    return done.stdout


def _internal_address(item: Object) -> str:
    for address in entries(item, "status", "addresses"):
        if address["type"] == "InternalIP":
            return str(address["address"])
    return ""
