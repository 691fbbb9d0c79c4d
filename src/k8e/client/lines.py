"""The gRPC channels of one client, one for each version of its certificates.

Calls go by the newest. Older ones stay for the calls that are under way on them, and are closed
with the last of those: a client whose certificates change often has no more channels than calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Stream = TypeVar("Stream")


class Lines:
    """Which call goes by which channel; what comes back is to be closed by whoever asked."""

    def __init__(self) -> None:
        self._newest: Any = None
        self._used: dict[Any, set[Any]] = {}  # of each channel, the calls under way
        self._lock = threading.RLock()

    def renew(self, renewed: Callable[[], Any]) -> None:
        """``renewed`` gives a channel that is the newest from now on, or None."""
        with self._lock:
            if (channel := renewed()) is not None:
                self._newest = channel
                self._used[channel] = set()

    def take(self, renewed: Callable[[], Any], begin: Callable[[], Stream]) -> Stream:
        """What ``begin`` makes: a call on the newest channel."""
        with self._lock:  # so that nobody finds a channel unused that is about to be used
            self.renew(renewed)
            stream = begin()
            self._used[self._newest].add(stream)
            return stream

    def is_newest(self, stream: Any) -> bool:
        """Whether a call goes by the newest channel; others are not kept for the next operation."""
        return stream in self._used.get(self._newest, ())

    def give_back(self, stream: Any) -> list[Any]:
        """A call has ended; the channels that nobody needs any more."""
        with self._lock:
            for streams in self._used.values():
                streams.discard(stream)
            return self.unused()

    def unused(self) -> list[Any]:
        """The channels that nobody needs any more, each told once."""
        with self._lock:
            items = self._used.items()
            found = [each for each, streams in items if not streams and each is not self._newest]
            for channel in found:
                del self._used[channel]
            return found

    def clear(self) -> list[Any]:
        """All channels."""
        with self._lock:
            found = [*self._used]
            self._used.clear()
            self._newest = None
            return found
