"""Stand-ins for the parts of ``posix`` that the quick path uses, for other systems."""

from __future__ import annotations

import os
from os import O_RDONLY, close, open, read, stat, urandom, write  # noqa: A004 - posix's own names

O_CLOEXEC = getattr(os, "O_NOINHERIT", 0)
O_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
environ = {
    key.encode("utf-8", "surrogateescape"): value.encode("utf-8", "surrogateescape")
    for key, value in os.environ.items()
}

__all__ = [
    "O_CLOEXEC",
    "O_NONBLOCK",
    "O_RDONLY",
    "close",
    "environ",
    "open",
    "read",
    "stat",
    "urandom",
    "write",
]


def geteuid() -> int:
    return -1
