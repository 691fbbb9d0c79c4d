"""What the DNS responder decides, without any network: questions in, decisions and answers out."""

from __future__ import annotations

import ipaddress
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
from k8e.egress.budget import Budget
from k8e.egress.policy import Address, Policy, Rule, is_public, normalise

if TYPE_CHECKING:
    from dns.rdtypes.ANY.CNAME import CNAME
    from dns.rdtypes.IN.A import A

MIN_PIN, MAX_PIN = 30, 3600  # seconds that an address stays reachable, whatever its TTL says
MAX_CHAIN = 8  # names that an answer may lead through
MAX_ADDRESSES = 8  # so that an answer always fits into a datagram of 512 bytes
# Types that lead to an address. Others (TXT, NULL, HTTPS, …) are answered as empty: they are what
# tunnels are made of, and nothing that connects by name needs them.
ADDRESS_TYPES = (dns.rdatatype.A, dns.rdatatype.AAAA)


@dataclass(frozen=True)
class Question:
    """A question that may be asked of the world."""

    name: str
    kind: dns.rdatatype.RdataType
    rules: list[Rule]


@dataclass
class Refused(Exception):
    """A question that is answered at once, and how."""

    rcode: dns.rcode.Rcode
    reason: tuple[str, str] = ("", "")
    """Why (one of those in denials); empty for what is not a denial."""
    name: str = ""


@dataclass(frozen=True)
class Resolved:
    """What the world said, reduced to what the policy allows."""

    addresses: list[Address] = field(default_factory=list[Address])
    seconds: int = MIN_PIN
    chain: list[str] = field(default_factory=list[str])
    hidden: list[Address] = field(default_factory=list[Address])
    """Addresses that the world gave and the policy does not let through."""


def parse(wire: bytes) -> dns.message.Message:
    """A query, or Refused for what is none."""
    try:
        message = dns.message.from_wire(wire, ignore_trailing=False)
    except (dns.exception.DNSException, ValueError):
        raise Refused(dns.rcode.FORMERR) from None
    if message.flags & dns.flags.QR or message.opcode() != dns.opcode.QUERY:
        raise Refused(dns.rcode.NOTIMP)
    if len(message.question) != 1 or message.question[0].rdclass != dns.rdataclass.IN:
        raise Refused(dns.rcode.FORMERR)
    return message


def judge(message: dns.message.Message, policy: Policy, budget: Budget) -> Question:
    """The question that may be asked of the world; Refused for every other."""
    asked = message.question[0]
    text = asked.name.to_text(omit_final_dot=True)
    try:
        name = normalise(text)
    except errors.InvalidRequest:
        raise Refused(dns.rcode.NXDOMAIN, denials.NOT_A_NAME, text[:80]) from None
    rules = policy.rules_for(name)
    if not rules:
        raise Refused(dns.rcode.NXDOMAIN, denials.NAME, name)
    if all(rule.below for rule in rules) and not budget.allows(name, rules[0].name):
        raise Refused(dns.rcode.NXDOMAIN, denials.BUDGET, name)
    if asked.rdtype not in ADDRESS_TYPES:
        raise Refused(dns.rcode.NOERROR)
    return Question(name, asked.rdtype, rules)


def reduce(question: Question, reply: dns.message.Message) -> Resolved:
    """Follow the names of a reply to its addresses, and keep those that may be reached."""
    name = dns.name.from_text(question.name)
    chain: list[str] = []
    ttl = MAX_PIN
    for _ in range(MAX_CHAIN):
        addresses = _find(reply, name, question.kind)
        if addresses is not None:
            ttl = min(ttl, addresses.ttl)
            break
        alias = _find(reply, name, dns.rdatatype.CNAME)
        if alias is None:
            return Resolved(chain=chain)
        ttl = min(ttl, alias.ttl)
        name = cast("CNAME", next(iter(alias))).target
        chain.append(name.to_text(omit_final_dot=True).lower())
    else:
        return Resolved(chain=chain)
    items = cast("list[A]", list(addresses))
    found = [ipaddress.ip_address(item.address) for item in items][:MAX_ADDRESSES]
    trusted = any(rule.trusted for rule in question.rules)
    kept = [item for item in found if trusted or is_public(item)]
    hidden = [item for item in found if item not in kept]
    return Resolved(kept, min(max(ttl, MIN_PIN), MAX_PIN), chain, hidden)


def _find(
    reply: dns.message.Message, name: dns.name.Name, kind: dns.rdatatype.RdataType
) -> dns.rrset.RRset | None:
    return reply.get_rrset(reply.answer, name, dns.rdataclass.IN, kind)


def refuse(message: dns.message.Message | None, wire: bytes, refused: Refused) -> bytes:
    """The answer to a question that is not asked of the world."""
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


def respond(message: dns.message.Message, question: Question, resolved: Resolved) -> bytes:
    """The addresses, under the name that was asked; the chain between is nobody's business."""
    answer = dns.message.make_response(message, recursion_available=True)
    if resolved.addresses:
        texts = [str(address) for address in resolved.addresses]
        name = message.question[0].name
        rrset = dns.rrset.from_text_list(
            name, resolved.seconds, dns.rdataclass.IN, question.kind, texts
        )
        answer.answer.append(rrset)
    return answer.to_wire()


def ask(question: Question) -> dns.message.Message:
    """A fresh query for the world: nothing of the sandbox's own bytes goes out."""
    return dns.message.make_query(question.name, question.kind, use_edns=0, payload=1232)
