"""The host's side of the uplink: it forwards and translates what the router lets out.

k8e's own table only adds to what the host has. A packet must pass the chains of every table, so a
firewall that drops what is forwarded (Docker's does, and firewalld's) gets two rules of ours in its
own chain; they are marked, and removed with the uplink.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from k8e.egress.nftables import NftFailed, Nftables

log = logging.getLogger(__name__)

COMMENT = "k8e uplink"


def table_name(interface: str) -> str:
    return f"inet {interface}"


def host_table(interface: str) -> str:
    """Translation for what comes up, and nothing for what wants the host itself."""
    return f"""
table {table_name(interface)} {{
    chain nat {{
        type nat hook postrouting priority srcnat;
        iifname "{interface}" masquerade
    }}
    chain input {{
        type filter hook input priority filter - 10; policy accept;
        iifname "{interface}" ct state established,related accept
        iifname "{interface}" reject with icmpx admin-prohibited
    }}
    chain forward {{
        type filter hook forward priority filter - 10; policy accept;
        oifname "{interface}" ct state established,related accept
        oifname "{interface}" drop
    }}
}}
"""


def foreign_chains(listing: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Family, table and name of the filter chains that hook forwarded packets, k8e's left out."""
    found: list[tuple[str, str, str]] = []
    for item in listing.get("nftables", []):
        chain = item.get("chain")
        if not chain or chain.get("hook") != "forward" or chain.get("type") != "filter":
            continue
        if chain["family"] in ("ip", "ip6", "inet") and not chain["table"].startswith("k8e"):
            found.append((chain["family"], chain["table"], chain["name"]))
    return found


def pass_through(family: str, table: str, chain: str, interface: str) -> str:
    """Two rules at the head of a foreign chain."""
    where = f"{family} {table} {chain}"
    return (
        f'insert rule {where} iifname "{interface}" accept comment "{COMMENT}"\n'
        f'insert rule {where} oifname "{interface}" ct state established,related accept '
        f'comment "{COMMENT}"\n'
    )


def set_up(nft: Nftables, interface: str) -> None:
    """In the host's namespace: forward, translate, protect the host, pass other firewalls."""
    for file in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        path = Path("/proc/sys/net", file)
        if path.exists() and path.read_text("ascii").strip() == "0":
            log.info("switching forwarding on: %s", path)
            path.write_text("1", "ascii")
    name = table_name(interface)
    nft.run(f"add table {name}\ndelete table {name}\n{host_table(interface)}")
    for family, table, chain in foreign_chains(_list(nft)):
        try:
            nft.run(pass_through(family, table, chain, interface))
        except NftFailed as error:
            log.warning("the firewall %s %s may hold up sandboxes: %s", family, table, error)


def tear_down(nft: Nftables, interface: str) -> None:
    """Remove what :func:`set_up` added; forwarding stays, since others may rely on it by now."""
    name = table_name(interface)
    nft.run(f"add table {name}\ndelete table {name}\n")
    for family, table, chain in foreign_chains(_list(nft)):
        for handle in our_rules(_list(nft, f"list chain {family} {table} {chain}")):
            nft.run(f"delete rule {family} {table} {chain} handle {handle}")


def our_rules(listing: dict[str, Any]) -> list[int]:
    rules = (item.get("rule") for item in listing.get("nftables", []))
    return [rule["handle"] for rule in rules if rule and rule.get("comment") == COMMENT]


def _list(nft: Nftables, command: str = "list chains") -> dict[str, Any]:
    return json.loads(nft.run_json(command) or "{}")
