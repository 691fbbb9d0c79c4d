"""Where exposed services listen: each on a loopback address of its own.

Cookies know no ports. On an address of its own, a service's cookies reach no other service, and
those of the user's other local services never reach a sandbox.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import NamedTuple

from k8e import errors, rootless

SHARED = "127.0.0.1"
ATTEMPTS = 20
# Root's own: while a gateway is down, no other user can take such a port and wait for our cookies.
# None of these is on the list of ports that browsers refuse.
PRIVILEGED = range(640, 980)


class Place(NamedTuple):
    """A socket that listens, and what its user should know about it."""

    socket: socket.socket
    address: str
    port: int
    warning: str = ""


def listen(address: str, port: int) -> socket.socket:
    """A socket that takes connections there; OSError if that cannot be."""
    # With the protocol named: asyncio turns Nagle's algorithm off only where it sees TCP, and with
    # it an answer whose head and body are sent apart takes 40 ms.
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Connections of before may still be dying; two listeners it does not allow.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setblocking(False)
        found.bind((address, port))
        found.listen()
    except BaseException:
        found.close()
        raise
    return found


def find_place() -> Place:
    """A random address and port; the address that all share only where there is no other."""
    failure: OSError | None = None
    for attempt in range(ATTEMPTS):
        address = _random_address()
        # Root without the right to take such a port gets one of the others.
        port = _random_port() if attempt < ATTEMPTS // 2 else 0
        try:
            return _placed(listen(address, port), address)
        except OSError as error:
            failure = error
    try:
        found = _placed(listen(SHARED, 0), SHARED)
    except OSError as error:
        raise errors.LimitExceeded(f"no loopback port can be had: {error.strerror}") from None
    reason = failure.strerror if failure is not None else "nothing was tried"
    return found._replace(
        warning=f"no loopback address but {SHARED} can be used here ({reason}), so browsers send "
        "the service's cookies to every other service on it, and theirs to this one"
    )


def _placed(found: socket.socket, address: str) -> Place:
    return Place(found, address, int(found.getsockname()[1]))


def _random_address() -> str:
    """One of 127.1.0.1 to 127.255.255.254; what is below 127.1 has its users already."""
    first, last = 1 + secrets.randbelow(255), 1 + secrets.randbelow(254)
    return f"127.{first}.{secrets.randbelow(256)}.{last}"


def _random_port() -> int:
    return secrets.choice(PRIVILEGED) if os.geteuid() == 0 and not rootless.inside() else 0
