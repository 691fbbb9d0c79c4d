"""Admission of connections: how many may be open without a credential.

Any client can open connections and send nothing. So those without a credential have a bounded
number of places. When these are taken, a newcomer gets in nevertheless, and a silent connection is
closed: first one of the group that has the most places. A group is a range of addresses, since an
attacker has many addresses and few ranges. Connections from this machine, and those from addresses
whose users were known a while ago, have places of their own.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any

from k8e import access

GRACE_SECONDS = 0.25
"""How long a connection may take to speak before the oldest has to leave first.

Where all have come within this time, chance decides: many honest callers at once would otherwise
all lose the place for which they have waited longest.
"""
KNOWN_SECONDS = 7 * 24 * 3600.0
MAX_KNOWN = 4096  # addresses that are remembered
ADMIT = "k8e.admit"
"""Where an HTTP server leaves a function in the state of a request, for :func:`admit_request`."""


class UnknownConnection:
    """A connection that has shown no credential yet."""

    __slots__ = ("address", "expel", "group", "pool", "since")

    def __init__(self, address: str, group: str, expel: Callable[[], object]) -> None:
        self.address = address
        self.group = group
        self.expel = expel
        self.since = time.monotonic()
        self.pool: ConnectionPool | None = None

    def leave(self) -> None:
        """Give the place back; the connection has ended, or its caller is known."""
        if self.pool is not None:
            self.pool.remove(self)


class ConnectionPool:
    """The places of one kind of strangers."""

    def __init__(self, room: int, room_of_address: int) -> None:
        self._room = room
        self._room_of_address = room_of_address
        self._groups: dict[str, dict[UnknownConnection, None]] = {}  # oldest first
        self._all: dict[UnknownConnection, None] = {}  # oldest first
        self._of_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, stranger: UnknownConnection) -> None:
        """Give a place to a newcomer, and close another connection if there is none left."""
        self._make_room(stranger)
        stranger.pool = self
        self._all[stranger] = None
        self._groups.setdefault(stranger.group, {})[stranger] = None
        self._of_address[stranger.address] += 1

    def remove(self, stranger: UnknownConnection) -> None:
        if stranger.pool is not self:
            return
        stranger.pool = None
        del self._all[stranger]
        group = self._groups[stranger.group]
        del group[stranger]
        if not group:
            del self._groups[stranger.group]
        self._of_address[stranger.address] -= 1
        if not self._of_address[stranger.address]:
            del self._of_address[stranger.address]

    def _make_room(self, newcomer: UnknownConnection) -> None:
        group = self._groups.get(newcomer.group, {})
        if self._of_address[newcomer.address] >= self._room_of_address:
            self._expel_one([item for item in group if item.address == newcomer.address])
        elif len(self._all) >= self._room:
            largest = max(self._groups.values(), key=len)
            if len(largest) <= len(group) + 1:  # then of groups as large as the newcomer's own
                large = (found for found in self._groups.values() if len(found) >= len(group))
                largest = sorted((item for found in large for item in found), key=_since)
            self._expel_one(list(largest))

    def _expel_one(self, oldest_first: list[UnknownConnection]) -> None:
        leaves = oldest_first[0]
        if time.monotonic() - leaves.since < GRACE_SECONDS:
            leaves = secrets.choice(oldest_first)
        self.remove(leaves)
        leaves.expel()


def _since(stranger: UnknownConnection) -> float:
    return stranger.since


class Admission:
    """The places of one listener."""

    def __init__(self, room: int, room_of_address: int) -> None:
        """``room`` is for each of three: any stranger, this machine, and known addresses."""
        self._anybody, self._here, self._familiar = (
            ConnectionPool(room, room_of_address) for _ in range(3)
        )
        self._known: OrderedDict[str, float] = OrderedDict()

    def enter(
        self, address: str, expel: Callable[[], object], *, group: str = ""
    ) -> UnknownConnection:
        """A place for a new connection.

        Args:
            address: where it comes from.
            expel: ends the connection, because its place is needed; called once at most.
            group: who it shares its places with; by default the range of its address.
        """
        stranger = UnknownConnection(address, group or access.span(address), expel)
        self._pool(address).add(stranger)
        return stranger

    def _pool(self, address: str) -> ConnectionPool:
        if access.is_local_address(address):
            return self._here
        since = self._known.get(access.group(address))
        familiar = since is not None and time.monotonic() - since < KNOWN_SECONDS
        return self._familiar if familiar else self._anybody

    def vouch(self, stranger: UnknownConnection) -> None:
        """Note that it has shown something that strangers lack, such as a certificate of ours."""
        if stranger.pool is self._anybody:
            stranger.leave()
            self._familiar.add(stranger)

    def admit(self, stranger: UnknownConnection) -> None:
        """Note a credential: the connection needs no place any more; remember its address."""
        stranger.leave()
        if access.is_local_address(stranger.address):
            return
        key = access.group(stranger.address)
        self._known.pop(key, None)
        self._known[key] = time.monotonic()
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def __len__(self) -> int:
        return sum(map(len, (self._anybody, self._here, self._familiar)))


def admit_request(scope: MutableMapping[str, Any]) -> None:
    """Tell the HTTP server that a request had a credential, where the server asks for that."""
    tell = scope.get("state", {}).get(ADMIT)
    if tell is not None:
        tell()
