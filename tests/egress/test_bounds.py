"""What a sandbox or a policy can make large or many: bounded, quick, and gone with its session."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time

import dns.message
import dns.rrset
import pytest

from k8e.egress import namespaces, networks, pins, policy, rules
from k8e.egress.nftables import Element, Elements, NftFailed
from k8e.egress.pins import MAX_PINS
from tests.egress.stages import OTHER, WEB, Stage

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
FIRST = int(ipaddress.ip_address("93.185.0.0"))
TURN = 0.025  # seconds of CPU time that the event loop may be busy with one thing


def held(stage: Stage, *names: str) -> list[Element]:
    """What the kernel has in some sets of the router."""

    def there() -> list[Element]:
        found = Elements(rules.TABLE.split()[1])
        try:
            return [item for name in names for item in found.listing(name)]
        finally:
            found.close()

    return namespaces.run_in(stage.folder / "net" / "router", there)


def numbered(query: dns.message.Message) -> list[bytes]:
    """Eight addresses of its own for each of the names n0, n1, n2…"""
    asked = query.question[0]
    answer = dns.message.make_response(query)
    number = int(asked.name.to_text().split(".")[0][1:])
    texts = [str(ipaddress.ip_address(FIRST + number * 8 + nth)) for nth in range(8)]
    answer.answer.append(dns.rrset.from_text_list(asked.name, 600, "IN", "A", texts))
    return [answer.to_wire()]


async def ask_for(stage: Stage, names: list[str]) -> None:
    """Ask for many names, as quickly as one may."""
    for name in names:
        client = stage.egress._clients["sb-a"]
        client.rate.allows(-1)  # as if each were asked a while after the other
        client.elements.allows(-20)
        assert await stage.sandbox.resolve(name) != "REFUSED"


async def longest_turn(work: asyncio.Future[None]) -> float:
    """How long the event loop was busy with one thing at most, while something went on."""
    longest, last = 0.0, time.thread_time()
    while not work.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    await work
    return longest


async def test_pins_of_a_sandbox_are_bounded_in_the_kernel_and_the_oldest_go(stage: Stage) -> None:
    stage.internet.craft = numbered
    words = [f"n{number}.example.org" for number in range(MAX_PINS // 8 + 10)]
    stage.internet.host(str(ipaddress.ip_address(FIRST)))
    await stage.allow(*words)
    await ask_for(stage, words)
    assert len(held(stage, *rules.PINS)) == MAX_PINS
    first = str(ipaddress.ip_address(FIRST))
    assert await stage.sandbox.connect(first) == "ConnectionRefusedError"
    assert "look its name up again" in stage.egress.denials("sb-a")[-1]["rule"]
    await ask_for(stage, words[:1])
    assert await stage.sandbox.connect(first) == first


async def test_pins_go_with_their_policy_and_with_their_sandbox(stage: Stage) -> None:
    stage.internet.craft = numbered
    words = [f"n{number}.example.org:443" for number in range(20)]
    await stage.allow(*words)
    await ask_for(stage, [word.partition(":")[0] for word in words])
    generation = stage.egress._clients["sb-a"].bound.generation
    assert {pins.read(item)[0] for item in held(stage, *rules.PINS)} == {generation}
    await stage.allow(*words[:3])
    found = {pins.read(item)[0] for item in held(stage, *rules.PINS)}
    assert found == {generation + 1}
    assert len(held(stage, *rules.PINS)) == 24
    await stage.egress.detach("sb-a")
    assert held(stage, *rules.PINS, "ports", *networks.NAMES) == []


async def test_pins_outlive_a_gateway_and_go_with_who_is_not_alive(stage: Stage) -> None:
    await stage.allow("web.example.org:443", "8.8.8.0/24")
    await stage.egress.bind("sb-b", policy.parse_policy(["other.example.org"]))
    await stage.sandbox.resolve("web.example.org")
    await stage.neighbour.resolve("other.example.org")
    await stage.restart({"sb-a"})
    assert len(held(stage, *rules.PINS)) == 1
    assert len(held(stage, "ports", *networks.NAMES)) == 2
    assert await stage.sandbox.connect(WEB, 443) == WEB
    assert await stage.sandbox.connect(WEB, 80) == "ConnectionRefusedError"
    # The new gateway knows how many there are, and removes them with their policy.
    assert len(stage.egress._clients["sb-a"].pins) == 1
    await stage.allow("other.example.org")
    assert held(stage, *rules.PINS, *networks.NAMES) == []
    assert await stage.sandbox.connect(WEB, 443) == "ConnectionRefusedError"


async def test_what_a_killed_gateway_had_begun_to_bind_is_removed(stage: Stage) -> None:
    await stage.allow("8.8.8.0/24")
    new = rules.BoundPolicy(policy.parse_policy(["9.9.9.0/24"]), 4711)
    await stage.egress._prepare(new)  # and then it is killed
    assert len(held(stage, *networks.NAMES)) == 2
    await stage.restart()
    assert len(held(stage, *networks.NAMES)) == 1


async def test_a_name_with_all_ports_that_a_policy_can_have_holds_up_nobody(stage: Stage) -> None:
    stage.internet.craft = numbered
    words = [f"*.example.org:{port}" for port in range(1, 256)]
    await stage.allow(*words)
    names = [f"n{number}.example.org" for number in range(5)]
    work = asyncio.ensure_future(ask_for(stage, names))
    assert await longest_turn(work) < TURN
    assert len(held(stage, *rules.PINS)) == 40
    assert len(held(stage, "ports")) == 255
    first = str(ipaddress.ip_address(FIRST))
    stage.internet.host(first)
    assert await stage.sandbox.connect(first, 80) == first
    assert await stage.sandbox.connect(first, 8080) == "ConnectionRefusedError"


async def test_policies_of_many_networks_hold_up_nobody_also_when_they_go(stage: Stage) -> None:
    many = [[f"8.{nth}.{number}.0/23" for number in range(256)] for nth in range(2)]
    await stage.egress.bind("sb-b", policy.parse_policy(many[0]))
    for words in (many[0], many[1], ["none"]):
        assert await longest_turn(asyncio.ensure_future(stage.allow(*words))) < TURN
    assert len(held(stage, *networks.NAMES)) == 128 * 2  # of the other sandbox


async def test_policies_in_a_loop_leave_nothing_behind(stage: Stage) -> None:
    sets = (*rules.PINS, *rules.OF_INTERFACES, *networks.NAMES)
    stage.internet.craft = numbered
    sizes: set[int] = set()
    for number in range(60):
        await stage.allow(f"n{number % 2}.example.org:{443 + number % 2}", f"8.8.{number}.0/24")
        await ask_for(stage, [f"n{number % 2}.example.org"])
        sizes.add(len(held(stage, *sets)))
    assert len(sizes) == 1
    files = list((stage.folder / "net" / "sandboxes").iterdir())
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) < 8192


async def test_what_the_kernel_does_not_take_changes_nothing_and_is_told(stage: Stage) -> None:
    await stage.allow("web.example.org", OTHER)
    smallest = stage.egress._router._elements._socket
    smallest.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with pytest.raises(NftFailed, match="Message too long"):
        await stage.allow(*(f"[2606:4700:{number:x}::/48]:443" for number in range(256)))
    assert await stage.sandbox.connect(OTHER) == OTHER
    assert len(held(stage, *networks.NAMES)) == 1
    await stage.restart()
    assert await stage.sandbox.connect(OTHER) == OTHER
    assert stage.egress.policy("sb-a").words() == ["web.example.org", f"{OTHER}/32"]


async def test_an_answer_that_the_kernel_does_not_take_is_refused_with_the_reason(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.allow("web.example.org")

    def full(changes: object) -> None:
        raise NftFailed("nftables refused to add elements of pins4: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stage.egress._router, "change", full)
        assert await stage.sandbox.resolve("web.example.org") == "SERVFAIL"
        assert "No space left on device" in stage.egress.denials("sb-a")[-1]["rule"]
    assert await stage.sandbox.connect(WEB) == "ConnectionRefusedError"
    assert await stage.sandbox.resolve("web.example.org") == [WEB]
    assert await stage.sandbox.connect(WEB) == WEB
