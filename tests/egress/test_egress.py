"""The promises of egress, on a small internet of the test's own."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import dns.message
import dns.query
import dns.rcode
import pytest

from k8e.egress import namespaces, policy, rules
from k8e.egress.nftables import Nftables
from k8e.egress.router import DNS_ADDRESS
from k8e.egress.service import Egress
from k8e.runtimes.mounts import mounts_below
from tests.egress.internet import Internet

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

WEB, OTHER, PRIVATE = "93.184.216.34", "93.184.216.35", "10.9.9.9"
WEB6 = "2606:4700::5"


@dataclass
class Sandbox:
    """A network namespace that stands for a sandbox: what is in it can try things."""

    namespace: Path

    async def connect(self, host: str, port: int = 443) -> str:
        """The greeting of a server, or the error's name."""
        return await asyncio.to_thread(namespaces.run_apart, lambda: self._connect(host, port))

    def _connect(self, host: str, port: int) -> str:
        self._enter()
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                return connection.recv(100).decode().strip()
        except OSError as error:
            return type(error).__name__

    async def open(self, host: str, port: int = 443) -> socket.socket:
        def inside() -> socket.socket:
            self._enter()
            connection = socket.create_connection((host, port), timeout=5)
            connection.recv(100)
            return connection

        return await asyncio.to_thread(namespaces.run_apart, inside)

    async def resolve(self, name: str, kind: str = "A") -> list[str] | str:
        """The addresses of a name, or the code of the refusal."""

        def inside() -> list[str] | str:
            self._enter()
            query = dns.message.make_query(name, kind)
            try:
                answer = dns.query.udp(query, str(DNS_ADDRESS), timeout=3)
            except OSError as error:
                return type(error).__name__
            if answer.rcode() != dns.rcode.NOERROR:
                return dns.rcode.to_text(answer.rcode())
            return sorted(word for rrset in answer.answer for word in rrset.to_text().split()[4::5])

        return await asyncio.to_thread(namespaces.run_apart, inside)

    def _enter(self) -> None:
        with open(self.namespace, "rb") as file:
            namespaces.enter(file.fileno())


def is_cut(connection: socket.socket) -> bool:
    """Whether a connection is reset when it is used."""
    try:
        connection.sendall(b"hello")
        return not connection.recv(100)
    except ConnectionResetError:
        return True


@dataclass
class Stage:
    """Everything that a test of egress needs."""

    folder: Path
    egress: Egress
    internet: Internet
    sandbox: Sandbox
    neighbour: Sandbox

    async def allow(self, *words: str) -> None:
        await self.egress.bind("sb-a", policy.parse_policy(words))


@pytest.fixture
async def stage() -> AsyncGenerator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="k8e-net-"))
    internet = Internet(folder)
    internet.host(WEB, OTHER, PRIVATE, WEB6)
    internet.names |= {
        "web.example.org": [WEB, WEB6],
        "other.example.org": [OTHER],
        "alias.example.org": ["=web.example.org"],
        "evil.example.org": [PRIVATE],
        "mapped.example.org": ["::ffff:10.9.9.9"],
        "mixed.example.org": [OTHER, "127.0.0.1"],
        "example.org": [OTHER],
    }
    egress = Egress(folder / "net", world=internet.world, upstreams=[internet.upstream])
    await egress.start(set())
    first = Sandbox(await egress.attach("sb-a"))
    second = Sandbox(await egress.attach("sb-b"))
    made = Stage(folder, egress, internet, first, second)
    yield made
    for name in ("sb-a", "sb-b"):
        await made.egress.detach(name)
    await made.egress.close()
    internet.close()
    assert not mounts_below(folder)
    shutil.rmtree(folder)


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
    few = rules.BASE.replace(f"over {rules.MAX_FLOWS}", "over 5")
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


def replace_base(text: str) -> None:
    nft = Nftables()
    try:
        nft.run(f"delete table {rules.TABLE}\n{text}")
    finally:
        nft.close()
