"""The promises of egress, on a small internet of the test's own."""

from __future__ import annotations

import contextlib
import os
import time

import dns.exception
import pytest

from k8e.egress import namespaces, policy, rules
from k8e.egress.nftables import Nftables
from k8e.egress.service import Egress
from tests.egress.stages import OTHER, PRIVATE, WEB, WEB6, Sandbox, Stage, is_cut

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


async def test_a_sandbox_without_a_policy_reaches_nothing_and_is_told_quickly(stage: Stage) -> None:
    began = time.monotonic()
    assert await stage.sandbox.connect(WEB) == "ConnectionRefusedError"
    assert await stage.sandbox.connect(WEB6) == "ConnectionRefusedError"
    assert time.monotonic() - began < 2
    assert stage.internet.asked == []


async def test_an_allowed_name_is_resolved_and_its_address_opened(stage: Stage) -> None:
    await stage.allow("web.example.org")
    assert await stage.sandbox.connect(WEB) == "ConnectionRefusedError"
    assert await stage.sandbox.resolve("web.example.org") == [WEB]
    assert await stage.sandbox.connect(WEB) == WEB
    assert await stage.sandbox.resolve("web.example.org", "AAAA") == [WEB6]
    assert await stage.sandbox.connect(WEB6) == WEB6
    assert await stage.sandbox.connect(OTHER) == "ConnectionRefusedError"


async def test_names_outside_the_list_never_leave_the_host(stage: Stage) -> None:
    await stage.allow("web.example.org", "*.example.org:443")
    for name in ("secret.evil.test", "web.example.org.evil.test", "xexample.org", "example.org"):
        assert await stage.sandbox.resolve(name) == "NXDOMAIN"
    assert stage.internet.asked == []
    names = [denial["name"] for denial in stage.egress.denials("sb-a")]
    assert "secret.evil.test" in names


async def test_a_wildcard_allows_what_is_below_it_and_a_port_only_itself(stage: Stage) -> None:
    await stage.allow("*.example.org:443")
    assert await stage.sandbox.resolve("Other.Example.ORG.") == [OTHER]
    assert await stage.sandbox.connect(OTHER, 443) == OTHER
    assert await stage.sandbox.connect(OTHER, 80) == "ConnectionRefusedError"


async def test_an_alias_is_followed_to_its_addresses(stage: Stage) -> None:
    await stage.allow("alias.example.org")
    assert await stage.sandbox.resolve("alias.example.org") == [WEB]
    assert await stage.sandbox.connect(WEB) == WEB


@pytest.mark.parametrize("name", ["evil.example.org", "mapped.example.org"])
async def test_a_name_that_resolves_to_a_private_address_opens_nothing(
    stage: Stage, name: str
) -> None:
    await stage.allow(name)
    assert await stage.sandbox.resolve(name) == []
    assert await stage.sandbox.resolve(name, "AAAA") == []
    assert await stage.sandbox.connect(PRIVATE) == "ConnectionRefusedError"
    assert any("private" in denial["rule"] for denial in stage.egress.denials("sb-a"))


async def test_private_addresses_are_taken_out_of_a_mixed_answer(stage: Stage) -> None:
    await stage.allow("mixed.example.org")
    assert await stage.sandbox.resolve("mixed.example.org") == [OTHER]


async def test_a_name_of_the_operator_may_be_private(stage: Stage) -> None:
    rule = policy.parse_rule("evil.example.org", trusted=True)
    await stage.egress.bind("sb-a", policy.Policy((rule,)))
    assert await stage.sandbox.resolve("evil.example.org") == [PRIVATE]
    assert await stage.sandbox.connect(PRIVATE) == PRIVATE


async def test_a_client_widens_nothing_that_the_operator_opened(stage: Stage) -> None:
    rule = policy.parse_rule("evil.example.org:443", trusted=True)
    for word in ("evil.example.org:80", "evil.example.org", "open"):
        asked = policy.parse_policy([word])
        both = policy.Policy((rule, *asked.rules), asked.open)
        await stage.egress.bind("sb-a", both)
        assert await stage.sandbox.resolve("evil.example.org") == [PRIVATE]
        assert await stage.sandbox.connect(PRIVATE, 443) == PRIVATE
        assert await stage.sandbox.connect(PRIVATE, 80) == "ConnectionRefusedError"


async def test_the_private_part_of_a_network_is_not_opened_by_a_client(stage: Stage) -> None:
    await stage.allow("0.0.0.0/0", "::/0")
    assert await stage.sandbox.connect(WEB) == WEB
    assert await stage.sandbox.connect(PRIVATE) == "ConnectionRefusedError"
    rule = policy.parse_rule("10.0.0.0/8:443", trusted=True)
    await stage.egress.bind("sb-a", policy.Policy((rule,)))
    assert await stage.sandbox.connect(PRIVATE, 443) == PRIVATE
    assert await stage.sandbox.connect(PRIVATE, 80) == "ConnectionRefusedError"


async def test_networks_and_ports_are_allowed_without_dns(stage: Stage) -> None:
    await stage.allow("93.184.216.34/31:8080", "2606:4700::/32")
    assert await stage.sandbox.connect(WEB, 8080) == WEB
    assert await stage.sandbox.connect(WEB, 443) == "ConnectionRefusedError"
    assert await stage.sandbox.connect(WEB6, 443) == WEB6


async def test_open_means_every_public_address_and_no_private_one(stage: Stage) -> None:
    await stage.allow("open")
    assert await stage.sandbox.connect(OTHER) == OTHER
    assert await stage.sandbox.resolve("web.example.org") == [WEB]
    for address in (
        PRIVATE,
        "169.254.169.254",
        "100.100.100.200",
        "198.19.255.253",
        "fd00:ec2::254",
    ):
        assert await stage.sandbox.connect(address) == "ConnectionRefusedError"


async def test_sandboxes_do_not_reach_each_other_nor_the_router(stage: Stage) -> None:
    await stage.allow("open")
    for address in ("198.18.0.6", "198.18.0.1", "198.18.0.5", "fd6b:3865:0:1::6"):
        assert await stage.sandbox.connect(address) == "ConnectionRefusedError"


async def test_what_one_sandbox_resolved_is_not_open_to_another(stage: Stage) -> None:
    await stage.allow("web.example.org")
    await stage.egress.bind("sb-b", policy.parse_policy(["other.example.org"]))
    assert await stage.sandbox.resolve("web.example.org") == [WEB]
    assert await stage.neighbour.connect(WEB) == "ConnectionRefusedError"
    assert await stage.neighbour.resolve("web.example.org") == "NXDOMAIN"


async def test_a_tightened_policy_ends_open_connections(stage: Stage) -> None:
    await stage.allow(WEB)
    with await stage.sandbox.open(WEB) as connection:
        await stage.allow(OTHER)
        assert is_cut(connection)


async def test_a_changed_policy_keeps_connections_that_it_still_allows(stage: Stage) -> None:
    await stage.allow(WEB)
    with await stage.sandbox.open(WEB) as connection:
        await stage.allow(WEB, OTHER)
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"


async def test_a_changed_policy_keeps_what_dns_opened_and_it_still_allows(stage: Stage) -> None:
    await stage.allow("web.example.org", "other.example.org")
    for name in ("web.example.org", "other.example.org"):
        await stage.sandbox.resolve(name)
    with await stage.sandbox.open(WEB) as kept, await stage.sandbox.open(OTHER) as cut:
        await stage.allow("web.example.org")
        kept.sendall(b"hello")
        assert kept.recv(100) == b"hello"
        assert is_cut(cut)
    assert await stage.sandbox.connect(WEB) == WEB
    assert await stage.sandbox.connect(OTHER) == "ConnectionRefusedError"


async def test_other_resolvers_and_other_questions_are_refused(stage: Stage) -> None:
    await stage.allow("web.example.org")
    assert await stage.sandbox.connect("8.8.8.8", 53) == "ConnectionRefusedError"
    assert await stage.sandbox.resolve("web.example.org", "TXT") == []
    assert await stage.sandbox.resolve("4.3.2.1.in-addr.arpa", "PTR") == "NXDOMAIN"
    assert stage.internet.asked == []


async def test_a_new_gateway_finds_policies_and_connections_as_they_were(stage: Stage) -> None:
    await stage.allow("web.example.org")
    assert await stage.sandbox.resolve("web.example.org") == [WEB]
    with await stage.sandbox.open(WEB) as kept, await stage.sandbox.open(WEB) as cut:
        before = stage.egress
        before.abandon()
        kept.sendall(b"hello")
        assert kept.recv(100) == b"hello"
        after = Egress(
            stage.folder / "net", world=stage.internet.world, upstreams=[stage.internet.upstream]
        )
        await after.start({"sb-a", "sb-b"})
        assert await stage.sandbox.resolve("web.example.org") == [WEB]
        assert await stage.sandbox.resolve("other.example.org") == "NXDOMAIN"
        await after.bind("sb-a", policy.parse_policy(["other.example.org"]))
        assert is_cut(cut)
    stage.egress = after  # to be taken down by the fixture


async def test_a_sandbox_cannot_fill_the_table_of_connections(stage: Stage) -> None:
    few = rules.base().replace(f"over {rules.MAX_FLOWS}", "over 5")
    namespaces.run_in(stage.folder / "net" / "router", lambda: replace_base(few))
    await stage.egress.bind("sb-b", policy.parse_policy([WEB]))
    held = [await stage.neighbour.open(WEB) for _ in range(5)]
    assert await stage.neighbour.connect(WEB) == "ConnectionRefusedError"
    rule = stage.egress.denials("sb-b")[-1]["rule"]
    assert "too many" in rule
    await stage.allow(WEB)
    assert await stage.sandbox.connect(WEB) == WEB  # others have their own count
    for connection in held:
        connection.close()


async def fill(sandbox: Sandbox, held: contextlib.ExitStack, *, most: int) -> None:
    """Open connections until one is refused; which part each counts in depends on its port."""
    for _ in range(most):
        held.enter_context(await sandbox.open(WEB))


async def test_sandboxes_together_cannot_fill_the_table_of_connections(stage: Stage) -> None:
    few = rules.base(places=512)
    sure, part = rules.flow_shares(512)
    assert (sure, part) == (1, 3)
    namespaces.run_in(stage.folder / "net" / "router", lambda: replace_base(few))
    await stage.egress.bind("sb-b", policy.parse_policy([WEB]))
    with contextlib.ExitStack() as held:
        with pytest.raises(ConnectionRefusedError):
            await fill(stage.neighbour, held, most=512 * 3 // 4)
        rule = stage.egress.denials("sb-b")[-1]["rule"]
        assert "the sandboxes of this machine have too many connections together" in rule
        await stage.allow(WEB)
        assert await stage.sandbox.connect(WEB) == WEB  # what each is sure of nobody else takes


def test_half_of_the_kernels_table_is_shared_and_a_quarter_stays_free() -> None:
    for places in (8192, 65_536, 262_144, 1 << 20):
        sure, part = rules.flow_shares(places)
        assert sure * rules.SHARERS + part * 64 <= places * 3 // 4
    assert rules.flow_shares(262_144) == (256, 1536)


async def test_questions_and_diverted_connections_count_too(stage: Stage) -> None:
    few = rules.base().replace(f"over {rules.MAX_FLOWS}", "over 5")
    namespaces.run_in(stage.folder / "net" / "router", lambda: replace_base(few))
    await stage.egress.bind("sb-b", policy.parse_policy(["strict", "web.example.org", OTHER]))
    told = [await stage.neighbour.resolve("web.example.org") for _ in range(4)]
    assert told == [[WEB]] * 4
    with await stage.neighbour.open(OTHER):
        assert await stage.neighbour.connect(OTHER) == "ConnectionRefusedError"
        assert "too many connections" in stage.egress.denials("sb-b")[-1]["rule"]
        with pytest.raises(dns.exception.Timeout):  # it does not listen to refusals
            await stage.neighbour.resolve("web.example.org")
        assert "too many questions" in stage.egress.denials("sb-b")[-1]["rule"]
    await stage.allow("web.example.org")
    assert await stage.sandbox.resolve("web.example.org") == [WEB]


def replace_base(text: str) -> None:
    nft = Nftables()
    try:
        nft.run(f"delete table {rules.TABLE}\n{text}")
    finally:
        nft.close()
