"""One gateway's connections to PostgreSQL: reads, writes in order, and news of other gateways.

Nothing here blocks the event loop, and nothing waits for ever: a read or a write fails with
StoreUnreachable when the database does not answer within ``PATIENCE`` seconds. A write that is
``kept`` is retried until it is committed, even if no caller waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

import psycopg
from sqlalchemy import URL, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from k8e import errors
from k8e.postgres.address import describe, reason, unreachable

log = logging.getLogger(__name__)

CHANNEL = "k8e"
PATIENCE = 8.0
"""Seconds that a caller waits for the database."""
CONNECT_SECONDS = 3
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # between two attempts to reach it
MAX_WAITING = 10_000  # writes
_AWAY = (OperationalError, InterfaceError, PoolTimeout, TimeoutError, OSError)
# A peer that is gone without a word is noticed in half a minute, also by a listener.
_CONNECT: dict[str, Any] = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "application_name": "k8e gateway",
}

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]


def is_away(error: BaseException) -> bool:
    """Whether the database could not be reached, so that trying again may help."""
    return isinstance(error, _AWAY) or (
        isinstance(error, DBAPIError) and error.connection_invalidated
    )


class _Write(Generic[T]):
    """One transaction in the queue."""

    def __init__(
        self, work: Work[T], then: Callable[[T], None] | None, due: float, *, kept: bool
    ) -> None:
        self.work = work
        self.then = then
        self.due = due
        self.kept = kept
        self.answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # nobody may be waiting


class Engine:
    """The database of one gateway."""

    def __init__(self, url: URL, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.reachable = False
        """Whether news of other gateways arrive at once."""
        self.on_news: dict[str, Callable[[str], object]] = {}
        """By subject: called with the key of what another gateway changed."""
        self.on_connect: list[Callable[[], object]] = []
        """Called whenever news begin to arrive: what came before that has to be read."""
        self._url = url
        self._engine = create_async_engine(
            url,
            pool_size=4,
            max_overflow=8,
            pool_timeout=PATIENCE,
            hide_parameters=True,
            connect_args=_CONNECT,
        )
        self._queue: deque[_Write[Any]] = deque()
        self._more = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._away_from = asyncio.get_running_loop().time()

    def seconds_away(self) -> float:
        """For how long no news of other gateways could arrive; 0 if they can."""
        return 0 if self.reachable else asyncio.get_running_loop().time() - self._away_from

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._write_all()), asyncio.create_task(self._listen())]

    async def stop(self) -> None:
        """Give queued writes a little time, then close."""
        with contextlib.suppress(errors.StoreUnreachable):
            if self._queue:
                await self.write(_nothing)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for item in self._queue:
            item.fail(self._unreachable(TimeoutError("the gateway stops")))
        await self._engine.dispose()

    def describe(self) -> str:
        return describe(self._url)

    def _unreachable(self, error: BaseException) -> errors.StoreUnreachable:
        return unreachable(self._url, error)

    # Transactions.

    async def run(self, work: Work[T]) -> T:
        """The result of ``work`` in a transaction of its own; tried again while that may help.

        It may run twice, if the answer to its commit was lost.
        """
        loop = asyncio.get_running_loop()
        due, pause = loop.time() + PATIENCE, FIRST_PAUSE
        while True:
            try:
                return await self._try(work)
            except Exception as error:
                if not is_away(error):
                    raise
                if loop.time() + pause > due:
                    raise self._unreachable(error) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _try(self, work: Work[T]) -> T:
        async with asyncio.timeout(PATIENCE), self._engine.begin() as connection:
            return await work(connection)

    def write(
        self, work: Work[T], then: Callable[[T], None] | None = None, *, kept: bool = False
    ) -> Awaitable[T]:
        """Do ``work`` after all earlier writes; await the answer for its commit.

        ``then`` gets its answer when that is committed, before anything later is begun.
        """
        item = _Write(work, then, asyncio.get_running_loop().time() + PATIENCE, kept=kept)
        if len(self._queue) >= MAX_WAITING and not kept:
            item.fail(self._unreachable(TimeoutError(f"{MAX_WAITING} writes wait for it")))
        else:
            self._queue.append(item)
            self._more.set()
        return self._answer(item)

    def _answer(self, item: _Write[T]) -> Awaitable[T]:
        # A transaction that began in time may take as long again, and its caller is told how it
        # went; nobody need wait for what is tried until it is done.
        seconds = PATIENCE if item.kept else 2 * PATIENCE
        late = self._unreachable(TimeoutError("no answer in time"))
        return _Answer(item.answer, seconds, late)

    async def _write_all(self) -> None:
        while True:
            await self._more.wait()
            while self._queue:
                await self._write_one(self._queue[0])
                self._queue.popleft()
            self._more.clear()

    async def _write_one(self, item: _Write[Any]) -> None:
        loop = asyncio.get_running_loop()
        pause, told = FIRST_PAUSE, False
        while True:
            try:
                value = await self._try(item.work)
                if item.then is not None:
                    item.then(value)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if not is_away(error):
                    if item.kept and not isinstance(error, errors.K8eError):
                        log.error("a row cannot be written: %s", reason(error))
                    item.fail(error)
                    return
                if not told:
                    log.warning("the database does not answer: %s", reason(error))
                    told = True
                if loop.time() + pause > item.due and not item.kept:
                    item.fail(self._unreachable(error))
                    return
            else:
                if not item.answer.done():
                    item.answer.set_result(value)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    # News.

    async def tell(self, connection: AsyncConnection, subject: str, key: object) -> None:
        """Tell the other gateways about a change, once it is committed."""
        payload = f"{self.gateway_id} {subject} {key}"
        await connection.execute(
            text("SELECT pg_notify(:channel, :payload)"), {"channel": CHANNEL, "payload": payload}
        )

    async def _listen(self) -> None:
        pause = FIRST_PAUSE
        address = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    address, autocommit=True, **_CONNECT
                ) as connection:
                    await connection.execute(f"LISTEN {CHANNEL}".encode())
                    self.reachable, pause = True, FIRST_PAUSE
                    for tell in self.on_connect:
                        tell()
                    async for news in connection.notifies():
                        self._hear(news.payload)
            except (psycopg.Error, OSError, TimeoutError) as error:
                if self.reachable:
                    log.warning("no news from the database: %s", reason(error))
            if self.reachable:
                self.reachable, self._away_from = False, asyncio.get_running_loop().time()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _hear(self, payload: str) -> None:
        origin, _, rest = payload.partition(" ")
        subject, _, key = rest.partition(" ")
        hear = self.on_news.get(subject)
        if hear is not None and origin != self.gateway_id:
            hear(key)


class _Answer(Generic[T]):
    """The answer to a write: awaited for its commit, or left alone."""

    def __init__(self, answer: asyncio.Future[T], seconds: float, late: Exception) -> None:
        self._future = answer
        self._seconds = seconds
        self._late = late

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(self._future)
        except TimeoutError:
            raise self._late from None


async def _nothing(connection: AsyncConnection) -> None:
    """Do nothing, in a transaction that waits for those before it."""


class Refetch:
    """Reads rows again that others have changed: all waiting ones together."""

    def __init__(
        self,
        engine: Engine,
        read: Callable[[AsyncConnection, list[str] | None], Awaitable[T]],
        apply: Callable[[list[str] | None, T], None],
    ) -> None:
        """``read`` gets the keys, or None for all; ``apply`` gets them and the rows."""
        self._engine = engine
        self._read: Callable[[AsyncConnection, list[str] | None], Awaitable[Any]] = read
        self._apply: Callable[[list[str] | None, Any], None] = apply
        self._keys: set[str] = set()
        self._all = False
        self._queued = False

    def everything(self) -> Awaitable[None]:
        self._all = True
        return self._queue()

    def one(self, key: str) -> Awaitable[None]:
        self._keys.add(key)
        return self._queue()

    def _queue(self) -> Awaitable[None]:
        if self._queued:
            return self._pending
        self._queued = True
        taken: list[list[str] | None] = []

        async def read(connection: AsyncConnection) -> Any:
            if not taken:
                taken.append(None if self._all else sorted(self._keys))
                self._all, self._queued = False, False
                self._keys.clear()
            return await self._read(connection, taken[0])

        self._pending: Awaitable[Any] = self._engine.write(
            read, lambda value: self._apply(taken[0], value), kept=True
        )
        return self._pending
