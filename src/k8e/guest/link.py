"""The guest's end of the link: it dials the host's socket, and dials again whenever it is lost."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Callable

from k8e.guest.limits import why_refused
from k8e.guest.loop import READ, WRITE, Loop, Timer
from k8e.guest.wire import (
    CALL,
    ERROR,
    HELLO,
    MAX_REQUEST,
    PROOF,
    WELCOME,
    Splitter,
    WireError,
    equal,
    frame,
    pack,
    proof,
    unpack_dict,
)

SOCKET = "/run/k8e/link/sock"
KEY = "/run/k8e/link/key"
SMALL_READ = 64 << 10  # above malloc's own arena a buffer costs three system calls
LARGE_READ = 1 << 20  # once a small read came back full, a file is under way
LINGER = 0.01  # seconds; a short command ends within it, and one wake-up reports all of it
FIRST_RETRY, LAST_RETRY = 0.02, 0.25  # seconds; a new gateway finds its guests within a quarter


class GuestChannel:
    """One operation that the host opened."""

    __slots__ = ("_link", "handler", "number")

    def __init__(self, link: GuestLink, number: int) -> None:
        self._link = link
        self.number = number
        self.handler: Any = None

    def send(self, kind: int, body: bytes = b"", *, soon: bool = False) -> None:
        """Send a frame; one that may go ``soon`` waits a moment for others to go with it."""
        self._link.send(frame(kind, self.number, body), soon)

    def fail(self, error: BaseException) -> None:
        self.send(ERROR, pack(explain(error)))

    def close(self) -> None:
        self._link.channels.pop(self.number, None)
        # A handler knows its channel; without this the two, and an exec's whole output with them,
        # would stay until the garbage collector comes, which in a quiet guest is late.
        self.handler = None


def explain(error: BaseException) -> dict[str, Any]:
    """An error as the host passes it on: a stable code and a sentence."""
    if isinstance(error, OSError) and error.errno:
        text = error.strerror or str(error)
        if error.filename is not None:
            text = f"{os.fsdecode(error.filename)}: {text}"
        why = why_refused(error.errno)
        if why:
            text = f"{text} ({why})"
        return {"code": errno.errorcode.get(error.errno, "EIO"), "message": text}
    told = getattr(error, "told", None)
    if told is not None:
        return told
    # Its subclasses mean that something is missing in the call itself.
    if isinstance(error, LookupError) and not isinstance(error, (KeyError, IndexError)):
        return {"code": "ESRCH", "message": str(error.args[0] if error.args else error)}
    return {"code": "EINVAL", "message": f"{type(error).__name__}: {error}"}


class GuestLink:
    """The connection to the host, made again whenever it is lost."""

    def __init__(self, loop: Loop, operations: dict[str, Callable[..., Any]]) -> None:
        self.channels: dict[int, GuestChannel] = {}
        self._loop = loop
        self._operations = operations
        self._socket: Any = None
        self._outgoing: list[Any] = []
        self._retry = FIRST_RETRY
        self._reading = SMALL_READ
        self._nonce = b""
        self._ready = False
        self._choked = False
        self._held = self._urgent = False
        self._lingering: Timer | None = None

    def dial(self) -> None:
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(SOCKET)
            connection.setblocking(False)
            self._loop.watch(connection.fileno(), READ, self._on_event)
        except OSError:
            if connection is not None:
                connection.close()
            self._retry_later()
            return
        self._begin(connection)

    def _begin(self, connection: Any) -> None:
        """Greet whoever is at the other end of a connection that is watched already."""
        self._socket = connection
        self._splitter = Splitter(MAX_REQUEST)
        self._nonce = os.urandom(16)
        self.send(frame(HELLO, 0, self._nonce))

    def _read_key(self) -> bytes:
        """The key that only our host has beside us."""
        with open(KEY, "rb") as file:
            return file.read()

    def _retry_later(self) -> None:
        self._loop.later(self._retry, self.dial)
        self._retry = min(self._retry * 2, LAST_RETRY)

    def _lose(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._outgoing.clear()
        self._ready = self._choked = False
        self._retry_later()
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            if channel.handler is not None:
                channel.handler.on_lost()

    def _on_event(self, events: int) -> None:
        try:
            if events & WRITE:
                self._flush()
            if events & ~WRITE:
                self._receive()
        except (OSError, WireError):
            self._lose()
        except Exception:
            self._lose()  # frames may have been skipped, so only a new link is sure to be whole
            raise

    def _receive(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(self._reading)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        self._reading = LARGE_READ if len(data) >= SMALL_READ else SMALL_READ
        for kind, number, body in self._splitter.feed(data):
            if self._ready:
                self._on_frame(kind, number, body)
            else:
                self._greet(kind, body)

    def _greet(self, kind: int, body: bytes) -> None:
        key = self._read_key()
        if kind != WELCOME or not equal(body[16:], proof(key, self._nonce, b"host")):
            raise WireError("the other end is not our host")
        self.send(frame(PROOF, 0, proof(key, body[:16], b"guest")))
        self._ready = True
        self._retry = FIRST_RETRY

    def _on_frame(self, kind: int, number: int, body: bytes) -> None:
        channel = self.channels.get(number)
        if kind == CALL:
            if channel is not None:
                raise WireError(f"channel {number} is open already")
            self._call(number, unpack_dict(body, len(body)))  # from the host, which we trust
        elif channel is not None:
            channel.handler.on_frame(kind, body)
        # Otherwise it crossed with our closing of the channel.

    def _call(self, number: int, spec: dict[str, Any]) -> None:
        channel = self.channels[number] = GuestChannel(self, number)
        try:
            operation = self._operations.get(spec.get("op", ""))
            if operation is None:
                raise LookupError("unknown operation {!r}".format(spec.get("op")))
            operation(channel, spec)
        except Exception as error:  # PID 1 must outlive every malformed request
            channel.fail(error)
            channel.handler = None
        if channel.handler is None:
            channel.close()

    def send(self, data: bytes, soon: bool = False) -> None:
        if self._socket is None:
            return
        self._outgoing.append(data)
        if soon:
            if self._lingering is None:
                self._lingering = self._loop.later(LINGER, self._flush)
        elif self._held:
            self._urgent = True
        elif not self._choked:
            self._flush()

    def hold(self) -> None:
        """Hold back frames until ``release``: they go together, and wake the host once."""
        self._held = True

    def release(self) -> None:
        urgent, self._held, self._urgent = self._urgent, False, False
        if urgent and not self._choked:
            self._flush()

    def _flush(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._socket is None:
            return
        fd = self._socket.fileno()
        if len(self._outgoing) > 1 and sum(map(len, self._outgoing)) <= SMALL_READ:
            self._outgoing = [b"".join(self._outgoing)]
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                self._choked = True
                self._loop.watch(fd, READ | WRITE, self._on_event)
                return
            except OSError:
                # The error came up while handling something else; the read side reports it and
                # cleans up.
                self._outgoing.clear()
                break
            if sent < len(self._outgoing[0]):
                self._outgoing[0] = memoryview(self._outgoing[0])[sent:]
            else:
                del self._outgoing[0]
        if self._choked:
            self._choked = False
            self._loop.watch(fd, READ, self._on_event)
