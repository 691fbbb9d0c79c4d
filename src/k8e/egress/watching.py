"""Watching the world: the kernel tells when its addresses, links or firewalls change.

Somebody may flush all rules, restart a firewall or start Docker, and the uplink must be mended.
What is told is only that something changed; looking at everything again is quick, and changes
nothing where all is well, so that the answer to a change does not wake us for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from pathlib import Path

from k8e.egress import firewalls, namespaces
from k8e.egress.netlink import messages

QUICK_SECONDS = 0.1
# Where something changes all the time, or somebody undoes what we do, we look less often.
SLOW_SECONDS = 2.0
_BUFFER, _MESSAGE = 1 << 20, 1 << 17
_SO_RCVBUFFORCE = 33
# Links, addresses of IPv4 and IPv6, and the switches of forwarding.
_ROUTE_GROUPS = (1, 5, 9, 24, 25)
_NFT_GROUPS = (7,)
_PROTOCOLS = (
    (socket.NETLINK_ROUTE, _ROUTE_GROUPS),
    (firewalls.NETLINK_NETFILTER, _NFT_GROUPS),
)
# Tables deleted, chains and rules made or deleted; changed sets are nobody's forwarding.
_NFT_KINDS = frozenset(firewalls.NFT | kind for kind in (2, 3, 5, 6, 8))


class Watcher:
    """Calls ``on_change`` on the running loop, once for everything that changes together."""

    def __init__(self, world: Path, on_change: Callable[[], object], *, rules: bool = True) -> None:
        """Only root of a namespace may watch ``rules`` of its firewalls; the rest, everybody."""
        self._world = world
        self._protocols = _PROTOCOLS if rules else _PROTOCOLS[:1]
        self._on_change = on_change
        self._sockets: list[socket.socket] = []
        self._timer: asyncio.TimerHandle | None = None
        self._delay = QUICK_SECONDS
        self._told = 0.0

    def start(self) -> None:
        """Listen from now on."""
        self._loop = asyncio.get_running_loop()
        self._sockets = namespaces.run_in(self._world, lambda: _listen(self._protocols))
        for item in self._sockets:
            self._loop.add_reader(item, self._read, item)

    def close(self) -> None:
        """Stop listening; ``on_change`` is not called any more."""
        for item in self._sockets:
            self._loop.remove_reader(item)
            item.close()
        self._sockets = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read(self, item: socket.socket) -> None:
        changed = False
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    changed = _matters(item.recv(_MESSAGE)) or changed
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        raise
                    changed = True  # more than could be kept for us; what, we shall see
        if changed and self._timer is None:
            calm = self._loop.time() - self._told > 2 * self._delay
            self._delay = QUICK_SECONDS if calm else min(2 * self._delay, SLOW_SECONDS)
            self._timer = self._loop.call_later(self._delay, self._tell)

    def _tell(self) -> None:
        self._timer = None
        self._told = self._loop.time()
        self._on_change()


def _listen(protocols: tuple[tuple[int, tuple[int, ...]], ...]) -> list[socket.socket]:
    """In the world: the sockets on which the kernel tells."""
    made: list[socket.socket] = []
    for protocol, groups in protocols:
        item = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        try:
            item.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        except PermissionError:  # without root there is no more than everybody has
            item.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        item.bind((0, sum(1 << group - 1 for group in groups)))
        item.setblocking(False)
        made.append(item)
    return made


def _matters(data: bytes) -> bool:
    """Whether a message tells of anything that an uplink stands on."""
    for kind, _, body in messages(data):
        if kind >> 8 == 0:  # not a firewall's
            return True
        if kind in _NFT_KINDS and body[0] in firewalls.FAMILIES:
            return True
    return False
