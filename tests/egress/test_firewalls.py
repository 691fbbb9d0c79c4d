"""Firewalls of others are passed, and stay theirs."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess

import pytest

from k8e.egress import firewalls, uplink
from tests.egress import hosts
from tests.egress.hosts import HOST, HOST6, WEB, WEB6, Connected, Host

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

FIREWALLD = """
table inet firewalld {
    chain filter_FORWARD_ZONES { reject with icmpx admin-prohibited; }
    chain filter_FORWARD {
        type filter hook forward priority filter + 10; policy accept;
        ct state { established, related } accept
        jump filter_FORWARD_ZONES
    }
}
"""
UFW = """
table ip filter {
    chain ufw-reject-forward { counter reject; }
    chain FORWARD {
        type filter hook forward priority filter; policy drop;
        jump ufw-reject-forward
    }
}
table ip6 filter {
    chain FORWARD { type filter hook forward priority filter; policy drop; }
}
"""
BY_MAP = """
table inet mine {
    chain forward {
        type filter hook forward priority -200; policy accept;
        ct state vmap { established : accept, related : accept, new : drop }
    }
}
"""
CLAMPING = """
table ip mangle {
    chain FORWARD {
        type filter hook forward priority mangle; policy accept;
        tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    }
}
"""


@pytest.mark.parametrize("rules", [hosts.DOCKER, FIREWALLD, UFW, BY_MAP])
def test_a_firewall_that_drops_forwarded_packets_is_passed(host: Host, rules: str) -> None:
    host.machine.nft(rules)
    before = host.machine.ruleset()
    with Connected(host):
        assert host.router.reach(WEB) == f"internet {HOST}"
        assert host.router.reach(WEB6) == f"internet {HOST6}"
    assert host.machine.ruleset() == before


def test_a_chain_that_drops_nothing_is_left_alone(host: Host) -> None:
    host.machine.nft(CLAMPING)
    before = host.machine.ruleset()
    with Connected(host):
        assert host.machine.ruleset().startswith(before)


def test_a_strict_input_chain_does_not_cut_the_wire(host: Host) -> None:
    host.machine.nft(
        """
        table inet strict {
            chain input { type filter hook input priority -300; policy drop; iifname "wan" accept; }
        }
        table arp strict {
            chain input { type filter hook input priority 0; iifname "k8e-up*" drop; }
        }
        """
    )
    with Connected(host):
        assert host.router.reach(WEB) == f"internet {HOST}"
        assert host.router.reach(WEB6) == f"internet {HOST6}"


def test_a_firewall_that_lets_nobody_change_it_is_told_of(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with subprocess.Popen(
        ["nsenter", f"--net={host.world}", "nft", "-i"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write("add table inet owned { flags owner; }\n")
        owner.stdin.write(
            "add chain inet owned forward { type filter hook forward priority 0; policy drop; }\n"
            "list tables\n"
        )
        owner.stdin.flush()
        while "owned" not in owner.stdout.readline():
            pass
        with caplog.at_level(logging.WARNING):
            name = uplink.connect(host.router.path, host.world)
        assert f"--add-interface={name}" in caplog.text
        assert host.router.refused_at(HOST)
        uplink.disconnect(host.world, name)
        owner.stdin.close()
        owner.wait(5)


@pytest.mark.skipif(shutil.which("iptables-nft") is None, reason="no iptables")
def test_iptables_goes_on_understanding_its_tables(host: Host) -> None:
    run = host.machine.run
    for words in ("-P FORWARD DROP", "-N DOCKER-USER", "-A FORWARD -j DOCKER-USER"):
        run("iptables-nft", *words.split())
    run("ip6tables-nft", "-P", "FORWARD", "DROP")
    with Connected(host):
        assert host.router.reach(WEB) == f"internet {HOST}"
        assert host.router.reach(WEB6) == f"internet {HOST6}"
        assert "-A FORWARD -i k8e-up0" in run("iptables-nft", "-S", "FORWARD")
        run("iptables-nft", "-C", "FORWARD", "-j", "DOCKER-USER")


@pytest.mark.skipif(shutil.which("iptables-legacy") is None, reason="no iptables of the old kind")
def test_rules_of_the_older_iptables_are_passed_too(host: Host) -> None:
    run = host.machine.run
    run("iptables-legacy", "-P", "FORWARD", "DROP")
    run("ip6tables-legacy", "-P", "FORWARD", "DROP")
    before = run("iptables-legacy", "-S")
    with Connected(host) as name:
        run("iptables-legacy", "-I", "FORWARD", "-j", "REJECT")
        uplink.protect(host.world, name)
        assert host.router.reach(WEB) == f"internet {HOST}"
        assert host.router.reach(WEB6) == f"internet {HOST6}"
        seen = run("iptables-legacy", "-S")
        uplink.protect(host.world, name)
        assert run("iptables-legacy", "-S") == seen
        run("iptables-legacy", "-D", "FORWARD", "-j", "REJECT")
    assert run("iptables-legacy", "-S") == before


def test_comments_are_found_among_other_user_data() -> None:
    assert firewalls.comment(b"\x01\x02xx\x00\x04k8e\x00") == "k8e"
    assert firewalls.comment(b"\x01\x02xx") == ""
    assert firewalls.comment(b"\x00") == ""
