"""Remote gateways: the same frames, carried by the bidirectional gRPC call ``Run``.

A stream is kept open for the next operation, because opening one costs more than using it.

Calls go by the newest. Older ones stay for the calls that are under way on them, and are closed
with the last of those: a client whose certificates change often has no more channels than calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from k8e import errors
from k8e.client import credentials, local, renewal
from k8e.client.endpoints import Endpoint

StreamType = TypeVar("StreamType")


class GrpcChannels:
    """The channels of the calls under way; those that it returns are for the caller to close."""

    def __init__(self) -> None:
        self._newest: Any = None
        self._used: dict[Any, set[Any]] = {}  # of each channel, the calls under way
        self._lock = threading.RLock()

    def renew(self, renewed: Callable[[], Any]) -> None:
        """``renewed`` returns a new channel that is the newest from now on, or None."""
        with self._lock:
            if (channel := renewed()) is not None:
                self._newest = channel
                self._used[channel] = set()

    def take(self, renewed: Callable[[], Any], begin: Callable[[], StreamType]) -> StreamType:
        """The call that ``begin`` makes on the newest channel."""
        with self._lock:  # so that a channel which is about to be used does not seem unused
            self.renew(renewed)
            stream = begin()
            self._used[self._newest].add(stream)
            return stream

    def is_newest(self, stream: Any) -> bool:
        """Whether a call uses the newest channel; others are not kept for the next operation."""
        return stream in self._used.get(self._newest, ())

    def give_back(self, stream: Any) -> list[Any]:
        """A call has ended; return the channels that are no longer needed."""
        with self._lock:
            for streams in self._used.values():
                streams.discard(stream)
            return self.unused()

    def unused(self) -> list[Any]:
        """The channels that are no longer needed, each returned once."""
        with self._lock:
            items = self._used.items()
            found = [each for each, streams in items if not streams and each is not self._newest]
            for channel in found:
                del self._used[channel]
            return found

    def clear(self) -> list[Any]:
        """All channels."""
        with self._lock:
            found = [*self._used]
            self._used.clear()
            self._newest = None
            return found


MAX_MESSAGE = 64 << 20
CLOSE_SECONDS = 1.0
FRESH_SECONDS = 3600.0
"""After which a stream is not used again, and certificates are looked at: they may be new ones."""
_KEY_HINT = (
    "k8e sandbox api-key create NAME on the gateway's machine makes a key; pass it with "
    "--apikey-file or K8E_SANDBOX_APIKEY"
)
_TRUST_HINT = (
    "check that its CA is known here: K8E_SANDBOX_CERT names its ca.crt, "
    "k8e sandbox login --ca-fingerprint fetches it; if it was known before, somebody may be in "
    "between"
)
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # A half-dead connection is noticed while a command runs in silence.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


def libraries() -> tuple[Any, Any, Any]:
    """The gRPC library and our messages, or an error that says what to install."""
    try:
        import grpc

        from k8e._generated import sandbox_pb2, sandbox_pb2_grpc
    except ImportError as error:
        raise errors.GatewayUnreachable(
            f"a remote endpoint needs gRPC, which is not installed ({error})",
            hint="pip install grpcio protobuf: an installation of k8e has them unless told not to",
        ) from None
    return grpc, sandbox_pb2, sandbox_pb2_grpc


class Trust:
    """TLS towards an endpoint; the trusted CA is settled before anything is sent."""

    def __init__(self, grpc: Any, endpoint: Endpoint) -> None:
        self._grpc = grpc
        self._endpoint = endpoint
        self._found: credentials.Credentials | None = None
        self._until = 0.0

    def renewed(self) -> Any:
        """The credentials of a channel, for the first one or after a renewal of the certificate."""
        now = time.monotonic()
        if self._found is not None and now < self._until:
            return None
        self._until = now + FRESH_SECONDS
        renewal.begin(self._endpoint)
        try:
            found = credentials.load(self._endpoint)
        except errors.K8eError:
            if self._found is None:
                raise
            return None  # the present one stays in use
        if found == self._found:
            return None
        self._found = found
        return self._grpc.ssl_channel_credentials(found.ca, found.key, found.certificate)

    def forget(self) -> None:
        self._found = None

    def doubt(self) -> None:
        """Note that a call has failed: there may be newer certificates."""
        self._until = 0.0


def metadata(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    if not endpoint.api_key:
        return ()
    if not endpoint.api_key.isascii() or not endpoint.api_key.isprintable():
        raise errors.InvalidRequest("the API key has characters that no key has", hint=_KEY_HINT)
    return (("authorization", f"Bearer {endpoint.api_key}"),)


def explain(error: Any, endpoint: Endpoint) -> errors.K8eError:
    """A failed call as one of our errors."""
    status = error.code().name
    text = f"the gateway at {endpoint.target} cannot be reached: {error.details() or status}"
    if status in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return errors.KeyRefused(
            f"the gateway at {endpoint.target} refused us: {error.details()}", hint=_KEY_HINT
        )
    if status == "RESOURCE_EXHAUSTED":
        return errors.LimitExceeded(f"the gateway at {endpoint.target}: {error.details()}")
    if status == "INVALID_ARGUMENT":
        return errors.InvalidRequest(f"the gateway at {endpoint.target}: {error.details()}")
    if status == "UNIMPLEMENTED":
        return errors.NotImplementedYet(f"{endpoint.target} does not offer what was asked for")
    if "CERTIFICATE_VERIFY_FAILED" in text or "verify peer" in text.lower():
        return errors.UntrustedGateway(
            f"the gateway at {endpoint.target} is not trusted: {error.details()}", hint=_TRUST_HINT
        )
    return errors.GatewayUnreachable(
        text,
        hint="check the address, that the gateway runs, and that its CA is known here: "
        "K8E_SANDBOX_CERT names its ca.crt, k8e sandbox login --ca-fingerprint fetches it",
    )


class _Stream:
    """The common part of blocking and asynchronous streams."""

    def __init__(self, endpoint: Endpoint, frame: Any) -> None:
        self._endpoint = endpoint
        self._frame = frame  # the message class
        self._channel = 0
        self._call: Any = None
        self._held: deque[Any] = deque()  # frames that came with the one before
        self._until = time.monotonic() + FRESH_SECONDS
        self.on_failure: Callable[[], None] = lambda: None

    def begin(self) -> None:
        self._channel += 1
        self._held.clear()

    def is_fresh(self) -> bool:
        return not self._call.done() and time.monotonic() < self._until

    def _take(self, message: Any) -> None:
        self._held += (message, *message.rest)

    def _next(self) -> tuple[int, bytes] | None:
        """A frame of the current operation that was received already."""
        while self._held:
            frame = self._held.popleft()
            if frame.channel == self._channel:
                return frame.kind, frame.body
        return None

    def _message(self, kind: int, body: bytes | memoryview) -> Any:
        return self._frame(kind=kind, channel=self._channel, body=bytes(body))


class GrpcChannel:
    """A gRPC channel for blocking clients."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._grpc, self._messages, self._services = libraries()
        self._endpoint = endpoint
        self._trust = Trust(self._grpc, endpoint)
        self._lines = GrpcChannels()
        self._service: Any = None
        self._lines.renew(self._renewed)

    def connect(self) -> Stream:
        stream = self._lines.take(self._renewed, self._begin)
        stream.on_failure = self._trust.doubt
        stream.on_close = lambda: self._close(self._lines.give_back(stream))
        self._close(self._lines.unused())
        return stream

    def _renewed(self) -> Any:
        secure = self._trust.renewed()
        if secure is None:
            return None
        channel = self._grpc.secure_channel(self._endpoint.target, secure, OPTIONS)
        self._service = self._services.SandboxServiceStub(channel)
        return channel

    def _begin(self) -> Stream:
        frame, failure = self._messages.RunFrame, self._grpc.RpcError
        return Stream(self._endpoint, frame, self._service, failure)

    def wants(self, connection: object) -> bool:
        return self._lines.is_newest(connection)

    def close(self) -> None:
        self._close(self._lines.clear())

    @staticmethod
    def _close(channels: list[Any]) -> None:
        for channel in channels:
            channel.close()


class Stream(_Stream):
    """One open ``Run`` call."""

    def __init__(self, endpoint: Endpoint, frame: Any, service: Any, failure: Any) -> None:
        super().__init__(endpoint, frame)
        self._failure = failure
        self.on_close: Callable[[], None] = lambda: None
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = service.Run(self._requests(), metadata=metadata(endpoint))

    def _requests(self) -> Iterator[Any]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def send(self, kind: int, body: bytes | memoryview) -> None:
        self._outgoing.put(self._message(kind, body))

    def receive(self) -> tuple[int, bytes]:
        if (held := self._next()) is not None:
            return held
        try:
            for message in self._call:
                self._take(message)
                if (held := self._next()) is not None:
                    return held
        except self._failure as error:
            self.on_failure()
            raise explain(error, self._endpoint) from None
        raise local.closed(unread=False)

    def close(self) -> None:
        self._call.cancel()
        self._outgoing.put(None)
        self.on_close()


class AsyncChannel:
    """A gRPC channel for asynchronous clients; it belongs to the event loop that made it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._grpc, self._messages, self._services = libraries()
        self._endpoint = endpoint
        self._trust = Trust(self._grpc, endpoint)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lines = GrpcChannels()
        self._service: Any = None

    async def connect(self) -> AsyncStream:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._trust.forget()
            self._lines, self._loop = GrpcChannels(), loop
        lines = self._lines
        stream = lines.take(self._renewed, self._begin)
        stream.on_failure = self._trust.doubt
        stream.on_close = lambda: self._close(lines.give_back(stream))
        await self._close(lines.unused())
        return stream

    def _renewed(self) -> Any:
        secure = self._trust.renewed()
        if secure is None:
            return None
        channel = self._grpc.aio.secure_channel(self._endpoint.target, secure, OPTIONS)
        self._service = self._services.SandboxServiceStub(channel)
        return channel

    def _begin(self) -> AsyncStream:
        return AsyncStream(self._endpoint, self._messages.RunFrame, self._service, self._grpc.aio)

    def wants(self, connection: object) -> bool:
        return self._lines.is_newest(connection)

    async def share(self) -> None:
        """Calls share the channel already."""

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            await self._close(self._lines.clear())
        self._loop = None

    @staticmethod
    async def _close(channels: list[Any]) -> None:
        for channel in channels:
            await channel.close()


async def _nothing() -> None:
    """Do nothing when a stream is closed."""


class AsyncStream(_Stream):
    """One open ``Run`` call."""

    def __init__(self, endpoint: Endpoint, frame: Any, service: Any, aio: Any) -> None:
        super().__init__(endpoint, frame)
        self._aio = aio
        self.on_close: Callable[[], Awaitable[None]] = _nothing
        self._loop = asyncio.get_running_loop()
        self._call = service.Run(metadata=metadata(endpoint))

    def is_fresh(self) -> bool:
        return self._loop is asyncio.get_running_loop() and super().is_fresh()

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        # A call that has ended says why when it is read from.
        with contextlib.suppress(self._aio.AioRpcError, self._aio.UsageError):
            await self._call.write(self._message(kind, body))

    async def receive(self) -> tuple[int, bytes]:
        if (held := self._next()) is not None:
            return held
        try:
            while (message := await self._call.read()) is not self._aio.EOF:
                self._take(message)
                if (held := self._next()) is not None:
                    return held
        except self._aio.AioRpcError as error:
            self.on_failure()
            raise explain(error, self._endpoint) from None
        raise local.closed(unread=False)

    async def close(self) -> None:
        """End our side and read the other to its end: a cancelled call would outlive its loop."""
        if self._loop is not asyncio.get_running_loop():
            return
        try:
            if not self._call.done():
                await self._hear_out()
        finally:
            await self.on_close()

    async def _hear_out(self) -> None:
        failures = (TimeoutError, self._aio.AioRpcError, self._aio.UsageError)
        try:
            with contextlib.suppress(*failures):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._call.done_writing()
                    while await self._call.read() is not self._aio.EOF:
                        pass
        finally:
            self._call.cancel()
