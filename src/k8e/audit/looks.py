"""Who looks at the trail: one thread reads at a time, and nobody keeps it to themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from k8e import errors

MAX_LOOKS = 8  # of one principal at once, those that wait for rows included

T = TypeVar("T")


class Looks:
    """Lets readers in, one after the other in the order in which they came."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._of: Counter[str] = Counter()

    @contextlib.contextmanager
    def by(self, principal: str) -> Generator[None]:
        """Count a look; LimitExceeded if the principal has too many already."""
        if self._of[principal] >= MAX_LOOKS:
            raise errors.LimitExceeded(
                f"{MAX_LOOKS} calls of yours read the audit trail at once",
                hint="let one of them end, and try again",
            )
        self._of[principal] += 1
        try:
            yield
        finally:
            self._of[principal] -= 1
            if not self._of[principal]:
                del self._of[principal]

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Do a bounded piece of reading in a thread.

        A caller who leaves does not stop the thread. The next one's turn comes when it has ended:
        otherwise whoever asks and leaves would fill the threads that others need.
        """
        await self._turn.acquire()
        work = asyncio.ensure_future(asyncio.to_thread(function, *args))
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._turn.release()
        if not work.cancelled():
            work.exception()  # whoever asked was told, or has left
