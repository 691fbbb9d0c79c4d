"""The gRPC server: its credentials, its table of calls, who may make them and how they fail."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.auth.keys import Keys
from k8e.gateway import callers, peers, roles, rpc_errors, rpc_run, tls
from k8e.gateway.front import Front
from k8e.gateway.rpc_service import MAX_MESSAGE, Service
from k8e.gateway.service import Gateway
from k8e.model import Principal

PING_MILLISECONDS = 10_000  # how often a client may ask whether we are still there
MAX_STREAMS = 1024  # calls of one connection at a time
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),  # else a second gateway would silently share the port
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_MILLISECONDS),
    ("grpc.keepalive_permit_without_calls", 1),
)

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[..., Awaitable[Any]]
Known = Callable[[Context], contextlib.AbstractAsyncContextManager[Principal]]
"""Says who makes a call, while it is answered."""
SOCKET = "rpc.sock"
"""In the run folder: where the front passes connections on to gRPC."""


class Running(NamedTuple):
    """A server that takes calls."""

    server: grpc.aio.Server
    front: Front
    endpoint: peers.Endpoint

    async def stop(self, seconds: float) -> None:
        """Let calls under way end within ``seconds``."""
        self.front.close()
        await self.server.stop(seconds)


async def start(
    gateway: Gateway, endpoint: peers.Endpoint, certificates: tls.Certificates
) -> Running | None:
    """Listen on ``endpoint``; None if that cannot be."""
    inner = gateway.settings.run_dir / SOCKET
    inner.unlink(missing_ok=True)
    inner.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    front = Front(inner, certificates)
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((_handlers(gateway, front),))
    server.add_insecure_port(f"unix:{inner}")
    inner.chmod(0o600)
    await server.start()
    try:
        endpoint = await front.listen(endpoint)
    except OSError:
        await server.stop(0)
        return None
    return Running(server, front, endpoint)


def _handlers(gateway: Gateway, front: Front) -> grpc.GenericRpcHandler:
    """Every RPC of the proto: implemented, or answered with UNIMPLEMENTED."""
    descriptor = pb.DESCRIPTOR.services_by_name["SandboxService"]
    service = Service(gateway)
    run = functools.partial(rpc_run.run, gateway)
    answering = functools.partial(_answering, gateway.keys, front)
    table: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in descriptor.methods:
        work = run if method.name == "Run" else getattr(service, method.name, None)
        coding = {
            "request_deserializer": _decoding(getattr(pb, method.input_type.name)),
            "response_serializer": getattr(pb, method.output_type.name).SerializeToString,
        }
        work = work or _unimplemented(method.name)
        known = functools.partial(answering, method.name)
        if method.client_streaming:
            streaming = _streaming(work, known, both_ways=True)
            handler = grpc.stream_stream_rpc_method_handler(streaming, **coding)
        elif method.server_streaming:
            handler = grpc.unary_stream_rpc_method_handler(_streaming(work, known), **coding)
        else:
            handler = grpc.unary_unary_rpc_method_handler(_unary(work, known), **coding)
        table[method.name] = handler
    return grpc.method_handlers_generic_handler(descriptor.full_name, table)


def _unimplemented(name: str) -> Handler:
    async def refuse(*_: object) -> None:
        raise errors.NotImplementedYet(f"{name} is part of the interface but not implemented yet")

    return refuse


class Malformed:
    """What a client sent instead of a message."""


def _decoding(kind: Any) -> Callable[[bytes], Any]:
    """Reads messages; without it, gRPC logs a traceback for everybody who can connect."""

    def decode(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Malformed()

    return decode


def _checked(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise errors.InvalidRequest("the message cannot be decoded")
    return request


async def _checking(requests: AsyncIterator[Any]) -> AsyncGenerator[Any]:
    async for request in requests:
        yield _checked(request)


def _unary(work: Handler, known: Known) -> Handler:
    async def handle(request: Any, context: Context) -> Any:
        async with known(context) as principal:
            return await work(principal, _checked(request))

    return handle


def _streaming(work: Handler, known: Known, *, both_ways: bool = False) -> Handler:
    async def handle(request: Any, context: Context) -> None:
        async with known(context) as principal:
            asked = _checking(request) if both_ways else _checked(request)
            await work(principal, asked, context)

    return handle


@contextlib.asynccontextmanager
async def _answering(
    keys: Keys, front: Front, name: str, context: Context
) -> AsyncGenerator[Principal]:
    """Let nobody in that we do not know, and turn what fails into a status."""
    try:
        if name in roles.PUBLIC:
            yield roles.ANYBODY
            return
        metadata = context.invocation_metadata() or ()
        caller = front.caller(context.peer())
        async with callers.identified(keys, caller, metadata) as principal:
            roles.check_rpc(principal, name)
            yield principal
    except Exception as error:  # the edge of the call: everything becomes a status
        await rpc_errors.abort(context, error)
