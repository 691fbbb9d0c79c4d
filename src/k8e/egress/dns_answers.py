"""Decisions of the DNS responder, without any network: answers, cache and budgets.

The owner of ``*.example.org`` can read every question that is asked below it, so questions are a
way out for data. Each question that leaves this machine costs as many bits as it can carry; the
budget refills slowly. An ordinary day's host names fit in; a tunnel gets a few bytes a second.
Sandboxes share no cache, since the speed of an answer would reveal what others asked for. A cached
answer is not asked for again, so that repeating a question carries no data.
"""

from __future__ import annotations

import collections
import ipaddress
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from k8e import errors
from k8e.egress import denials
from k8e.egress.policy import Address, Policy, Rule, is_public, normalise

if TYPE_CHECKING:
    from dns.rdtypes.ANY.CNAME import CNAME
    from dns.rdtypes.ANY.SOA import SOA
    from dns.rdtypes.IN.A import A


CAPACITY = 8192.0  # bits: some 200 ordinary names, or 24 of sixty random letters
PER_SECOND = 32.0
REMEMBERED = 4096  # names that cost less the second time
LETTERS = 40  # a to z, digits, hyphen, underscore, dot, and the end of a name
KINDS = 2  # of questions that leave the machine: A and AAAA
TICK = 0.001  # seconds: how precisely a distant observer can time a question


def spelling(text: str) -> float:
    """The bits of information in a choice among all names, whatever the name looks like.

    Not by the frequencies of its letters: a run of one letter carries data in its length.
    """
    return (len(text) + 1) * math.log2(LETTERS)


def timing(seconds: float) -> float:
    """The bits of information in the timing of a question: the length of its Elias delta code."""
    ticks = 1 + max(0.0, seconds) / TICK
    return math.log2(ticks) + 2 * math.log2(1 + math.log2(ticks)) + 1


class NameBudget:
    """One sandbox's budget for questions.

    A question is coded as its reader could code it: the time since the one before, its kind,
    whether its name is new, and then its letters or the number of the known name. No code makes all
    questions shorter, so no question can say more than was paid for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = CAPACITY
        self._at = clock()
        self._asked = clock()
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()

    def allows(self, name: str, base: str) -> bool:
        """Whether a question about ``name``, below ``base``, may leave; pays for it if so."""
        now = self._clock()
        self._left = min(CAPACITY, self._left + (now - self._at) * PER_SECOND)
        self._at = now
        cost = self._cost(name, base, now)
        if cost > self._left:
            return False
        self._left -= cost
        self._asked = now
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return True

    def _cost(self, name: str, base: str, now: float) -> float:
        bits = 1 + math.log2(KINDS) + timing(now - self._asked)
        if name in self._known:
            return bits + math.log2(len(self._known))
        return bits + spelling(name.removesuffix("." + base))


class Rate:
    """A rate limit: so many a second, and some at once."""

    def __init__(
        self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = self._left = burst
        self._clock = clock
        self._at = clock()

    def allows(self, count: float = 1) -> bool:
        """Whether ``count`` more are allowed now; counts them if so."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < count:
            return False
        self._left -= count
        return True


class Share:
    """A resource that all sandboxes share; each may take as much as it leaves to others.

    One sandbox gets half of it at most, two get a third each. ``least`` is guaranteed to each,
    however many others have come before.
    """

    def __init__(self, total: int, each: int, least: int = 0) -> None:
        self._total = total
        self._each = each
        self._least = least
        self.taken = 0

    def allows(self, held: int) -> bool:
        """Whether a sandbox that holds ``held`` already may take one more."""
        return held < self._least or held < min(self._each, self._total - self.taken)

    def take(self) -> None:
        self.taken += 1

    def give_back(self, count: int = 1) -> None:
        self.taken -= count


EACH = 512  # answers of one sandbox
TOTAL = 16_384  # of all sandboxes together
LEAST = 16  # of one sandbox, however many others there are
STALE = 3600.0  # seconds that an answer is kept for questions that may not be asked again

CacheKey = tuple[str, int]
"""A name and the type of a question."""


@dataclass(frozen=True)
class DnsAnswer:
    """The upstream answer for a name, before any policy is applied."""

    rcode: dns.rcode.Rcode = dns.rcode.NOERROR
    addresses: list[Address] = field(default_factory=list[Address])
    seconds: int = 0
    """How long it holds."""


@dataclass(frozen=True)
class _Kept:
    answer: DnsAnswer
    until: float


class AnswerCache:
    """The answers of one sandbox. The oldest go where there are too many."""

    def __init__(
        self, share: Share | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``share`` bounds the caches of all sandboxes together."""
        self._share = share or Share(TOTAL, EACH, LEAST)
        self._clock = clock
        self._kept: dict[CacheKey, _Kept] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: CacheKey, *, stale: bool = False) -> tuple[DnsAnswer, int] | None:
        """An answer and the seconds for which it is valid; ``stale`` accepts an expired one."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        left = kept.until - self._clock()
        if left <= 0 and not (stale and left > -STALE and kept.answer.addresses):
            return None
        return kept.answer, max(0, round(left))

    def put(self, key: CacheKey, answer: DnsAnswer) -> None:
        if self._closed:
            return
        if self._kept.pop(key, None) is not None:
            self._share.give_back()
        while not self._share.allows(len(self._kept)):
            del self._kept[next(iter(self._kept))]
            self._share.give_back()
        self._kept[key] = _Kept(answer, self._clock() + answer.seconds)
        self._share.take()

    def close(self) -> None:
        """Forget everything for good: the sandbox is gone."""
        self._closed = True
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._share.give_back(len(self._kept))
        self._kept.clear()


MIN_PIN, MAX_PIN = 30, 3600  # seconds that an address stays reachable, whatever its TTL says
MIN_NOTHING, MAX_NOTHING = 5, 300  # seconds for which a negative answer is believed
MAX_QUESTION = 1232  # bytes; reading more takes too long, and a name has 255 at most
MAX_CHAIN = 8  # names that an answer may lead through
MAX_ADDRESSES = 8  # so that an answer always fits into a datagram of 512 bytes
# Types that lead to an address. Others (TXT, NULL, HTTPS, …) are answered as empty: they are what
# tunnels are made of, and nothing that connects by name needs them.
ADDRESS_TYPES = (dns.rdatatype.A, dns.rdatatype.AAAA)


@dataclass(frozen=True)
class AllowedQuestion:
    """A question that may be sent upstream."""

    name: str
    kind: dns.rdatatype.RdataType
    rules: list[Rule]

    @property
    def key(self) -> CacheKey:
        return self.name, int(self.kind)

    @property
    def base(self) -> str:
        """The name of the wildcard that alone allows it; empty for other names."""
        if not all(rule.below for rule in self.rules):
            return ""
        return min((rule.name for rule in self.rules), key=len, default="")


@dataclass
class DnsRefusal(Exception):
    """A question that is answered at once, with this answer."""

    rcode: dns.rcode.Rcode
    reason: tuple[str, str] = ("", "")
    """Why (one of those in denials); empty for what is not a denial."""
    name: str = ""


@dataclass(frozen=True)
class Resolved:
    """The upstream answer, reduced to what the policy allows."""

    addresses: list[Address] = field(default_factory=list[Address])
    seconds: int = MIN_PIN
    hidden: list[Address] = field(default_factory=list[Address])
    """Addresses that the world gave and the policy does not let through."""


def parse(wire: bytes) -> dns.message.Message:
    """Parse a query; DnsRefusal for anything else."""
    if len(wire) > MAX_QUESTION or int.from_bytes(wire[6:12], "big") > 2:
        raise DnsRefusal(
            dns.rcode.FORMERR
        )  # records are for answers; one of EDNS may follow, or two
    try:
        message = dns.message.from_wire(wire, ignore_trailing=False)
    except (dns.exception.DNSException, ValueError):
        raise DnsRefusal(dns.rcode.FORMERR) from None
    if message.flags & dns.flags.QR or message.opcode() != dns.opcode.QUERY:
        raise DnsRefusal(dns.rcode.NOTIMP)
    if len(message.question) != 1 or message.question[0].rdclass != dns.rdataclass.IN:
        raise DnsRefusal(dns.rcode.FORMERR)
    return message


def judge(message: dns.message.Message, policy: Policy) -> AllowedQuestion:
    """The question that may be sent upstream; DnsRefusal for every other."""
    asked = message.question[0]
    text = asked.name.to_text(omit_final_dot=True)
    try:
        name = normalise(text)
    except errors.InvalidRequest:
        raise DnsRefusal(dns.rcode.NXDOMAIN, denials.NOT_A_NAME, text[:80]) from None
    rules = policy.rules_for(name)
    if not rules:
        raise DnsRefusal(dns.rcode.NXDOMAIN, denials.NAME, name)
    if asked.rdtype not in ADDRESS_TYPES:
        raise DnsRefusal(dns.rcode.NOERROR)
    return AllowedQuestion(name, asked.rdtype, rules)


def read(question: AllowedQuestion, reply: dns.message.Message) -> DnsAnswer:
    """Read a reply: the names in it are followed to their addresses."""
    if reply.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
        return DnsAnswer(reply.rcode())
    name = dns.name.from_text(question.name)
    ttl = MAX_PIN
    for _ in range(MAX_CHAIN):
        addresses = _find(reply, name, question.kind)
        if addresses is not None:
            items = cast("list[A]", list(addresses))[:MAX_ADDRESSES]
            found = [ipaddress.ip_address(item.address) for item in items]
            seconds = min(max(min(ttl, addresses.ttl), MIN_PIN), MAX_PIN)
            return DnsAnswer(reply.rcode(), found, seconds)
        alias = _find(reply, name, dns.rdatatype.CNAME)
        if alias is None:
            break
        ttl = min(ttl, alias.ttl)
        name = cast("CNAME", next(iter(alias))).target
    return DnsAnswer(reply.rcode(), seconds=_seconds_of_nothing(reply))


def _seconds_of_nothing(reply: dns.message.Message) -> int:
    """For how long a negative answer is valid (RFC 2308)."""
    for rrset in reply.authority:
        if rrset.rdtype == dns.rdatatype.SOA:
            minimum = cast("list[SOA]", list(rrset))[0].minimum
            return min(max(min(rrset.ttl, minimum), MIN_NOTHING), MAX_NOTHING)
    return MIN_NOTHING


def reduce(question: AllowedQuestion, answer: DnsAnswer, seconds: int | None = None) -> Resolved:
    """The addresses that may be reached; ``seconds`` where that is shorter than their lifetime."""
    left = answer.seconds if seconds is None else seconds
    trusted = any(rule.trusted for rule in question.rules)
    kept = [item for item in answer.addresses if trusted or is_public(item)]
    hidden = [item for item in answer.addresses if item not in kept]
    return Resolved(kept, min(max(left, MIN_PIN), MAX_PIN), hidden)


def _find(
    reply: dns.message.Message, name: dns.name.Name, kind: dns.rdatatype.RdataType
) -> dns.rrset.RRset | None:
    return reply.get_rrset(reply.answer, name, dns.rdataclass.IN, kind)


def refuse(message: dns.message.Message | None, wire: bytes, refused: DnsRefusal) -> bytes:
    """The answer to a question that is not sent upstream."""
    if message is None:
        # Not a message: only its id can be answered.
        return (
            wire[:2] + b"\x81" + bytes([0x80 | refused.rcode]) + b"\0" * 8
            if len(wire) >= 2
            else b""
        )
    answer = dns.message.make_response(message, recursion_available=True)
    answer.set_rcode(refused.rcode)
    if refused.reason[1] and message.edns >= 0:
        text = f"k8e egress policy: {refused.reason[1]}"
        answer.use_edns(0, options=[dns.edns.EDEOption(dns.edns.EDECode.BLOCKED, text)])
    return answer.to_wire()


def respond(message: dns.message.Message, question: AllowedQuestion, resolved: Resolved) -> bytes:
    """The addresses, under the name that was asked; the chain of aliases is left out."""
    answer = dns.message.make_response(message, recursion_available=True)
    if resolved.addresses:
        texts = [str(address) for address in resolved.addresses]
        name = message.question[0].name
        rrset = dns.rrset.from_text_list(
            name, resolved.seconds, dns.rdataclass.IN, question.kind, texts
        )
        answer.answer.append(rrset)
    return answer.to_wire()


def ask(question: AllowedQuestion) -> dns.message.Message:
    """A fresh query for upstream: no byte of the sandbox's own leaves the machine."""
    return dns.message.make_query(question.name, question.kind, use_edns=0, payload=1232)
