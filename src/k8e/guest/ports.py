"""Connections to servers in the sandbox, on its own loopback and nowhere else.

DATA goes both ways as the receiver grants credit, END is a half-close. What the opener sends before
the connection is there waits for it, so that a request needs no round trip of its own.

An opener may wait for a server that does not listen yet. No kernel, gVisor's included, reports that
a port begins to listen. So the guest tries again, in the sandbox, where an attempt is one system
call on loopback, and nothing crosses the link until one succeeds or the time is over.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from k8e.guest.loop import READ, WRITE, Loop, Timer
from k8e.guest.wire import (
    CANCEL,
    CREDIT,
    CREDIT_BODY,
    DATA,
    END,
    RESULT,
    WINDOW,
    WireError,
    pack,
)

CONNECT_SECONDS = 10.0  # a server whose backlog is full answers nothing
SERVER_RETRY = 0.005  # seconds between two tries to connect to what is waited for …
MAX_SERVER_RETRY = 0.1  # … and the most
MOST_CONNECTIONS = 256
_NOBODY_YET = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
PORT_READ = 64 << 10
DEFAULT_HOST = "127.0.0.1"
_LOOPBACK_6 = b"\0" * 15 + b"\1"


def loopback_addresses(host: Any) -> list[tuple[int, str]]:
    """Family and address of each loopback address of ``host``; OSError unless all are loopback.

    No name is looked up: the sandbox's own files and servers would say what it means.
    """
    if host is None or host == "":
        host = DEFAULT_HOST
    if host == "localhost":
        return [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            packed = socket.inet_pton(family, host)
        except (OSError, TypeError, ValueError):  # an address of another family, or none at all
            continue
        if packed[0] == 127 if family == socket.AF_INET else packed == _LOOPBACK_6:
            return [(family, host)]
    raise OSError(errno.EACCES, "only the sandbox's own loopback can be connected to")


def check_port(port: Any) -> int:
    """Return ``port`` if it is a port number."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise OSError(errno.EINVAL, "port must be a number from 1 to 65535")
    return port


class Ports:
    """All connections that were opened from outside."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._open: set[PortConnection] = set()

    def connect(self, channel: Any, spec: dict[str, Any]) -> None:
        addresses = loopback_addresses(spec.get("host"))
        port = check_port(spec.get("port"))
        if len(self._open) >= MOST_CONNECTIONS:
            raise OSError(errno.EAGAIN, f"the sandbox has {MOST_CONNECTIONS} connections already")
        credit = int(spec.get("window") or WINDOW)
        connection = PortConnection(self._loop, channel, credit, self._open.discard)
        self._open.add(connection)
        channel.handler = connection
        connection.dial(addresses, port, float(spec.get("wait") or 0))


class PortConnection:
    """One connection, and the messages that its channel may send."""

    def __init__(self, loop: Loop, channel: Any, credit: int, on_close: Any) -> None:
        self._loop = loop
        self._channel = channel
        self._on_close = on_close
        self._credit = credit  # bytes that the opener has room for
        self._socket: socket.socket | None = None
        self._deadline: Timer | None = None
        self._addresses: list[tuple[int, str]] = []
        self._waiting: list[tuple[int, str]] = []  # addresses that have not been tried
        self._wait = 0.0  # seconds for a server to come
        self._pause = SERVER_RETRY
        self._retry: Timer | None = None
        self._port = 0
        self._failure: OSError | None = None
        self._connected = False
        self._heard_all = False  # the server has ended its side
        self._ending = False  # the opener has ended its side …
        self._said_all = False  # … and the server knows
        self._deaf = False  # the server no longer reads
        self._pending: list[Any] = []

    # Connecting.

    def dial(self, addresses: list[tuple[int, str]], port: int, wait: float = 0) -> None:
        self._addresses, self._port, self._wait = addresses, port, wait
        self._deadline = self._loop.later(wait or CONNECT_SECONDS, self._give_up)
        self._dial_all()

    def _dial_all(self) -> None:
        self._waiting, self._failure = list(self._addresses), None
        self._dial_next()

    def _dial_next(self) -> None:
        while self._waiting:
            family, address = self._waiting.pop(0)
            try:
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                self._socket.setblocking(False)
                code = self._socket.connect_ex((address, self._port))
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, os.strerror(code))
            except OSError as error:
                self._missed(error)
                continue
            self._loop.watch(self._socket.fileno(), WRITE, self._on_event)
            return
        failure = self._failure or OSError(errno.ECONNREFUSED, "nothing was tried")
        if self._wait and failure.errno in _NOBODY_YET:
            self._retry = self._loop.later(self._pause, self._dial_all)
            self._pause = min(1.5 * self._pause, MAX_SERVER_RETRY)
        else:
            self._fail(failure)

    def _missed(self, error: OSError) -> None:
        """Note that an address did not work; the reason of the first one is reported."""
        self._drop_socket()
        if error.errno == errno.ECONNREFUSED:
            text = f"nothing in the sandbox listens on port {self._port}"
            error = OSError(errno.ECONNREFUSED, text)
        self._failure = self._failure or error

    def _give_up(self) -> None:
        if self._connected:
            return
        text = f"port {self._port} of the sandbox did not answer"
        if self._socket is None:  # no attempt reached a server
            text = f"nothing in the sandbox listens on port {self._port} after {self._wait:g} s"
        self._fail(OSError(errno.ETIMEDOUT, text))

    def _finish_dialling(self, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and sock.getsockname() == sock.getpeername():
            code = errno.ECONNREFUSED  # the kernel gave us this very port: we reached ourselves
        if code:
            self._missed(OSError(code, os.strerror(code)))
            self._dial_next()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connected = True
        if self._deadline is not None:
            self._deadline.cancel()
        # An opener that has sent data already waits for the server's answer, not for ours.
        self._channel.send(RESULT, pack({"port": self._port}), soon=bool(self._pending))
        self._write(sock)
        self._settle()

    # From the opener.

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind == CREDIT:
            self._credit += CREDIT_BODY.unpack(body)[0]
        elif kind == CANCEL:
            self.close()
            return
        elif kind == DATA:
            if body and not self._ending:
                self._pending.append(body)
        elif kind == END:
            self._ending = True
        else:
            raise WireError(f"frame {kind} on a connection")
        if self._connected and self._socket is not None:
            if kind != CREDIT:
                self._write(self._socket)
            self._settle()

    def on_lost(self) -> None:
        self.close()

    def _write(self, sock: socket.socket) -> None:
        taken = 0
        while self._pending:
            data = self._pending[0]
            try:
                count = len(data) if self._deaf else sock.send(data)
            except BlockingIOError:
                break
            except OSError:
                # It may have answered nevertheless, and that can still be read.
                self._deaf = True
                continue
            taken += count
            if count < len(data):
                self._pending[0] = memoryview(data)[count:]
            else:
                del self._pending[0]
        if taken:
            self._channel.send(CREDIT, CREDIT_BODY.pack(taken), soon=taken < PORT_READ)
        if self._ending and not self._pending and not self._said_all:
            self._said_all = True
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it is gone; reading tells how

    # From the server.

    def _on_event(self, events: int) -> None:
        sock = self._socket
        if sock is None:
            return
        if not self._connected:
            self._finish_dialling(sock)
            return
        if self._pending and events & ~READ:
            self._write(sock)
        if not self._heard_all and self._credit > 0 and events & ~WRITE:
            try:
                self._read(sock)
            except OSError as error:
                self._fail(error)
                return
        self._settle()

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(min(PORT_READ, self._credit))
        except BlockingIOError:
            return
        if data:
            self._credit -= len(data)
            self._channel.send(DATA, data)
        else:
            self._heard_all = True
            self._channel.send(END)

    # Going on, and ending.

    def _settle(self) -> None:
        """Watch for the events that can come next, or finish."""
        if self._socket is None:
            return
        if self._heard_all and self._said_all:
            self._channel.send(RESULT, pack({}))
            self.close()
            return
        wanted = WRITE if self._pending else 0
        if not self._heard_all and self._credit > 0:
            wanted |= READ
        if wanted:
            self._loop.watch(self._socket.fileno(), wanted, self._on_event)
        else:  # a watch for nothing would still report errors, again and again
            self._loop.unwatch(self._socket.fileno())

    def _fail(self, error: OSError) -> None:
        self._channel.fail(error)
        self.close()

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        for timer in (self._deadline, self._retry):
            if timer is not None:
                timer.cancel()
        self._drop_socket()
        self._pending.clear()
        self._channel.close()
        self._on_close(self)
