"""Tunnels through DNS below a wildcard, by every way to say something: what they carry a second."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import math
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from k8e.egress import dns as egress_dns
from k8e.egress.dns import LEAST_AT_ONCE, MAX_AT_ONCE, MAX_TOGETHER, Responder
from k8e.egress.dns_answers import (
    CAPACITY,
    EACH,
    LEAST,
    PER_SECOND,
    AllowedQuestion,
    AnswerCache,
    DnsAnswer,
    DnsRefusal,
    NameBudget,
    Share,
    parse,
    read,
)
from k8e.egress.policy import parse_policy
from k8e.egress.router import Slot
from k8e.egress.rules import BoundPolicy
from k8e.egress.sandbox import SandboxEgress

SECONDS = 120
PER_SECOND_ASKED = 40
BASE = "evil.test"
Symbol = tuple[str, str, float, float]
"""A name, a type, the moment within a turn, and the bits that the choice of all this carries."""


class NoRouter:
    """Lets through nothing; for questions, that makes no difference."""

    def change(self, changes: object) -> None:
        pass


class Wire:
    """A sandbox, a responder, and a resolver far away that writes down what reaches it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        self.now = 0.0
        self.ttl = 0
        self.arrived: list[tuple[str, str]] = []
        self.client = SandboxEgress("sb-x", Slot(1), AnswerCache(clock=self.clock))
        self.client.budget = NameBudget(self.clock)
        self.client.bound = BoundPolicy(parse_policy(words or [f"*.{BASE}"]), 7)
        router: Any = NoRouter()
        self.responder = Responder(router, {}, [], socket.socket)
        monkeypatch.setattr(egress_dns, "ask_upstream", self.reply)

    def clock(self) -> float:
        return self.now

    async def reply(self, query: dns.message.Message, *_: object) -> dns.message.Message:
        asked = query.question[0]
        kind = dns.rdatatype.to_text(asked.rdtype)
        self.arrived.append((asked.name.to_text(omit_final_dot=True), kind))
        answer = dns.message.make_response(query)
        text = "93.184.216.34" if kind == "A" else "2606:4700::1"
        answer.answer.append(dns.rrset.from_text(asked.name, self.ttl, "IN", kind, text))
        return egress_dns.read(answer.to_wire())

    async def ask(self, name: str, kind: str = "A") -> dns.message.Message:
        query = dns.message.make_query(name, kind)
        return dns.message.from_wire(await self.responder._answer(self.client, query.to_wire()))


def random_letters(pick: random.Random) -> Iterator[Symbol]:
    while True:
        yield f"{pick.randbytes(20).hex()}.{BASE}", "A", 0.0, 160.0


def repetitions(pick: random.Random) -> Iterator[Symbol]:
    """Names that are known already; which of them comes next says something."""
    names = [f"n{number}.{BASE}" for number in range(64)]
    for name in names:
        yield name, "A", 0.0, 0.0
    while True:
        yield pick.choice(names), "A", 0.0, 6.0


def runs_of_a_letter(pick: random.Random) -> Iterator[Symbol]:
    """Names that look as if they had no information; their lengths have."""
    for _ in itertools.count():
        lengths = [pick.randint(1, 60) for _ in range(4)]
        name = ".".join("a" * length for length in lengths)
        yield f"{name}.{BASE}", "A", 0.0, 4 * math.log2(60)


def kinds(pick: random.Random) -> Iterator[Symbol]:
    """Of which type a question is; others than addresses never leave."""
    for number in itertools.count():
        yield f"n{number % 3000}.{BASE}", pick.choice(["A", "AAAA", "HTTPS", "TXT"]), 0.0, 1.0


def moments(pick: random.Random) -> Iterator[Symbol]:
    """When a question comes, to a millisecond."""
    for number in itertools.count():
        yield f"{number % 40}.{BASE}", "A", pick.randrange(20) / 1000, math.log2(20)


TUNNELS = [random_letters, repetitions, runs_of_a_letter, kinds, moments]


@pytest.mark.parametrize("tunnel", TUNNELS, ids=lambda tunnel: tunnel.__name__)
async def test_no_tunnel_carries_more_than_its_account_has(
    monkeypatch: pytest.MonkeyPatch, tunnel: Callable[[random.Random], Iterator[Symbol]]
) -> None:
    wire = Wire(monkeypatch)
    carried = 0.0
    for number, (name, kind, moment, bits) in enumerate(tunnel(random.Random(7))):
        wire.now = number / PER_SECOND_ASKED + moment
        if wire.now > SECONDS:
            break
        before = len(wire.arrived)
        await wire.ask(name, kind)
        carried += bits if len(wire.arrived) > before else 0.0
    allowed = CAPACITY + PER_SECOND * SECONDS
    print(f"{carried / 8 / SECONDS:.2f} bytes a second")
    assert 0 < carried <= allowed


async def test_a_question_is_asked_once_while_its_answer_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch, "web.test")
    wire.ttl = 120
    for second in range(240):
        wire.now = second + 0.5
        answer = await wire.ask("web.test")
        assert 1 <= answer.answer[0].ttl <= 120
    assert len(wire.arrived) == 2
    await wire.ask("web.test", "AAAA")
    assert len(wire.arrived) == 3


async def test_that_a_name_has_no_address_is_remembered_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch, "web.test")

    async def nothing(query: dns.message.Message, *_: object) -> dns.message.Message:
        await wire.reply(query)
        answer = dns.message.make_response(query)
        answer.set_rcode(dns.rcode.NXDOMAIN)
        return egress_dns.read(answer.to_wire())

    monkeypatch.setattr(egress_dns, "ask_upstream", nothing)
    for _ in range(5):
        assert (await wire.ask("web.test")).rcode() == 3
    assert len(wire.arrived) == 1
    wire.now += 10
    await wire.ask("web.test")
    assert len(wire.arrived) == 2


async def test_who_may_not_ask_again_gets_the_old_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    assert (await wire.ask(f"cdn.{BASE}")).answer
    pick = random.Random(7)
    while (await wire.ask(f"{pick.randbytes(20).hex()}.{BASE}")).rcode() == 0:
        pass
    while wire.client.budget.allows(f"x.{BASE}", BASE):
        pass  # to the last bit
    wire.now += 0.5
    monkeypatch.setattr("k8e.egress.dns_answers.PER_SECOND", 0.0)
    wire.now += 40
    count = len(wire.arrived)
    assert (await wire.ask(f"cdn.{BASE}")).answer
    assert (await wire.ask(f"other.{BASE}")).rcode() == 3
    assert len(wire.arrived) == count


def test_what_is_kept_is_bounded_for_each_sandbox_and_in_all() -> None:
    share = Share(4 * EACH, EACH, LEAST)
    caches = [AnswerCache(share) for _ in range(12)]
    for cache in caches:
        for number in range(2 * EACH):
            cache.put((f"n{number}.test", 1), DnsAnswer(seconds=60))
    sizes = [len(cache) for cache in caches]
    assert max(sizes) <= EACH
    assert min(sizes) >= LEAST
    assert sum(sizes) == share.taken <= 4 * EACH + LEAST * len(caches)
    assert caches[0].get(("n0.test", 1)) is None
    assert caches[0].get((f"n{2 * EACH - 1}.test", 1)) is not None
    for cache in caches:
        cache.close()
        cache.put(("late.test", 1), DnsAnswer(seconds=60))
    assert share.taken == 0


def test_a_share_always_leaves_some_for_who_comes_next() -> None:
    share = Share(100, 64, 2)
    held: list[int] = []
    for _ in range(20):
        count = 0
        while share.allows(count):
            share.take()
            count += 1
        held.append(count)
    assert held[0] == 50
    assert min(held) == 2
    assert share.taken < 100 + 2 * len(held)


def test_questions_that_wait_leave_room_for_those_of_other_sandboxes() -> None:
    router: Any = NoRouter()
    responder = Responder(router, {}, [], socket.socket)
    clients = [SandboxEgress(f"sb-{number}", Slot(number)) for number in range(100)]
    for client in clients:
        while responder._begin(client):
            pass
    assert clients[0].asking == MAX_AT_ONCE
    assert clients[-1].asking == LEAST_AT_ONCE
    assert sum(client.asking for client in clients) < MAX_TOGETHER + LEAST_AT_ONCE * len(clients)


# What strangers answer.


@pytest.mark.parametrize("section", ["answer", "additional"])
def test_a_long_reply_is_read_quickly(section: str) -> None:
    query = dns.message.make_query("a.test", "A")
    reply = dns.message.make_response(query)
    rrsets = [
        dns.rrset.from_text(f"n{number}.test.", 60, "IN", "A", "93.184.216.34")
        for number in range(190)
    ]
    first = dns.rrset.from_text("a.test.", 60, "IN", "A", "93.184.216.34")
    reply.answer = [first, *rrsets] if section == "answer" else [first]
    reply.additional = rrsets if section == "additional" else []
    wire = reply.to_wire()
    assert len(wire) < egress_dns.MAX_ANSWER
    least = min(timed(lambda: egress_dns.read(wire)) for _ in range(5))
    assert least < 0.25 * min(timed(lambda: dns.message.from_wire(wire)) for _ in range(5))
    question = AllowedQuestion("a.test", dns.rdatatype.A, [])
    assert [str(item) for item in read(question, egress_dns.read(wire)).addresses] == [
        "93.184.216.34"
    ]


def timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


@pytest.mark.parametrize("size", [2000, 60_000])
def test_a_long_question_is_refused_unread(size: int) -> None:
    query = dns.message.make_query("a.test", "A").to_wire()
    with pytest.raises(DnsRefusal):
        parse(query + b"\0" * size)
    many = query[:10] + (999).to_bytes(2, "big") + query[12:]
    with pytest.raises(DnsRefusal):
        parse(many)
