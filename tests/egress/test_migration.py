"""A router that an earlier release left: its table is replaced, and what it held goes on."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from k8e.egress import migration, namespaces, policy, rules
from k8e.egress.nftables import Nftables
from k8e.egress.router import Slot
from tests.egress.stages import OTHER, PRIVATE, WEB, WEB6, Stage, is_cut

FORMER = (Path(__file__).parent / "layouts" / "ports-in-pins.nft").read_text("utf-8")
"""Rules of releases in which pins had an element for each port, and networks were intervals."""
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def in_router(stage: Stage, commands: str) -> str:
    def there() -> str:
        nft = Nftables()
        try:
            return nft.run(commands)
        finally:
            nft.close()

    return namespaces.run_in(stage.folder / "net" / "router", there)


def member(slot: Slot, generation: int) -> list[str]:
    """What releases of every layout hold for a sandbox with a policy."""
    here = f'"{slot.interface}"'
    return [
        f"add element {rules.TABLE} members4 {{ {here} . {slot.address4} }}",
        f"add element {rules.TABLE} members6 {{ {here} . {slot.address6} }}",
        f"add element {rules.TABLE} live {{ {here} . {generation} }}",
        f"add element {rules.TABLE} generation {{ {here} : {generation} }}",
    ]


def slot_and_generation(stage: Stage, sandbox_id: str) -> tuple[Slot, int]:
    path = stage.folder / "net" / "sandboxes" / f"{sandbox_id}.json"
    record = json.loads(path.read_text("utf-8"))
    return Slot(record["slot"]), record["bound"]["generation"]


def go_back(stage: Stage) -> None:
    """Make the router's table what the former release would have made of the present policies."""
    slot, mark = slot_and_generation(stage, "sb-a")
    other, other_mark = slot_and_generation(stage, "sb-b")
    here, there = f'"{slot.interface}"', f'"{other.interface}"'
    adds = {
        "host4": f"{mark} . {WEB} . 443 timeout 600s, {mark} . {WEB} . 8080 timeout 600s, "
        f"{other_mark} . {OTHER} . 80 timeout 600s, 4000 . {OTHER} . 443 timeout 600s",
        "any6": f"{mark} . {WEB6} timeout 600s",
        "net4": f"{here} . 93.184.216.35",
        "port4": f"{there} . 93.184.216.32/28 . 8080",
        "trustport4": f"{here} . 10.0.0.0/9 . 443",
        "own4": "192.0.2.2",
        "own6": "2001:db8:ffff::2",
    }
    lines = [f"delete table {rules.TABLE}", FORMER]
    lines += [*member(slot, mark), *member(other, other_mark)]
    lines += [f"add element {rules.TABLE} {name} {{ {text} }}" for name, text in adds.items()]
    in_router(stage, "\n".join(lines))


async def bind_both(stage: Stage) -> None:
    rule = policy.parse_rule("10.0.0.0/9:443", trusted=True)
    asked = policy.parse_policy(["web.example.org:443", "web.example.org:8080", OTHER])
    await stage.egress.bind("sb-a", policy.Policy((*asked.rules, rule)))
    words = ["other.example.org:80", "93.184.216.32/28:8080"]
    await stage.egress.bind("sb-b", policy.parse_policy(words))


async def test_what_a_former_release_held_for_sandboxes_goes_on(stage: Stage) -> None:
    await bind_both(stage)
    go_back(stage)
    with await stage.sandbox.open(WEB) as kept, await stage.sandbox.open(OTHER) as also_kept:
        await stage.restart()
        for connection in (kept, also_kept):
            connection.sendall(b"hello")
            assert connection.recv(100) == b"hello"
        reached = [(WEB, 443), (WEB, 8080), (WEB6, 80), (OTHER, 80), (PRIVATE, 443)]
        for address, port in reached:
            assert await stage.sandbox.connect(address, port) == address
        for address, port in ((WEB, 80), (PRIVATE, 80), ("192.0.2.2", 443)):
            assert await stage.sandbox.connect(address, port) == "ConnectionRefusedError"
        assert await stage.neighbour.connect(OTHER, 80) == OTHER
        assert await stage.neighbour.connect(WEB, 8080) == WEB
        for port in (80, 443):
            assert await stage.neighbour.connect(WEB, port) == "ConnectionRefusedError"
        await stage.allow("other.example.org")
        assert is_cut(kept)
    listed = in_router(stage, f"list table {rules.TABLE}")
    assert "set host4" not in listed
    assert "0x00000fa0" not in listed  # a generation that nobody had any more


async def test_there_is_no_moment_without_rules_while_a_table_is_replaced(stage: Stage) -> None:
    await bind_both(stage)
    go_back(stage)
    stage.egress.abandon()
    told: list[str] = []
    done = asyncio.Event()

    async def insist() -> None:
        while not done.is_set():
            told.append(await stage.sandbox.connect(WEB, 80))

    insisting = asyncio.create_task(insist())
    listing = namespaces.run_in(stage.folder / "net" / "router", json_listing)
    for _ in range(20):  # as often as it takes for a connection to come in between
        await asyncio.to_thread(in_router, stage, migration.rebuilt(listing, rules.base()))
        assert await stage.sandbox.connect(WEB, 443) == WEB
    done.set()
    await insisting
    assert set(told) == {"ConnectionRefusedError"}
    await stage.restart()


def json_listing() -> str:
    nft = Nftables()
    try:
        return nft.run_json(f"list table {rules.TABLE}")
    finally:
        nft.close()


async def test_a_table_of_this_release_is_left_alone(stage: Stage) -> None:
    await bind_both(stage)
    await stage.sandbox.resolve("web.example.org")
    before = in_router(stage, f"list table {rules.TABLE}")
    assert "layout_" in before
    await stage.restart()
    after = in_router(stage, f"list table {rules.TABLE}")
    assert after.count("elements = ") == before.count("elements = ")


async def test_other_rules_with_the_same_sets_keep_every_element(stage: Stage) -> None:
    await bind_both(stage)
    await stage.sandbox.resolve("web.example.org")
    made_by = rules.layout(in_router(stage, f"list table {rules.TABLE}"))
    in_router(stage, f"delete chain {rules.TABLE} {made_by}")
    with await stage.sandbox.open(WEB) as kept:
        await stage.restart()
        kept.sendall(b"hello")
        assert kept.recv(100) == b"hello"
    assert await stage.sandbox.connect(WEB, 8080) == WEB
    assert await stage.sandbox.connect(WEB, 80) == "ConnectionRefusedError"
    assert await stage.sandbox.connect(OTHER) == OTHER
    assert await stage.sandbox.connect(PRIVATE, 443) == PRIVATE
    assert await stage.neighbour.connect(WEB, 8080) == WEB
