"""The gRPC server: its credentials, its table of calls, who may make them and how they fail."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway import peers, rpc_errors, rpc_run, tls
from k8e.gateway.rpc_service import MAX_MESSAGE, Service
from k8e.gateway.service import Gateway
from k8e.model import Principal

PING_MILLISECONDS = 10_000  # how often a client may ask whether we are still there
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.so_reuseport", 0),  # else a second gateway would silently share the port
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_MILLISECONDS),
    ("grpc.keepalive_permit_without_calls", 1),
)

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[..., Awaitable[Any]]


class Running(NamedTuple):
    """A server that takes calls."""

    server: grpc.aio.Server
    endpoint: peers.Endpoint


async def start(
    gateway: Gateway, endpoint: peers.Endpoint, certificates: tls.Certificates
) -> Running | None:
    """Listen on ``endpoint``; None if that cannot be."""
    server = grpc.aio.server(options=OPTIONS)
    try:
        port = server.add_secure_port(str(endpoint), _credentials(certificates))
    except RuntimeError:
        return None
    endpoint = peers.Endpoint(endpoint.address, port)
    server.add_generic_rpc_handlers((_handlers(gateway, endpoint),))
    await server.start()
    return Running(server, endpoint)


def _credentials(certificates: tls.Certificates) -> grpc.ServerCredentials:
    """Credentials that follow the certificate when it is renewed."""
    shown = certificates.identity

    def configure(identity: tls.Identity) -> Any:
        return grpc.ssl_server_certificate_configuration([(identity.key, identity.certificate)])

    def fetch() -> Any:
        """Called by gRPC, in a thread of its own, for each new connection."""
        nonlocal shown
        if certificates.identity is shown:
            return None
        shown = certificates.identity
        return configure(shown)

    return grpc.dynamic_ssl_server_credentials(configure(shown), fetch)


def _handlers(gateway: Gateway, endpoint: peers.Endpoint) -> grpc.GenericRpcHandler:
    """Every RPC of the proto: implemented, or answered with UNIMPLEMENTED."""
    descriptor = pb.DESCRIPTOR.services_by_name["SandboxService"]
    service = Service(gateway)
    run = functools.partial(rpc_run.run, gateway)
    table: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in descriptor.methods:
        work = run if method.name == "Run" else getattr(service, method.name, None)
        coding = {
            "request_deserializer": getattr(pb, method.input_type.name).FromString,
            "response_serializer": getattr(pb, method.output_type.name).SerializeToString,
        }
        work = work or _unimplemented(method.name)
        if method.client_streaming:
            handler = grpc.stream_stream_rpc_method_handler(_streaming(work, endpoint), **coding)
        elif method.server_streaming:
            handler = grpc.unary_stream_rpc_method_handler(_streaming(work, endpoint), **coding)
        else:
            handler = grpc.unary_unary_rpc_method_handler(_unary(work, endpoint), **coding)
        table[method.name] = handler
    return grpc.method_handlers_generic_handler(descriptor.full_name, table)


def _unimplemented(name: str) -> Handler:
    async def refuse(*_: object) -> None:
        raise errors.NotImplementedYet(f"{name} is part of the interface but not implemented yet")

    return refuse


def _unary(work: Handler, endpoint: peers.Endpoint) -> Handler:
    async def handle(request: Any, context: Context) -> Any:
        async with _answering(context, endpoint) as principal:
            return await work(principal, request)

    return handle


def _streaming(work: Handler, endpoint: peers.Endpoint) -> Handler:
    async def handle(request: Any, context: Context) -> None:
        async with _answering(context, endpoint) as principal:
            await work(principal, request, context)

    return handle


@contextlib.asynccontextmanager
async def _answering(context: Context, endpoint: peers.Endpoint) -> AsyncGenerator[Principal]:
    """Let nobody in that we do not know, and turn what fails into a status."""
    try:
        yield peers.identify(context.peer(), endpoint)
    except Exception as error:  # the edge of the call: everything becomes a status
        await rpc_errors.abort(context, error)
