"""The gRPC server: its credentials, its table of calls, who may make them and how they fail."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.audit import acting
from k8e.gateway import callers, peers, roles, rpc_errors, rpc_run, tls
from k8e.gateway.front import Front
from k8e.gateway.receiving import Receiver, reading
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
"""Says who makes a call, while it is answered; it is told which session the call names."""
NAMING = ("session_id", "parent_session_id", "run_id", "terminal_id")
"""Fields that name a session; no request has two of them. The ids of runs and terminals begin with
that of their session."""
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
    gateway.keys.on_end.append(lambda key: front.doubt_all(key.owner))
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
    answering = functools.partial(_answering, gateway, front)
    receiver = Receiver()
    table: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in descriptor.methods:
        work = run if method.name == "Run" else getattr(service, method.name, None)
        coding = {
            "request_deserializer": reading(getattr(pb, method.input_type.name)),
            "response_serializer": getattr(pb, method.output_type.name).SerializeToString,
        }
        work = work or _unimplemented(method.name)
        known = functools.partial(answering, method.name)
        # On the wire, a call with one request is a stream of one; see receiving.py.
        if method.name in roles.PUBLIC:
            asked = getattr(pb, method.input_type.name)
            handler = grpc.stream_unary_rpc_method_handler(_public(work, known, asked), **coding)
        elif method.client_streaming:
            handler = grpc.stream_stream_rpc_method_handler(_both(work, known), **coding)
        elif method.server_streaming:
            streaming = _streaming(work, known, receiver)
            handler = grpc.stream_stream_rpc_method_handler(streaming, **coding)
        else:
            unary = _unary(work, known, receiver)
            handler = grpc.stream_unary_rpc_method_handler(unary, **coding)
        table[method.name] = handler
    return grpc.method_handlers_generic_handler(descriptor.full_name, table)


def _unimplemented(name: str) -> Handler:
    async def refuse(*_: object) -> None:
        raise errors.NotImplementedYet(f"{name} is part of the interface but not implemented yet")

    return refuse


def _public(work: Handler, known: Known, asked: type[Any]) -> Handler:
    """For anybody: nothing that a stranger sends is read, so nobody can wait with sending it."""

    async def handle(_: Any, context: Context) -> Any:
        async with known(context) as caller:
            return await work(caller, asked())

    return handle


def _unary(work: Handler, known: Known, receiver: Receiver) -> Handler:
    async def handle(messages: Any, context: Context) -> Any:
        async with known(context) as caller, receiver.request(caller, messages) as request:
            acting.about(_session_of(request))
            return await work(caller, request)

    return handle


def _streaming(work: Handler, known: Known, receiver: Receiver) -> Handler:
    async def handle(messages: Any, context: Context) -> None:
        async with known(context) as caller, receiver.request(caller, messages) as request:
            acting.about(_session_of(request))
            await work(caller, request, context)

    return handle


def _session_of(request: Any) -> str:
    """The session that a request names; nothing is checked."""
    named = next(filter(None, (getattr(request, name, "") for name in NAMING)), "")
    return named.partition(".")[0]


def _both(work: Handler, known: Known) -> Handler:
    async def handle(messages: Any, context: Context) -> None:
        async with known(context) as caller:
            await work(caller, messages, context)

    return handle


@contextlib.asynccontextmanager
async def _answering(
    gateway: Gateway, front: Front, name: str, context: Context
) -> AsyncGenerator[Principal]:
    """Let nobody in that we do not know, and turn what fails into a status."""
    principal, caller = None, front.caller(context.peer())
    acting.begin(acting.Act(callers.described(caller, None), name))
    try:
        if name in roles.PUBLIC:
            yield roles.ANYBODY
            return
        metadata = context.invocation_metadata() or ()
        peer = context.peer()
        async with callers.identified(gateway.keys, caller, metadata) as principal:
            acting.begin(acting.Act(callers.described(caller, principal), name))
            with front.recognised(peer, principal.name):
                roles.check_rpc(principal, name)
                # The calls of a Run are counted one by one.
                (gateway.streams if name == "Run" else gateway.rates).take(principal)
                yield principal
    except Exception as error:  # the edge of the call: everything becomes a status
        if principal is None or isinstance(error, peers.Refusal):
            front.doubt(context.peer())
        if isinstance(error, errors.K8eError | peers.Refusal):
            gateway.refused(error)
        await rpc_errors.abort(context, error)
