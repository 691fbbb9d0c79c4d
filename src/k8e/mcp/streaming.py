"""Output of a program as progress.

What comes is put together for a moment, so that a flood of output is no flood of messages.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import AsyncGenerator

from k8e.mcp.calls import Teller

EVERY = 0.1  # seconds between two messages
MAX_MESSAGE = 8 << 10  # characters of one message; the whole output is in the result
SKIPPED = "…"


class Streamed:
    """Takes output as it comes, and tells it."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self._count = 0  # bytes by now: progress must grow

    def add(self, data: bytes) -> None:
        if self._teller.heard:
            self._count += len(data)
            self._held += self._decode(data)
            if len(self._held) > MAX_MESSAGE:
                self._held = SKIPPED + self._held[-MAX_MESSAGE:]

    async def flush(self) -> None:
        if self._held:
            text, self._held = self._held, ""
            await self._teller.tell(self._count, text)


@contextlib.asynccontextmanager
async def streamed(teller: Teller) -> AsyncGenerator[Streamed]:
    """Tell what is added while the block runs; the last of it at its end."""
    found = Streamed(teller)
    if not teller.heard:
        yield found
        return
    telling = asyncio.create_task(_tell(found))
    try:
        yield found
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
    await found.flush()


async def _tell(found: Streamed) -> None:
    while True:
        await asyncio.sleep(EVERY)
        await found.flush()
