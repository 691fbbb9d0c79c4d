"""Routes to the pods of other nodes: what they should be, and the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from k8e.distro import basic_network
from k8e.distro.basic_network import Route

SET_ROUTES = (
    "import sys; from k8e.distro.basic_network import set_routes; "
    "print(sorted(set_routes({tuple(word.split(',')) for word in sys.argv[1:]})))"
)


def node(name: str, subnet: str, address: str) -> dict[str, Any]:
    addresses = [{"type": "InternalIP", "address": address}]
    return {
        "metadata": {"name": name},
        "spec": {"podCIDR": subnet},
        "status": {"addresses": addresses},
    }


def after(*changes: tuple[str, dict[str, Any]]) -> dict[str, Route]:
    wanted: dict[str, Route] = {}
    for change, item in changes:
        basic_network.note(wanted, change, item, own="one")
    return wanted


TWO = node("two", "10.42.1.0/24", "192.0.2.2")


def test_a_node_routes_to_the_pods_of_all_others_and_not_to_its_own() -> None:
    own = node("one", "10.42.0.0/24", "192.0.2.1")
    assert after(("ADDED", own), ("ADDED", TWO)) == {"two": ("10.42.1.0/24", "192.0.2.2")}


def test_a_node_with_another_address_gets_another_route() -> None:
    moved = node("two", "10.42.1.0/24", "192.0.2.9")
    assert after(("ADDED", TWO), ("MODIFIED", moved)) == {"two": ("10.42.1.0/24", "192.0.2.9")}


def test_a_node_that_was_deleted_gets_none() -> None:
    assert not after(("ADDED", TWO), ("DELETED", {"metadata": {"name": "two"}}))


@pytest.mark.parametrize("address", ["fd00::2", "nowhere", "192.0.2.2 dev eth0"])
def test_a_node_that_says_nonsense_of_itself_gets_none_and_others_do(address: str) -> None:
    wrong = node("three", "10.42.2.0/24", address)
    assert set(after(("ADDED", wrong), ("ADDED", TWO))) == {"two"}


def test_the_kernels_routes_become_those_that_are_wanted() -> None:
    """Those of nodes that are gone, also since before our start, are removed; others' stay."""
    if os.geteuid() != 0:
        pytest.skip("a network of its own needs root")
    script = (
        "ip link add v0 type veth peer v1 && ip link set v0 up && ip link set v1 up && "
        "ip address add 192.0.2.1/24 dev v0 && "
        "ip route add 10.42.7.0/24 via 192.0.2.7 proto 233 && "
        "ip route add 10.42.1.0/24 via 192.0.2.8 proto 233 && "
        "ip route add 10.99.0.0/24 via 192.0.2.9 && "
        '"$@" && ip route show'
    )
    wanted = ("10.42.1.0/24,192.0.2.2", "10.42.3.0/24,192.0.2.3")
    done = subprocess.run(
        ["unshare", "--net", "sh", "-ec", script, "sh", sys.executable, "-c", SET_ROUTES, *wanted],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    shown, *routes = done.stdout.splitlines()
    assert shown == "[('10.42.1.0/24', '192.0.2.2'), ('10.42.3.0/24', '192.0.2.3')]"
    assert sum("10.42.7.0/24" in route for route in routes) == 0
    assert sum(route.startswith("10.42.1.0/24 via 192.0.2.2 ") for route in routes) == 1
    assert sum(route.startswith("10.99.0.0/24 via 192.0.2.9 ") for route in routes) == 1
