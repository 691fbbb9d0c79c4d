"""A sandbox as egress knows it: what is bound to it, what DNS told it, what it was refused."""

from __future__ import annotations

import logging

import dns.exception
import dns.name

from k8e.egress import answers, denials, rules
from k8e.egress.budget import Budget, Rate
from k8e.egress.denials import Denial, Ledger
from k8e.egress.nflog import Packet
from k8e.egress.policy import Address, Policy, is_public
from k8e.egress.proxy import ALLOWED, PEEK, Decision, Said, refused
from k8e.egress.router import Slot, Target
from k8e.egress.rules import Bound, Pin
from k8e.model import DNS_ADDRESS

log = logging.getLogger(__name__)

MAX_OPENED = 1024  # addresses that are remembered with their names
MAX_QUESTIONS = 100  # of DNS, per second
MAX_NAMES = 64  # of one address


class Client:
    """One attached sandbox."""

    def __init__(self, sandbox_id: str, slot: Slot) -> None:
        self.sandbox_id = sandbox_id
        self.slot = slot
        self.bound = Bound()
        self.budget = Budget()
        self.rate = Rate(MAX_QUESTIONS, 2 * MAX_QUESTIONS)
        self.ledger = Ledger()
        self.asking = 0
        self._opened: dict[Target, set[str]] = {}

    # What DNS told it.

    def open(
        self, bound: Bound, question: answers.Question, resolved: answers.Resolved
    ) -> list[Pin]:
        """Remember what the sandbox is about to be told; what the kernel has to let through."""
        targets = [
            (address, port)
            for address in resolved.addresses
            for port in bound.policy.ports_for(question.name, address)
        ]
        if bound is self.bound:
            for target in targets:
                names = self._opened.pop(target, set())  # newest last, the oldest is forgotten
                if len(names) < MAX_NAMES:
                    names.add(question.name)
                self._opened[target] = names
            while len(self._opened) > MAX_OPENED:
                del self._opened[next(iter(self._opened))]
        if bound.policy.strict:
            return []  # the proxy lets through what says its name
        return [Pin(bound.generation, address, port, resolved.seconds) for address, port in targets]

    def still_open(self, policy: Policy) -> dict[Target, set[str]]:
        """What was opened and would be under ``policy``."""
        kept: dict[Target, set[str]] = {}
        for (address, port), names in self._opened.items():
            allowed = {name for name in names if _allows(policy, name, address, port)}
            if allowed:
                kept[address, port] = allowed
        return kept

    def rebind(self, bound: Bound) -> None:
        """Take over a new policy, with what it still allows."""
        self._opened = self.still_open(bound.policy)
        self.bound = bound

    # What it was refused.

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
        self.ledger.add(Denial(name, address, port, protocol, words), kind)
        target = name or address
        log.info(
            "egress of %s refused: %s %s %s: %s", self.sandbox_id, protocol, target, port, words
        )

    def deny_packet(self, packet: Packet) -> None:
        """Say why the kernel refused a packet."""
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
        if packet.many:
            return denials.RATE if packet.port == rules.DNS_PORT else denials.FLOWS
        if packet.port in (rules.DNS_PORT, 853):
            return denials.RESOLVER
        if not is_public(packet.address):
            return denials.PRIVATE
        if name:
            return denials.PORT[0], denials.PORT[1].format(name)
        return denials.ADDRESS

    def _names(self, address: Address) -> str:
        """A name that led to an address."""
        for (opened, _), names in reversed(self._opened.items()):
            if opened == address:
                return min(names)
        return ""

    # Strict mode.

    def decide(self, address: Address, port: int, said: Said | None) -> Decision:
        """Whether a connection of a strict sandbox may be made; the proxy asks."""
        policy = self.bound.policy
        if any(
            rule.network is not None
            and address in rule.network
            and rule.port in (0, port)
            and (rule.trusted or is_public(address))
            for rule in policy.rules
        ):
            return ALLOWED
        names = self._opened.get((address, port), set()) | self._opened.get((address, 0), set())
        if not names:
            reason = denials.ADDRESS if is_public(address) else denials.PRIVATE
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
