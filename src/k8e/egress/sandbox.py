"""A sandbox in egress: its policy, its DNS answers, its denials."""

from __future__ import annotations

import asyncio
import logging

import dns.exception
import dns.name

from k8e.egress import denials, dns_answers, rules
from k8e.egress.denials import DenialRecord, Ledger
from k8e.egress.dns_answers import AnswerCache, CacheKey, DnsAnswer, NameBudget, Rate
from k8e.egress.nflog import Packet
from k8e.egress.nftables import Element
from k8e.egress.pins import PinPlan, Pins, Ports
from k8e.egress.policy import Address, Policy, is_public
from k8e.egress.proxy import ALLOWED, PEEK, ProxyDecision, refused
from k8e.egress.router import Slot
from k8e.egress.rules import BoundPolicy
from k8e.egress.sniff import Said
from k8e.model import DNS_ADDRESS

log = logging.getLogger(__name__)

MAX_QUESTIONS = 100  # of DNS, per second
MAX_ELEMENTS = 1000  # of the kernel's sets that answers of DNS change, per second
MAX_LINES = 5.0  # in the gateway's log, per second
CARRIED_SECONDS = 60  # what was open stays so no longer than that after a change, if not asked for


class SandboxEgress:
    """One attached sandbox."""

    def __init__(self, sandbox_id: str, slot: Slot, cache: AnswerCache | None = None) -> None:
        self.sandbox_id = sandbox_id
        self.slot = slot
        self.bound = BoundPolicy()
        self.binding = asyncio.Lock()
        """Held while a policy is being bound."""
        self.budget = NameBudget()
        self.cache = AnswerCache() if cache is None else cache
        self.pending: dict[CacheKey, asyncio.Task[DnsAnswer | None]] = {}
        """Questions that are on their way to the world."""
        self.rate = Rate(MAX_QUESTIONS, 2 * MAX_QUESTIONS)
        self.elements = Rate(MAX_ELEMENTS, 4 * MAX_ELEMENTS)
        self.ledger = Ledger()
        self.asking = 0
        self.pins = Pins(slot.interface)
        self.unswept: list[Element] = []
        """What the kernel still has, though nothing refers to it any more."""
        self._lines = Rate(MAX_LINES, 20 * MAX_LINES)
        self._unsaid = 0

    # Its DNS answers.

    def open(
        self,
        bound: BoundPolicy,
        question: dns_answers.AllowedQuestion,
        resolved: dns_answers.Resolved,
    ) -> PinPlan | None:
        """Open what the kernel must let through before the sandbox gets its answer.

        None for an answer under a policy that was replaced: it opens nothing.
        """
        if bound is not self.bound:
            return None
        policy = bound.policy
        opened = {
            address: frozenset(policy.ports_for(question.name, address))
            for address in resolved.addresses
        }
        # The proxy of a strict sandbox checks names itself; an open one needs no pins.
        needless = policy.strict or (policy.open and all(map(is_public, opened)))
        return self.pins.open(question.name, opened, resolved.seconds, in_kernel=not needless)

    def still_open(self, policy: Policy) -> dict[Address, dict[str, Ports]]:
        """The open addresses that ``policy`` would allow too."""
        kept: dict[Address, dict[str, Ports]] = {}
        for address, names in self.pins.all_names():
            ports = {name: frozenset(policy.ports_for(name, address)) for name in names if name}
            allowed = {name: found for name, found in ports.items() if found}
            if allowed:
                kept[address] = allowed
        return kept

    def carry(self, bound: BoundPolicy) -> PinPlan:
        """The open addresses that a new policy takes over."""
        carried = self.still_open(bound.policy) if bound.generation else {}
        needless = bound.policy.strict or bound.policy.open
        return self.pins.carry(bound.generation, carried, CARRIED_SECONDS, in_kernel=not needless)

    # Its denials.

    def deny(
        self,
        reason: tuple[str, str],
        *,
        name: str = "",
        address: str = "",
        port: int = 0,
        protocol: str = "",
    ) -> None:
        kind, words = reason
        self.ledger.add(DenialRecord(name, address, port, protocol, words), kind)
        if not self._lines.allows():
            self._unsaid += 1
            return
        target = name or address
        if self._unsaid:
            words, self._unsaid = f"{words}; {self._unsaid} more were refused before this", 0
        log.info(
            "egress of %s refused: %s %s %s: %s", self.sandbox_id, protocol, target, port, words
        )

    def deny_packet(self, packet: Packet) -> None:
        """Explain why the kernel refused a packet."""
        name = self._names(packet.address)
        asked = _question(packet)
        reason = self._why(packet, name)
        address, port = str(packet.address), packet.port
        if asked and address == DNS_ADDRESS:
            address, port = "", 0  # the name says it all
        protocol = "dns" if asked else packet.protocol
        self.deny(reason, name=asked or name, address=address, port=port, protocol=protocol)

    def _why(self, packet: Packet, name: str) -> tuple[str, str]:
        if self.bound.policy.silent:
            return denials.NO_NETWORK
        if packet.crowded:
            return denials.CROWDED
        if packet.many:
            return denials.RATE if packet.port == rules.DNS_PORT else denials.FLOWS
        if packet.port in (rules.DNS_PORT, 853):
            return denials.RESOLVER
        if not is_public(packet.address):
            return denials.PRIVATE
        if name:
            return denials.PORT[0], denials.PORT[1].format(name)
        return denials.FORGOTTEN if self.pins.dropped else denials.ADDRESS

    def _names(self, address: Address) -> str:
        """A name that led to an address."""
        return min(self.pins.names(address), default="")

    # Strict mode.

    def decide(
        self, address: Address, port: int, said: Said | None, *, again: bool = False
    ) -> ProxyDecision:
        """Whether a connection of a strict sandbox may be made, or continue (``again``).

        The proxy calls this. An open connection outlives the answer that led to its address.
        """
        policy = self.bound.policy
        if any(
            rule.network is not None
            and address in rule.network
            and rule.port in (0, port)
            and (rule.trusted or is_public(address))
            for rule in policy.rules
        ):
            return ALLOWED
        led = (self.pins.names if again else self.pins.open_names)(address).items()
        names = {name for name, ports in led if not ports.isdisjoint((0, port))}
        if not names:
            reason = self._why_unknown(address, led=bool(led))
        elif said is None:
            return PEEK
        elif said.reason:
            reason = denials.STRICT[0], said.reason
        elif said.name in names and _allows(policy, said.name, address, port):
            return ALLOWED
        else:
            reason = denials.NAME
        name = said.name if said is not None else ""
        self.deny(reason, name=name, address=str(address), port=port, protocol="tcp")
        return refused(reason[1])

    def _why_unknown(self, address: Address, *, led: bool) -> tuple[str, str]:
        """Why no name allows an address; ``led`` means that a name allows another port."""
        if self._names(address) and not led:
            return denials.EXPIRED
        if not is_public(address):
            return denials.PRIVATE
        return denials.FORGOTTEN if self.pins.dropped else denials.ADDRESS


def _allows(policy: Policy, name: str, address: Address, port: int) -> bool:
    return not policy.ports_for(name, address).isdisjoint((0, port))


def _question(packet: Packet) -> str:
    """The name in a refused DNS question, if there is one."""
    if packet.protocol != "udp" or packet.port != rules.DNS_PORT:
        return ""
    try:
        name, _ = dns.name.from_wire(packet.payload, 12)
    except (dns.exception.DNSException, IndexError, ValueError):
        return ""
    return name.to_text(omit_final_dot=True).lower()
