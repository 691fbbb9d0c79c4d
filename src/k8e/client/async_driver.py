"""Runs operations over connections of an asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from k8e import errors
from k8e.client import endpoints, local, requests
from k8e.client.driver import MAX_IDLE, nobody_listens
from k8e.client.operations import PULL, RECEIVE, RETRY_DELAYS, Operation, Send
from k8e.client.requests import AsyncContent
from k8e.client.trunk import Lane, Trunks
from k8e.guest import wire


class Connection(Protocol):
    """Frames to and from a gateway, for one operation at a time."""

    def begin(self) -> None: ...
    async def send(self, kind: int, body: bytes | memoryview) -> None: ...
    async def receive(self) -> tuple[int, bytes]: ...
    def is_fresh(self) -> bool: ...
    async def close(self) -> None: ...


class LocalConnection:
    """The same frames as :class:`local.Connection`, without blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._frames: list[tuple[int, int, bytes]] = []
        self._reading = local.SMALL_READ
        self._channel = 0
        self._unsent = False

    def begin(self) -> None:
        self._channel += 1

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        loop = asyncio.get_running_loop()
        header = wire.HEADER.pack(len(body), kind, self._channel)
        try:
            if len(body) < local.SMALL_READ:
                await loop.sock_sendall(self._socket, header + body)
            else:
                await loop.sock_sendall(self._socket, header)
                await loop.sock_sendall(self._socket, body)
        except (BrokenPipeError, ConnectionResetError):
            self._unsent = True  # what the gateway said before it closed is still to be read

    async def receive(self) -> tuple[int, bytes]:
        while True:
            while not self._frames:
                await self._read()
            kind, channel, body = self._frames.pop()
            if channel == self._channel:
                return kind, body

    async def _read(self) -> None:
        unread = self._unsent
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, self._reading)
            if data:
                large = len(data) >= local.SMALL_READ
                self._reading = local.LARGE_READ if large else local.SMALL_READ
                self._frames = self._splitter.feed(data)
                self._frames.reverse()
                return
        except ConnectionResetError:
            unread = True
        except wire.WireError as error:
            raise local.unreachable(
                f"the gateway sent bytes that are not k8e's protocol: {error}"
            ) from None
        raise local.closed(unread=unread)

    def is_fresh(self) -> bool:
        """Whether nothing was received, not even an end, since the last operation."""
        if self._frames:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def close(self) -> None:
        self._socket.close()


class AsyncEnding(Protocol):
    """Something that ends with the client that made it."""

    async def close(self) -> None: ...


class Connector(Protocol):
    """Opens connections to one endpoint."""

    async def connect(self) -> Connection: ...
    def wants(self, connection: object) -> bool: ...
    async def share(self) -> Connection | None: ...
    async def close(self) -> None: ...


def connector(endpoint: endpoints.Endpoint) -> Connector:
    if endpoint.target:
        from k8e.client import remote

        return remote.AsyncChannel(endpoint)
    return LocalConnector(endpoint.socket)


Dial = Callable[[], Awaitable[socket.socket]]


class LocalConnector:
    """Connects to a given socket, or to this host's gateway, which is started if need be."""

    def __init__(self, path: str, dial: Dial | None = None) -> None:
        """``dial`` makes the sockets instead; they must not block."""
        self._path = path
        self._own_dial = dial
        self._trunks = Trunks()

    async def connect(self) -> Connection:
        return LocalConnection(await self._dial())

    async def share(self) -> Connection | None:
        """A lane on the connection that all calls share."""
        if (lane := self._trunks.lane()) is not None:
            return lane
        sock = await self._dial()
        if (lane := self._trunks.lane()) is not None:  # another task was quicker
            sock.close()
            return lane
        return self._trunks.add(sock)

    async def _dial(self) -> socket.socket:
        if self._own_dial is not None:
            return await self._own_dial()
        try:
            # Connecting to a unix socket is immediate, unless hundreds wait in front of us.
            found = local.dial(self._path or local.default_socket())
        except local.NoGateway:
            if self._path:
                raise nobody_listens(self._path) from None
            from k8e.client import autostart

            found = await asyncio.to_thread(autostart.dial)
        sock = socket.socket(fileno=found.detach())
        sock.setblocking(False)
        return sock

    def wants(self, connection: object) -> bool:
        """Whether a connection is worth keeping; all are."""
        return True

    async def close(self) -> None:
        self._trunks.close()


class Pool:
    """Idle connections."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._idle: list[Connection] = []
        self._pid = os.getpid()
        self.closed = False
        self._programs: weakref.WeakSet[AsyncEnding] = weakref.WeakSet()

    def end_with(self, program: AsyncEnding) -> None:
        """Remember something that ends with the client, as long as other code refers to it."""
        self._programs.add(program)

    @property
    def ending(self) -> list[AsyncEnding]:
        """The objects to close before the client."""
        return list(self._programs)

    def check_open(self) -> None:
        """Raise ClientClosed once the client is closed: nothing would end a new operation."""
        if self.closed:
            raise errors.ClientClosed

    async def take(self) -> Connection:
        self.check_open()
        if self._pid != os.getpid():  # a forked child must not share its parent's connections
            self._idle, self._pid = [], os.getpid()
        stale: list[Connection] = []
        found: Connection | None = None
        while self._idle and found is None:
            connection = self._idle.pop()
            if connection.is_fresh():
                found = connection
            else:
                stale.append(connection)
        if stale:  # together: each may need a round trip
            await asyncio.gather(*(connection.close() for connection in stale))
        return found or await self._connector.connect()

    async def share(self) -> Connection:
        """A connection for a plain call: nothing is streamed from it or uploaded over it."""
        self.check_open()
        return await self._connector.share() or await self.take()

    async def renew(self) -> Connection:
        """A connection in place of one that a dying gateway never read from."""
        self.check_open()
        return await self._connector.connect()

    async def keep(self, connection: Connection) -> None:
        """Take back a connection whose operation has ended well."""
        if isinstance(connection, Lane):
            connection.end()
        elif self._has_room() and self._connector.wants(connection):
            self._idle.append(connection)
        else:
            await connection.close()

    def _has_room(self) -> bool:
        return len(self._idle) < MAX_IDLE and not self.closed

    async def close(self) -> None:
        self.closed = True
        while self._idle:
            await self._idle.pop().close()
        await self._connector.close()


class AsyncOperation:
    """One operation under way on one connection."""

    def __init__(
        self,
        connection: Connection,
        operation: Operation[Any],
        source: AsyncContent | None,
        renew: Callable[[], Awaitable[Connection]] | None = None,
    ) -> None:
        self.connection = connection
        self.result: Any = None
        self.done = False
        self._operation = operation
        self._source = None if source is None else chunks(source)
        self._renew = renew
        self._sent: list[Send] = []  # until something comes back
        self._delays = iter(RETRY_DELAYS)
        connection.begin()

    async def next_event(self) -> Any:
        """The next event; None when the result is there."""
        answer: Any = None
        try:
            while True:
                step = self._advance(answer)
                answer = None
                if self.done:
                    return None
                if isinstance(step, Send):
                    await self._send(step)
                elif step is RECEIVE:
                    answer = await self._receive()
                elif step is PULL:
                    answer = await self._pull()
                else:
                    return step
        except BaseException:
            await self.close()
            raise

    def _advance(self, answer: Any) -> Any:
        try:
            if isinstance(answer, errors.GatewayUnreachable):
                return self._operation.throw(answer)
            return self._operation.send(answer)
        except StopIteration as stop:
            self.result, self.done = stop.value, True
            return None

    async def _send(self, step: Send) -> None:
        if self._renew is not None:
            self._sent.append(step)
        await self.connection.send(step.kind, step.body)

    async def _receive(self) -> tuple[int, bytes] | errors.GatewayUnreachable:
        while True:
            try:
                frame = await self.connection.receive()
            except errors.GatewayUnreachable as error:
                delay = next(self._delays, None)
                if not error.unread or len(self._sent) != 1 or delay is None or not self._renew:
                    return error
                await asyncio.sleep(delay)
                await self.connection.close()
                self.connection = await self._renew()
                self.connection.begin()
                await self.connection.send(*self._sent[0])
            else:
                self._sent, self._renew = [], None
                return frame

    async def _pull(self) -> bytes | memoryview:
        return b"" if self._source is None else await anext(self._source, b"")

    async def close(self) -> None:
        """Give up; the gateway treats the end of the connection as the end of the operation."""
        if not self.done:
            self._operation.close()
            await self.connection.close()


async def chunks(content: AsyncContent) -> AsyncIterator[bytes | memoryview]:
    """Like :func:`requests.chunks`; files are read in a thread."""
    if isinstance(content, AsyncIterable):
        async for piece in content:
            for part in requests.cut(piece):
                yield part
        return
    parts = requests.chunks(content)
    if not hasattr(content, "read"):
        for part in parts:
            yield part
        return
    while part := await asyncio.to_thread(next, parts, b""):
        yield part


in_thread = asyncio.to_thread
"""Run a function that may block, without holding the loop up."""


async def finish(work: Awaitable[Any], seconds: float) -> None:
    """Finish work that must be done even if we are cancelled; errors do not matter."""
    with contextlib.suppress(errors.K8eError, TimeoutError):
        await asyncio.shield(asyncio.wait_for(work, seconds))
