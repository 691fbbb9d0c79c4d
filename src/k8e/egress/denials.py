"""Denials: what sandboxes were refused, and why, in words that a model can act upon."""

from __future__ import annotations

import collections
import time
from dataclasses import asdict, dataclass
from typing import Any

from k8e import metrics

KEPT = 1000  # of one sandbox; the newest
MOST_TOLD = 20  # with one run
MOST_LISTED = 200

# Why something is refused: a key for counting, and the text.
NAME = "name", "not in the allow-list"
NO_NETWORK = "name", "this session has no network (its allow-list is empty)"
NOT_A_NAME = "name", "not a host name"
BUDGET = "rate", "too many different names below a wildcard"
ELEMENTS = "rate", "too many new addresses at once"
FULL = "rate", "its address could not be opened: {}"
RATE = "rate", "too many questions at once"
FLOWS = "rate", "too many connections at once"
_CROWD = "the sandboxes of this machine have too many connections together, and this one more than "
CROWDED = "rate", _CROWD + "its sure share: close some (nf_conntrack_max bounds them)"
PRIVATE_NAME = "private", "it resolves to a private address ({})"
PRIVATE = "private", "private, local and metadata addresses cannot be reached"
RESOLVER = "resolver", "only the resolver in /etc/resolv.conf may be asked"
PORT = "port", "another port than {} allows"
ADDRESS = "address", "no allowed name led to this address"
_LATELY = "no allowed name led to this address lately: look its name up again, since this session "
FORGOTTEN = "address", _LATELY + "has looked up more addresses than are remembered"
EXPIRED = "address", "the answer that led to this address has expired: look its name up again"
UPSTREAM = "upstream", "the resolvers of the host do not answer"
STRICT = "strict", "{}"


@dataclass(frozen=True)
class DenialRecord:
    """Something that a sandbox was not allowed to reach."""

    name: str
    address: str
    port: int
    protocol: str
    """``tcp``, ``udp``, ``icmp`` or ``dns``; ``any`` where there is no network."""
    rule: str
    """Why, in words."""


def without_network(why: str) -> dict[str, Any]:
    """The denials of a sandbox without network, whose packets never leave it to be seen."""
    rule = f"this sandbox has no network: {why}"
    return {**asdict(DenialRecord("*", "", 0, "any", rule)), "count": 1}


class Ledger:
    """The denials of one sandbox."""

    def __init__(self) -> None:
        self.total = 0
        self._kept: collections.deque[tuple[int, float, DenialRecord]] = collections.deque(
            maxlen=KEPT
        )

    def add(self, denial: DenialRecord, reason: str) -> None:
        self.total += 1
        self._kept.append((self.total, time.time(), denial))
        metrics.count_denial(reason)

    def since(self, mark: int, until: int | None = None) -> list[dict[str, Any]]:
        """The refusals since the total was ``mark``: each once, with a count."""
        last = self.total if until is None else until
        if mark >= last:
            return []
        counts = collections.Counter(item for at, _, item in self._kept if mark < at <= last)
        return [{**asdict(item), "count": counts[item]} for item in list(counts)[:MOST_TOLD]]

    def listing(self) -> list[dict[str, Any]]:
        """The newest denials, each with the time when it last happened."""
        found: dict[DenialRecord, dict[str, Any]] = {}
        for _, at, item in self._kept:
            count = found.pop(item, {"count": 0})["count"]
            found[item] = {"at": at, **asdict(item), "count": count + 1}
        return list(found.values())[-MOST_LISTED:]
