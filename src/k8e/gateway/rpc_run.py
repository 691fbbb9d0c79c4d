"""The Run call: the frames of the unix socket on a gRPC stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.conversation import MAX_UNREAD, Conversation
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.model import Principal

TOGETHER = 32 << 10  # bytes of small frames in one message

RunContext = grpc.aio.ServicerContext[pb.RunFrame, pb.RunFrame]


class _Outgoing:
    """What waits to be written. While it is much, the client is not heard.

    What guests send is limited by the credit that the client gives; what the gateway itself
    answers is not.
    """

    def __init__(self) -> None:
        self._items: deque[pb.RunFrame | Exception | None] = deque()
        self._some = asyncio.Event()
        self._size = 0
        self._room = asyncio.Event()
        self._room.set()

    def send(self, kind: int, channel: int, body: bytes) -> None:
        self._put(pb.RunFrame(kind=kind, channel=channel, body=body))
        self._size += len(body)
        if self._size > MAX_UNREAD:
            self._room.clear()

    def end(self, error: Exception | None) -> None:
        self._put(error)

    def _put(self, item: pb.RunFrame | Exception | None) -> None:
        self._items.append(item)
        self._some.set()

    async def get(self) -> pb.RunFrame | Exception | None:
        while not self._items:
            self._some.clear()
            await self._some.wait()
        item = self._items.popleft()
        if isinstance(item, pb.RunFrame):
            self._size -= self._join(item)
            if self._size <= MAX_UNREAD:
                self._room.set()
        return item

    def _join(self, first: pb.RunFrame) -> int:
        """Let small frames that wait already travel with ``first``; the bytes of all bodies."""
        size = len(first.body)
        while self._items and isinstance(following := self._items[0], pb.RunFrame):
            if size + len(following.body) > TOGETHER:
                break
            size += len(following.body)
            first.rest.append(following)
            self._items.popleft()
        return size

    async def room(self) -> None:
        await self._room.wait()


async def run(
    gateway: Gateway, principal: Principal, frames: AsyncIterator[pb.RunFrame], context: RunContext
) -> None:
    """Carry one client's frames until it closes its side of the stream or goes away."""
    outgoing = _Outgoing()
    conversation = Conversation(gateway, principal, outgoing.send)
    reader = gateway.spawn(_read(frames, conversation, outgoing))
    try:
        while (item := await outgoing.get()) is not None:
            if isinstance(item, Exception):
                raise item
            await context.write(item)
    finally:
        reader.cancel()
        conversation.close()


async def _read(
    frames: AsyncIterator[pb.RunFrame],
    conversation: Conversation,
    outgoing: _Outgoing,
) -> None:
    """Take the client's frames; how they end goes to whoever writes, who ends the call."""
    end = None
    try:
        async for frame in frames:
            if len(frame.body) > wire.MAX_REQUEST:
                raise wire.WireError(f"a frame of more than {wire.MAX_REQUEST} bytes")
            conversation.receive(frame.kind, frame.channel, frame.body)
            await outgoing.room()
    except wire.WireError as error:
        end = errors.InvalidRequest(str(error))
    except Exception as error:
        end = error
    outgoing.end(end)
