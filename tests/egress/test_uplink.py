"""The uplink, on a host made for the test: it works, and the host stays what it was."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time

import pytest

from k8e.egress import uplink
from tests.egress import hosts
from tests.egress.hosts import (
    BRIDGE,
    BRIEFLY,
    CONTAINER,
    HOST,
    HOST6,
    LAN,
    LAN6,
    PORT,
    WEB,
    WEB6,
    Connected,
    Host,
)

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

UP, UP6 = "198.19.0.1", "fd6b:3865:0:2::1"

# The way out.


def test_the_router_reaches_the_world_under_the_host_s_address(host: Host) -> None:
    with Connected(host) as name:
        assert name == "k8e-up0"
        assert host.router.reach(WEB) == f"internet {HOST}"
        assert host.router.reach(WEB6) == f"internet {HOST6}"


def test_connections_fit_a_way_that_carries_less_than_the_wire(host: Host) -> None:
    host.machine.ip("link set wan mtu 1300\n")
    with Connected(host), host.router.connect(WEB) as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 1300 - 40


def test_a_host_without_ipv6_still_has_the_rest(host: Host) -> None:
    host.machine.set("ipv6/conf/all/disable_ipv6", 1)
    with Connected(host):
        assert host.router.reach(WEB) == f"internet {HOST}"
        began = time.monotonic()
        assert host.router.reach(WEB6) == "OSError"  # network is unreachable
        assert time.monotonic() - began < 1


# The host is out of reach.


@pytest.mark.parametrize(
    "address", [HOST, LAN, BRIDGE, UP, f"::ffff:{HOST}", HOST6, LAN6, "fd00:17::1", UP6]
)
def test_the_host_s_services_are_refused_quickly_on_each_address(
    docker: Host, address: str
) -> None:
    with Connected(docker):
        assert docker.router.refused_at(address)
        assert docker.router.refused_at(address, 9)  # where nobody listens, it looks the same
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with docker.router.socket(family, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect((address, PORT))
            datagrams.send(b"hello")
            with pytest.raises(ConnectionRefusedError):
                datagrams.recv(100)


def test_loopback_is_out_of_reach_even_where_the_host_routes_it(host: Host) -> None:
    host.machine.set("ipv4/conf/all/route_localnet", 1)
    with (
        Connected(host) as name,
        host.machine.socket(socket.AF_INET, socket.SOCK_DGRAM) as service,
    ):
        service.bind(("127.0.0.1", 5353))
        send_datagram(host, "127.0.0.1", 5353)
        # The same with the rules gone shows that the packet was good.
        host.machine.nft(f"delete table inet {name}")
        send_datagram(host, "127.0.0.1", 5353, b"second")
        assert service.recv(100) == b"second"


def test_nothing_for_a_sandbox_goes_on_into_the_world(host: Host) -> None:
    gone = "198.18.0.10"  # of a sandbox that has ended; a host would ask its own router for it
    host.internet.ip(f"address add {gone}/32 dev lo\n")
    with (
        Connected(host) as name,
        host.internet.socket(socket.AF_INET, socket.SOCK_DGRAM) as service,
    ):
        service.bind((gone, 5353))
        send_datagram(host, gone, 5353)
        host.machine.nft(f"delete table inet {name}")  # as above
        send_datagram(host, gone, 5353, b"second")
        assert service.recv(100) == b"second"


def send_datagram(host: Host, address: str, port: int, data: bytes = b"first") -> None:
    """Put a packet on the wire that no well-behaved router would send."""
    source, target = socket.inet_aton("198.19.0.2"), socket.inet_aton(address)
    udp = struct.pack("!HHHH", 4000, port, 8 + len(data), 0) + data
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0) + source + target
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    head = head[:10] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + head[12:]
    ends = uplink.Ends(0)
    frame = ends.hardware(outer=True) + ends.hardware(outer=False) + b"\x08\x00" + head + udp
    with host.router.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
        wire.bind(("up", 0))
        wire.send(frame)


def test_a_published_port_of_a_container_is_refused(docker: Host) -> None:
    with Connected(docker):
        for address in (HOST, LAN, BRIDGE, UP):
            assert docker.router.refused_at(address, 8080)


def test_whatever_the_host_translates_is_refused(docker: Host) -> None:
    # As Kubernetes does with the addresses of services, which belong to no interface.
    docker.machine.nft(
        f"""
        table ip services {{
            chain prerouting {{
                type nat hook prerouting priority dstnat; policy accept;
                ip daddr 93.184.216.99 tcp dport 443 dnat to {CONTAINER}:{PORT}
                ip daddr 93.184.216.98 tcp dport 443 redirect to :{PORT}
            }}
        }}
        """
    )
    assert docker.internet.reach("203.0.113.2", 8080).startswith("container")
    with Connected(docker):
        assert docker.router.refused_at("93.184.216.99", 443)
        assert docker.router.refused_at("93.184.216.98", 443)


def test_nobody_outside_opens_connections_into_the_uplink(docker: Host) -> None:
    docker.serve(docker.router)
    with Connected(docker):
        for outsider in (docker.internet, docker.neighbour, docker.container):
            assert outsider.reach("198.19.0.2", timeout=BRIEFLY) == hosts.TIMED_OUT


# Several, halves and leftovers.


def test_two_routers_work_side_by_side_and_apart(docker: Host) -> None:
    second = docker.another_router()
    docker.serve(second)
    before = docker.machine.ruleset()
    with Connected(docker):
        with_one = docker.machine.ruleset()
        name = uplink.connect(second.path, docker.world)
        assert name == "k8e-up1"
        for machine in (docker.router, second):
            assert machine.reach(WEB) == f"internet {HOST}"
            for address in (HOST, UP, "198.19.0.5", "fd6b:3865:0:2::5"):
                assert machine.refused_at(address)
        assert docker.router.refused_at("198.19.0.6")
        for number in (0, 1):  # neither pushes the other from its place for ever
            uplink.protect(docker.world, f"k8e-up{number}")
        seen = docker.machine.ruleset()
        uplink.protect(docker.world, "k8e-up0")
        assert docker.machine.ruleset() == seen
        uplink.disconnect(docker.world, name)
        assert docker.machine.ruleset() == with_one
        assert docker.router.reach(WEB) == f"internet {HOST}"
    assert docker.machine.ruleset() == before


def test_forwarding_ends_with_the_last_uplink(host: Host) -> None:
    second = host.another_router()
    with Connected(host):
        name = uplink.connect(second.path, host.world)
        uplink.disconnect(host.world, name)
        assert host.router.reach(WEB) == f"internet {HOST}"
        assert host.router.reach(WEB6) == f"internet {HOST6}"


def test_a_number_is_passed_over_if_its_name_or_addresses_are_taken(host: Host) -> None:
    host.machine.ip(
        "link add k8e-up0 type bridge\naddress add 198.19.0.6/32 dev lan\n"
        "address add fd6b:3865:0:2::a/128 dev lan nodad\n"
    )
    assert uplink.connect(host.router.path, host.world) == "k8e-up3"
    assert host.router.reach(WEB) == f"internet {HOST}"


def test_connecting_again_finds_the_wire_and_mends_it(host: Host) -> None:
    with Connected(host) as name, host.router.open(WEB) as connection:
        host.machine.nft("flush ruleset")
        host.machine.ip(f"address flush dev {name}\n")
        host.router.ip("route flush default\n")
        assert uplink.connect(host.router.path, host.world) == name
        assert hosts.echoes(connection)
        assert host.router.reach(WEB) == f"internet {HOST}"
        assert host.router.reach(WEB6) == f"internet {HOST6}"


def test_a_wire_that_leads_elsewhere_is_replaced(host: Host) -> None:
    elsewhere = host.another_world()
    uplink.connect(host.router.path, elsewhere.path)
    with Connected(host):
        assert host.router.reach(WEB) == f"internet {HOST}"
    assert "k8e-up" not in elsewhere.run("ip", "link")


def test_what_an_uplink_left_that_ended_silently_is_cleared_away(docker: Host) -> None:
    before = docker.machine.ruleset()
    names = [
        uplink.connect(router.path, docker.world)
        for router in (docker.router, docker.another_router())
    ]
    for name in names:
        docker.machine.ip(f"link delete {name}\n")
    assert docker.machine.ruleset() != before
    assert uplink.connect(docker.router.path, docker.world) == names[0]
    assert names[1] not in docker.machine.ruleset()
    uplink.disconnect(docker.world, names[0])
    assert docker.machine.ruleset() == before


@pytest.mark.parametrize(
    "loss", ["delete table inet k8e-up0", "flush ruleset", "flush chain ip filter FORWARD", ""]
)
def test_disconnecting_works_when_half_is_gone(docker: Host, loss: str) -> None:
    name = uplink.connect(docker.router.path, docker.world)
    if loss:
        docker.machine.nft(loss)
    else:
        docker.machine.ip(f"link delete {name}\n")
    for _ in range(2):
        uplink.disconnect(docker.world, name)
    assert "k8e" not in docker.machine.ruleset()
    assert "k8e" not in docker.machine.run("ip", "link")


def test_protecting_what_is_gone_adds_nothing(host: Host) -> None:
    with Connected(host):
        pass
    uplink.protect(host.world, "k8e-up0")
    assert host.machine.ruleset() == ""


# Where a gateway runs.

CONNECT = """
import sys
from pathlib import Path
from k8e import errors
from k8e.egress import namespaces, uplink
try:
    print(uplink.connect(Path(sys.argv[1]), namespaces.OWN))
    print(*uplink.own_addresses(namespaces.OWN))
except errors.RuntimeUnusable as error:
    print(error.message, error.hint)
"""


def test_a_gateway_s_own_network_is_a_world_like_any_other(host: Host) -> None:
    said = host.machine.run(sys.executable, "-c", CONNECT, str(host.router.path))
    assert said.startswith("k8e-up0\n")
    assert HOST in said
    assert host.router.reach(WEB) == f"internet {HOST}"
    assert host.router.refused_at(HOST)
    assert uplink.connect(host.router.path, host.world) == "k8e-up0"
    uplink.disconnect(host.world, "k8e-up0")
    assert host.machine.ruleset() == ""


def test_settings_that_cannot_be_changed_are_named_and_nothing_gets_out(host: Host) -> None:
    before = host.machine.settings()
    read_only = 'mount -o bind,ro /proc/sys /proc/sys && exec "$@"'
    said = host.machine.run(
        *("unshare", "--mount", "sh", "-c", read_only, "sh"),
        *(sys.executable, "-c", CONNECT, str(host.router.path)),
    )
    assert "/proc/sys/net/ipv4/conf/wan" in said
    assert "set it to" in said
    assert host.router.reach(WEB, timeout=BRIEFLY) == "OSError"  # network is unreachable
    uplink.disconnect(host.world, "k8e-up0")
    assert host.machine.settings() == before


# Addresses.


def test_own_addresses_are_all_that_the_host_has(docker: Host) -> None:
    with Connected(docker):
        found = {str(address) for address in uplink.own_addresses(docker.world)}
    for address in (HOST, LAN, BRIDGE, UP, HOST6, LAN6, UP6, "127.0.0.1", "::1"):
        assert address in found
