"""The gRPC server: credentials, the table of calls, and requests that are bounded.

gRPC would read a message of any allowed size before it asks us who sends it. So every call is taken
as a stream, whose first message we read when we want it. Large messages take one of few places that
each caller has: a thousand of them at once would be the gateway's whole memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.audit import act
from k8e.gateway import identity, tls
from k8e.gateway.operations import ANYBODY, NoRow, OperationDeclaration
from k8e.gateway.rpc import errors as rpc_errors
from k8e.gateway.rpc import service
from k8e.gateway.rpc.front import TlsFront
from k8e.gateway.rpc.method import RpcCaller, RpcDeclaration
from k8e.gateway.rpc.service import MAX_MESSAGE, RPCS
from k8e.gateway.service import OPERATIONS, Gateway
from k8e.model import Principal

PLACES = 8
"""Requests of one caller that are read, or are large and being worked on, at once."""
LARGE = 1 << 20  # bytes of a request that keeps its place until its call has ended
MANY = 64 << 10  # bytes of a message that could have more fields than …
MAX_FIELDS = 20_000
"""… this: to read millions of empty ones would hold everybody up for seconds."""
SECONDS = 120.0  # for a request to come in


def has_too_many(data: bytes) -> bool:
    """Whether a message has more fields than any request needs; their contents are not read."""
    at, fields = 0, 0
    with contextlib.suppress(IndexError):  # it ends too early, which is not for us to say
        while at < len(data):
            fields += 1
            if fields > MAX_FIELDS:
                return True
            tag, at = _varint(data, at)
            match tag & 7:
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(data, at)
                    at += size
                case 3 | 4:  # groups: their fields follow
                    pass
                case _:
                    at += 4
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint, and its end."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 or shift > 63:
            return number, at


def reading(kind: Any) -> Callable[[bytes], Any]:
    """A function that parses messages of a kind; malformed ones are the client's error."""

    def read(data: bytes) -> Any:
        if len(data) > MANY and has_too_many(data):
            raise errors.InvalidRequest(
                f"this {kind.DESCRIPTOR.name} has more than {MAX_FIELDS} fields and items",
                hint="send fewer hosts, variables or packages",
            )
        try:
            return kind.FromString(data)
        except DecodeError:
            raise errors.InvalidRequest(f"this is no {kind.DESCRIPTOR.name}") from None

    return read


class Receiver:
    """Reads requests."""

    def __init__(self) -> None:
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def request(
        self, principal: Principal, messages: AsyncIterator[Any]
    ) -> AsyncGenerator[Any]:
        """The request of a call that sends one."""
        places = self._places.get(principal.name)
        if places is None:
            places = self._places[principal.name] = asyncio.Semaphore(PLACES)
        await places.acquire()
        held = True
        try:
            request = await _first(messages)
            if request.ByteSize() < LARGE:
                places.release()
                held = False
            yield request
        finally:
            if held:
                places.release()


async def _first(messages: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(SECONDS):
            async for message in messages:
                return message
    except TimeoutError:
        raise errors.TimedOut(f"the request did not come in within {SECONDS:g} s") from None
    raise errors.InvalidRequest("the call has no request")


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
Known = Callable[[Context], contextlib.AbstractAsyncContextManager[RpcCaller]]
"""Identifies and admits the caller of an RPC, for as long as the block runs."""
SOCKET = "rpc.sock"
"""In the run folder: where the front passes connections on to gRPC."""


class RunningServer(NamedTuple):
    """A server that takes calls."""

    server: grpc.aio.Server
    front: TlsFront
    endpoint: identity.TcpEnd

    async def stop(self, seconds: float) -> None:
        """Let calls under way end within ``seconds``."""
        self.front.close()
        await self.server.stop(seconds)


async def start(
    gateway: Gateway, endpoint: identity.TcpEnd, certificates: tls.Certificates
) -> RunningServer | None:
    """Listen on ``endpoint``; None if that is impossible."""
    inner = gateway.settings.run_dir / SOCKET
    inner.unlink(missing_ok=True)
    inner.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    front = TlsFront(inner, certificates)
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
    return RunningServer(server, front, endpoint)


def _handlers(gateway: Gateway, front: TlsFront) -> grpc.GenericRpcHandler:
    """Every RPC of the proto: implemented, or answered with UNIMPLEMENTED."""
    descriptor = pb.DESCRIPTOR.services_by_name["SandboxService"]
    handlers = service.handlers(gateway)
    answering = functools.partial(_answering, gateway, front)
    receiver = Receiver()
    table: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in descriptor.methods:
        declaration = RPCS.get(method.name) or _undeclared(method.name)
        work = handlers.get(method.name) or _unimplemented(method.name)
        coding = {
            "request_deserializer": reading(getattr(pb, method.input_type.name)),
            "response_serializer": getattr(pb, method.output_type.name).SerializeToString,
        }
        known = functools.partial(answering, declaration)
        # On the wire, a call with one request is a stream of one; see the top of this module.
        if declaration.declared(OPERATIONS).public:
            asked = getattr(pb, method.input_type.name)
            handler = grpc.stream_unary_rpc_method_handler(_public(work, known, asked), **coding)
        elif method.client_streaming:
            handler = grpc.stream_stream_rpc_method_handler(_both(work, known), **coding)
        elif method.server_streaming:
            streaming = _streaming(work, known, receiver, declaration)
            handler = grpc.stream_stream_rpc_method_handler(streaming, **coding)
        else:
            unary = _unary(work, known, receiver, declaration)
            handler = grpc.stream_unary_rpc_method_handler(unary, **coding)
        table[method.name] = handler
    return grpc.method_handlers_generic_handler(descriptor.full_name, table)


def _undeclared(name: str) -> RpcDeclaration:
    """The declaration of an RPC without one: no role may use it."""
    return RpcDeclaration(
        name, "", OperationDeclaration(name, frozenset(), NoRow.READS), "session_id"
    )


def _unimplemented(name: str) -> Handler:
    async def refuse(*_: object) -> None:
        raise errors.NotImplementedYet(f"{name} is part of the interface but not implemented yet")

    return refuse


def _public(work: Handler, known: Known, asked: type[Any]) -> Handler:
    """Handle a call without a known caller: it cannot make us wait, since nothing of it is read."""

    async def handle(_: Any, context: Context) -> Any:
        async with known(context) as caller:
            return await work(caller, asked())

    return handle


def _unary(work: Handler, known: Known, receiver: Receiver, declaration: RpcDeclaration) -> Handler:
    async def handle(messages: Any, context: Context) -> Any:
        async with (
            known(context) as caller,
            receiver.request(caller.principal, messages) as request,
        ):
            act.about(declaration.session_of(request))
            return await work(caller, request)

    return handle


def _streaming(
    work: Handler, known: Known, receiver: Receiver, declaration: RpcDeclaration
) -> Handler:
    async def handle(messages: Any, context: Context) -> None:
        async with (
            known(context) as caller,
            receiver.request(caller.principal, messages) as request,
        ):
            act.about(declaration.session_of(request))
            await work(caller, request, context)

    return handle


def _both(work: Handler, known: Known) -> Handler:
    async def handle(messages: Any, context: Context) -> None:
        async with known(context) as caller:
            await work(caller, messages, context)

    return handle


@contextlib.asynccontextmanager
async def _answering(
    gateway: Gateway, front: TlsFront, rpc: RpcDeclaration, context: Context
) -> AsyncGenerator[RpcCaller]:
    """Admit known callers that have the role, and turn errors into statuses."""
    principal, caller = None, front.caller(context.peer())
    operation, operations = rpc.declared(OPERATIONS), gateway.operations
    act.begin(act.Act(identity.described(caller, None), rpc.name))
    try:
        if operation.public:
            yield RpcCaller(ANYBODY, operations, rpc)
            return
        metadata = context.invocation_metadata() or ()
        peer = context.peer()
        async with identity.identified(gateway.keys, caller, metadata) as principal:
            act.begin(act.Act(identity.described(caller, principal), rpc.name))
            with front.recognised(peer, principal.name):
                operations.admit(principal, operation, rpc.name)
                yield RpcCaller(principal, operations, rpc)
    except Exception as error:  # the edge of the call: everything becomes a status
        if principal is None or isinstance(error, identity.UnknownPeer):
            front.doubt(context.peer())
        if isinstance(error, errors.K8eError | identity.UnknownPeer):
            gateway.refused(error)
        await rpc_errors.abort(context, error)
