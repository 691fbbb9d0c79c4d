"""TCP ports for gateways of checks and tests, each handed to one process of this machine."""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

from k8e.conformance.outcomes import BrokenPromise

BLOCK = 100
"""Ports of one process."""
BLOCKS = 100
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first port that the kernel gives to connections, and to programs that ask for any."""


def free_port() -> int:
    """A free port of the loopback interface that no other program will get.

    One that the kernel chooses for us could be taken again by anybody, a connection too, before
    the gateway that it is for listens there.
    """
    ports = _own_ports()
    for port in itertools.islice(ports, BLOCK):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise BrokenPromise(f"{BLOCK} ports of 127.0.0.1 are all in use")


@functools.cache
def _own_ports() -> Iterator[int]:
    """The ports of this process, one after the other, over and over."""
    end = int(EPHEMERAL.read_text("ascii").split()[0])
    first = max(1024, end - BLOCKS * BLOCK)
    for start in range(first, first + BLOCKS * BLOCK, BLOCK):
        if reserve(f"ports-{start}"):
            return itertools.cycle(range(start, start + BLOCK))
    raise BrokenPromise("no ports are left: too many checks and tests run on this machine")


def reserve(name: str) -> bool:
    """Reserve a name until this process ends; False if another process of this machine has it."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0k8e-checks-{name}")
    except OSError:
        holder.close()
        return False
    holder.detach()  # open until the process ends, however it ends
    return True
