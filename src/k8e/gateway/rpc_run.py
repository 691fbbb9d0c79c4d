"""The Run call: the frames of the unix socket on a gRPC stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.conversation import Conversation
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.model import Principal

RunContext = grpc.aio.ServicerContext[pb.RunFrame, pb.RunFrame]


async def run(
    gateway: Gateway, principal: Principal, frames: AsyncIterator[pb.RunFrame], context: RunContext
) -> None:
    """Carry one client's frames until it closes its side of the stream or goes away."""
    # Unbounded, but never long: what guests send is limited by the credit that the client gives.
    outgoing: asyncio.Queue[pb.RunFrame | Exception | None] = asyncio.Queue()

    def send(kind: int, channel: int, body: bytes) -> None:
        outgoing.put_nowait(pb.RunFrame(kind=kind, channel=channel, body=body))

    conversation = Conversation(gateway, principal, send)
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
    outgoing: asyncio.Queue[pb.RunFrame | Exception | None],
) -> None:
    """Take the client's frames; how they end goes to whoever writes, who ends the call."""
    end = None
    try:
        async for frame in frames:
            if len(frame.body) > wire.MAX_REQUEST:
                raise wire.WireError(f"a frame of more than {wire.MAX_REQUEST} bytes")
            conversation.receive(frame.kind, frame.channel, frame.body)
    except wire.WireError as error:
        end = errors.InvalidRequest(str(error))
    except Exception as error:
        end = error
    outgoing.put_nowait(end)
