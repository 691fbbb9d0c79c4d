"""Runs operations over blocking connections, which are kept for the next operation."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from k8e import errors
from k8e.client import endpoints, local, requests
from k8e.client.operations import PULL, RECEIVE, RETRY_DELAYS, Operation, Send
from k8e.client.requests import Content

T = TypeVar("T")
MAX_IDLE = 128  # connections kept for the next operation


class Connection(Protocol):
    """Frames to and from a gateway, for one operation at a time."""

    def begin(self) -> None: ...
    def send(self, kind: int, body: bytes | memoryview) -> None: ...
    def receive(self) -> tuple[int, bytes]: ...
    def is_fresh(self) -> bool: ...
    def close(self) -> None: ...


class Ending(Protocol):
    """Something that ends with the client that made it."""

    def close(self) -> None: ...


class Connector(Protocol):
    """Opens connections to one endpoint."""

    def connect(self) -> Connection: ...
    def wants(self, connection: object) -> bool: ...
    def close(self) -> None: ...


def connector(endpoint: endpoints.Endpoint) -> Connector:
    if endpoint.target:
        from k8e.client import remote

        return remote.GrpcChannel(endpoint)
    return LocalConnector(endpoint.socket)


class LocalConnector:
    """Connects to a given socket, or to this host's gateway, which is started if need be."""

    def __init__(self, path: str) -> None:
        self._path = path

    def connect(self) -> Connection:
        try:
            return local.Connection(local.dial(self._path or local.default_socket()))
        except local.NoGateway:
            if self._path:
                raise nobody_listens(self._path) from None
        from k8e.client import autostart

        return local.Connection(autostart.dial())

    def wants(self, connection: object) -> bool:
        """Whether a connection is worth keeping; all are."""
        return True

    def close(self) -> None:
        """Nothing is shared among local connections."""


def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run a function that may block; here any thread may."""
    return work(*arguments)


def nobody_listens(path: str) -> errors.NoGateway:
    return errors.NoGateway(
        f"no gateway listens on {path}",
        hint="start it there, or unset K8E_SANDBOX_ENDPOINT to use this host's own",
    )


class Pool:
    """Idle connections. Lists take and give atomically, so threads need no lock here."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._idle: list[Connection] = []
        self._pid = os.getpid()
        self.closed = False
        self._programs: weakref.WeakSet[Ending] = weakref.WeakSet()

    def end_with(self, program: Ending) -> None:
        """Remember something that ends with the client, as long as other code refers to it."""
        self._programs.add(program)

    @property
    def ending(self) -> list[Ending]:
        """The objects to close before the client."""
        return list(self._programs)

    def check_open(self) -> None:
        """Raise ClientClosed once the client is closed: nothing would end a new operation."""
        if self.closed:
            raise errors.ClientClosed

    def take(self) -> Connection:
        self.check_open()
        if self._pid != os.getpid():  # a forked child must not share its parent's connections
            self._idle, self._pid = [], os.getpid()
        while self._idle:
            with contextlib.suppress(IndexError):
                connection = self._idle.pop()
                if connection.is_fresh():
                    return connection
                connection.close()
        return self._connector.connect()

    def renew(self) -> Connection:
        """A connection in place of one that a dying gateway never read from."""
        self.check_open()
        return self._connector.connect()

    def keep(self, connection: Connection) -> None:
        """Take back a connection whose operation has ended well."""
        room = len(self._idle) < MAX_IDLE and not self.closed
        if room and self._connector.wants(connection):
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        self.closed = True
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        self._connector.close()


class SyncOperation:
    """One operation under way on one connection."""

    def __init__(
        self,
        connection: Connection,
        operation: Operation[Any],
        source: Content | None,
        renew: Callable[[], Connection] | None = None,
    ) -> None:
        """``renew`` gives another connection if the gateway died before it read the call."""
        self.connection = connection
        self.result: Any = None
        self.done = False
        self._operation = operation
        self._source = iter(()) if source is None else requests.chunks(source)
        self._renew = renew
        self._sent: list[Send] = []  # until something comes back
        self._delays = iter(RETRY_DELAYS)
        connection.begin()

    def next_event(self) -> Any:
        """The next event; None when the result is there."""
        answer: Any = None
        step: Any
        try:
            while True:
                if isinstance(answer, errors.GatewayUnreachable):
                    step = self._operation.throw(answer)
                else:
                    step = self._operation.send(answer)
                answer = None
                if isinstance(step, Send):
                    self._send(step)
                elif step is RECEIVE:
                    answer = self._receive()
                elif step is PULL:
                    answer = next(self._source, b"")
                else:
                    return step
        except StopIteration as stop:
            self.result, self.done = stop.value, True
            return None
        except BaseException:
            self.close()
            raise

    def _send(self, step: Send) -> None:
        if self._renew is not None:
            self._sent.append(step)
        self.connection.send(step.kind, step.body)

    def _receive(self) -> tuple[int, bytes] | errors.GatewayUnreachable:
        while True:
            try:
                frame = self.connection.receive()
            except errors.GatewayUnreachable as error:
                delay = next(self._delays, None)
                if not error.unread or len(self._sent) != 1 or delay is None or not self._renew:
                    return error
                # We met a dying gateway. It has begun nothing, so this is the first attempt.
                time.sleep(delay)
                self.connection.close()
                self.connection = self._renew()
                self.connection.begin()
                self.connection.send(*self._sent[0])
            else:
                self._sent, self._renew = [], None
                return frame

    def close(self) -> None:
        """Give up; the gateway treats the end of the connection as the end of the operation."""
        if not self.done:
            self._operation.close()
            self.connection.close()
