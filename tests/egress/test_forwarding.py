"""The host stays what it was: Docker goes on, and what was no router does not become one."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from k8e.egress import forwarding, uplink
from tests.egress import hosts
from tests.egress.hosts import (
    BRIEFLY,
    HOST,
    HOST6,
    LAN,
    LAN6,
    WEB,
    WEB6,
    Connected,
    Host,
    start_docker,
)

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def test_docker_and_the_host_itself_go_on_as_before(docker: Host) -> None:
    with docker.machine.open(WEB) as own, docker.container.open(WEB) as contained:
        for _ in range(2):
            with Connected(docker):
                assert hosts.echoes(own)
                assert hosts.echoes(contained)
                assert docker.machine.reach(WEB6) == f"internet {HOST6}"
                assert docker.container.reach(WEB) == f"internet {HOST}"
                assert docker.neighbour.reach(LAN, 8080).startswith("container")
                assert docker.neighbour.reach(LAN).startswith("host")
                assert docker.router.reach(WEB) == f"internet {HOST}"
            assert hosts.echoes(own)
            assert hosts.echoes(contained)
            assert docker.container.reach(WEB) == f"internet {HOST}"
            assert docker.neighbour.reach(LAN, 8080).startswith("container")


@pytest.mark.parametrize("force", [forwarding.FORCE, "missing"])
@pytest.mark.parametrize("two_ways", [False, True])
def test_a_host_that_was_no_router_does_not_become_one(
    host: Host, monkeypatch: pytest.MonkeyPatch, force: str, two_ways: bool
) -> None:
    monkeypatch.setattr(forwarding, "FORCE", force)
    if two_ways:  # both networks are ways to the world, so both get switched
        host.machine.ip(
            f"route add default via {hosts.NEIGHBOUR} metric 500\n"
            f"route add default via {hosts.NEIGHBOUR6} metric 5000\n"
        )
    with Connected(host) as name:
        for _ in range(2):
            assert host.router.reach(WEB) == f"internet {HOST}"
            assert host.router.reach(WEB6) == f"internet {HOST6}"
            if two_ways:
                assert host.router.reach(hosts.NEIGHBOUR) == f"neighbour {LAN}"
                assert host.router.reach(hosts.NEIGHBOUR6) == f"neighbour {LAN6}"
            for address in (hosts.NEIGHBOUR, hosts.NEIGHBOUR6):
                assert host.internet.reach(address, timeout=BRIEFLY) == hosts.TIMED_OUT
            for address in (WEB, WEB6):
                assert host.neighbour.reach(address, timeout=BRIEFLY) != f"internet {address}"
            assert host.machine.setting("ipv4/ip_forward") == "0"
            # What was switched on is known even if all rules are lost.
            host.machine.nft("flush ruleset")
            uplink.protect(host.world, name)


def test_a_router_stays_a_router(host: Host) -> None:
    host.machine.set("ipv4/ip_forward", 1)
    host.machine.set("ipv6/conf/all/forwarding", 1)
    with Connected(host):
        for _ in range(2):
            assert host.internet.reach(hosts.NEIGHBOUR) == "neighbour 203.0.113.1"
            assert host.internet.reach(hosts.NEIGHBOUR6) == "neighbour 2001:db8:1::1"


def test_an_interface_that_forwards_by_its_owner_s_will_goes_on(host: Host) -> None:
    host.machine.set("ipv4/conf/lan/forwarding", 1)
    host.machine.set("ipv4/conf/wan/forwarding", 1)
    with Connected(host):
        assert host.internet.reach(hosts.NEIGHBOUR) == "neighbour 203.0.113.1"
        assert host.neighbour.reach(WEB) == f"internet {hosts.NEIGHBOUR}"


@pytest.mark.parametrize("gateway_lives", [True, False])
def test_a_docker_that_comes_later_works(host: Host, gateway_lives: bool) -> None:
    name = uplink.connect(host.router.path, host.world)
    host.add_container()
    start_docker(host)
    if gateway_lives:
        uplink.protect(host.world, name)
    assert host.container.reach(WEB) == f"internet {HOST}"
    assert host.neighbour.reach(LAN, 8080).startswith("container")
    assert host.router.refused_at(LAN, 8080)
    if gateway_lives:
        assert host.router.reach(WEB) == f"internet {HOST}"
    uplink.disconnect(host.world, name)
    assert host.container.reach(WEB) == f"internet {HOST}"
    assert host.neighbour.reach(LAN, 8080).startswith("container")


@pytest.mark.parametrize("force", [forwarding.FORCE, "missing"])
def test_a_host_that_lives_by_router_advertisements_keeps_its_ipv6(
    host: Host, monkeypatch: pytest.MonkeyPatch, force: str
) -> None:
    monkeypatch.setattr(forwarding, "FORCE", force)
    host.machine.ip("route del default via 2001:db8:1::1\n")
    host.internet.set("ipv6/conf/all/forwarding", 1)  # or it would not be believed
    host.internet.ip("route add 2001:db8:a::/48 dev eth0\nroute add 2001:db8:b::/48 dev eth0\n")
    advertise(host, "2001:db8:a::")
    wait_for_route(host, "default")
    with Connected(host):
        assert "proto ra" in host.machine.run("ip", "-6", "route", "show", "default")
        assert host.machine.reach(WEB6).startswith("internet 2001:db8:")
        assert host.router.reach(WEB6).startswith("internet 2001:db8:")
        advertise(host, "2001:db8:b::")
        wait_for_route(host, "2001:db8:b::/64")


def advertise(host: Host, prefix: str) -> None:
    """What a router of the internet tells the host's network now and then."""
    with host.internet.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as wire:
        wire.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        head = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
        network = socket.inet_pton(socket.AF_INET6, prefix)
        info = struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 86400, 86400, 0) + network
        index = int(host.internet.run("ip", "-o", "link", "show", "eth0").split(":")[0])
        wire.bind(("fe80::1", 0, 0, index))
        wire.sendto(head + info, ("ff02::1", 0, 0, index))


def wait_for_route(host: Host, wanted: str) -> None:
    """Until the kernel has told of a route, which it may have done already."""
    with host.machine.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as changes:
        changes.bind((0, 1 << 10))  # routes of IPv6
        while "proto" not in host.machine.run("ip", "-6", "route", "show", wanted):
            changes.recv(65536)
