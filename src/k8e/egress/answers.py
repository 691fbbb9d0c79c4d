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
from k8e.egress.cache import Answer, Key
from k8e.egress.policy import Address, Policy, Rule, is_public, normalise

if TYPE_CHECKING:
    from dns.rdtypes.ANY.CNAME import CNAME
    from dns.rdtypes.ANY.SOA import SOA
    from dns.rdtypes.IN.A import A

MIN_PIN, MAX_PIN = 30, 3600  # seconds that an address stays reachable, whatever its TTL says
MIN_NOTHING, MAX_NOTHING = 5, 300  # seconds for which it is believed that a name has no address
MAX_QUESTION = 1232  # bytes; reading more takes too long, and a name has 255 at most
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

    @property
    def key(self) -> Key:
        return self.name, int(self.kind)

    @property
    def base(self) -> str:
        """What the name stands below, where only wildcards allow it; empty for other names."""
        if not all(rule.below for rule in self.rules):
            return ""
        return min((rule.name for rule in self.rules), key=len, default="")


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
    hidden: list[Address] = field(default_factory=list[Address])
    """Addresses that the world gave and the policy does not let through."""


def parse(wire: bytes) -> dns.message.Message:
    """A query, or Refused for what is none."""
    if len(wire) > MAX_QUESTION or int.from_bytes(wire[6:12], "big") > 2:
        raise Refused(dns.rcode.FORMERR)  # records are for answers; one of EDNS may follow, or two
    try:
        message = dns.message.from_wire(wire, ignore_trailing=False)
    except (dns.exception.DNSException, ValueError):
        raise Refused(dns.rcode.FORMERR) from None
    if message.flags & dns.flags.QR or message.opcode() != dns.opcode.QUERY:
        raise Refused(dns.rcode.NOTIMP)
    if len(message.question) != 1 or message.question[0].rdclass != dns.rdataclass.IN:
        raise Refused(dns.rcode.FORMERR)
    return message


def judge(message: dns.message.Message, policy: Policy) -> Question:
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
    if asked.rdtype not in ADDRESS_TYPES:
        raise Refused(dns.rcode.NOERROR)
    return Question(name, asked.rdtype, rules)


def read(question: Question, reply: dns.message.Message) -> Answer:
    """What a reply says: the names in it are followed to their addresses."""
    if reply.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
        return Answer(reply.rcode())
    name = dns.name.from_text(question.name)
    ttl = MAX_PIN
    for _ in range(MAX_CHAIN):
        addresses = _find(reply, name, question.kind)
        if addresses is not None:
            items = cast("list[A]", list(addresses))[:MAX_ADDRESSES]
            found = [ipaddress.ip_address(item.address) for item in items]
            seconds = min(max(min(ttl, addresses.ttl), MIN_PIN), MAX_PIN)
            return Answer(reply.rcode(), found, seconds)
        alias = _find(reply, name, dns.rdatatype.CNAME)
        if alias is None:
            break
        ttl = min(ttl, alias.ttl)
        name = cast("CNAME", next(iter(alias))).target
    return Answer(reply.rcode(), seconds=_seconds_of_nothing(reply))


def _seconds_of_nothing(reply: dns.message.Message) -> int:
    """For how long it holds that there is no address (RFC 2308)."""
    for rrset in reply.authority:
        if rrset.rdtype == dns.rdatatype.SOA:
            minimum = cast("list[SOA]", list(rrset))[0].minimum
            return min(max(min(rrset.ttl, minimum), MIN_NOTHING), MAX_NOTHING)
    return MIN_NOTHING


def reduce(question: Question, answer: Answer, seconds: int | None = None) -> Resolved:
    """The addresses that may be reached, for ``seconds`` where that is not all of their time."""
    left = answer.seconds if seconds is None else seconds
    trusted = any(rule.trusted for rule in question.rules)
    kept = [item for item in answer.addresses if trusted or is_public(item)]
    hidden = [item for item in answer.addresses if item not in kept]
    return Resolved(kept, min(max(left, MIN_PIN), MAX_PIN), hidden)


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
