"""The Run call: the frames of the unix socket on a gRPC stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.conversation import MAX_UNREAD, Conversation
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.model import Principal
from k8e.sessions.queues import FrameQueue

TOGETHER = 32 << 10  # bytes of small frames in one message …
OVERHEAD = 64  # … where each counts as so many more: there may be one byte in each

RunContext = grpc.aio.ServicerContext[pb.RunFrame, pb.RunFrame]


class _Outgoing:
    """What waits to be written. While it is much, the client is not heard.

    What guests send is limited by the credit that the client gives; what the gateway itself
    answers is not.
    """

    def __init__(self) -> None:
        self._frames = FrameQueue()
        self._ends: list[Exception | None] = []
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def send(self, kind: int, channel: int, body: bytes) -> None:
        self._frames.put(kind, channel, body)
        self._some.set()
        if self._frames.size > MAX_UNREAD:
            self._room.clear()

    def end(self, error: Exception | None) -> None:
        self._ends.append(error)
        self._some.set()

    async def get(self) -> pb.RunFrame | Exception | None:
        """The next message; how the stream ends, when all are taken."""
        while not self._frames:
            if self._ends:
                return self._ends[0]
            self._some.clear()
            await self._some.wait()
        message = self._take()
        if self._frames.size <= MAX_UNREAD:
            self._room.set()
        return message

    def _take(self) -> pb.RunFrame:
        """A frame, and the small ones behind it that wait already."""
        kind, channel, body = self._frames.take()
        message = pb.RunFrame(kind=kind, channel=channel, body=body)
        size = len(body)
        while self._frames:
            size += self._frames.next_size() + OVERHEAD
            if size > TOGETHER:
                break
            kind, channel, body = self._frames.take()
            message.rest.add(kind=kind, channel=channel, body=body)
        return message

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
