"""Calls of web servers that end in time, whatever the server does.

The time-out of a socket is for each byte, and a hostile server sends one whenever it is due. So
another thread cuts the connection when the time of the whole call is over, or when all is to stop.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.request
from collections.abc import Generator
from typing import Any

from k8e import errors


def failed(host: str, why: str) -> errors.ImageUnusable:
    return errors.ImageUnusable(
        f"the registry {host} failed: {why}",
        hint="try again; if it stays so, ask whoever runs the registry",
    )


class Call:
    """The connections of one call: one for each redirect."""

    def __init__(self) -> None:
        self.ended = ""
        """Why they were cut, if they were."""
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()

    def handlers(self) -> list[urllib.request.BaseHandler]:
        """What makes a urllib opener use connections that can be cut."""
        return [_Plain(self), _Tls(self)]

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            # A second descriptor: TLS takes the first one away.
            self._sockets.append(connection.dup())
            if self.ended:
                self._cut()

    def end(self, why: str) -> None:
        with self._lock:
            self.ended = self.ended or why
            self._cut()

    def _cut(self) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets.clear()


class Calls:
    """All calls that are under way."""

    def __init__(self) -> None:
        self._open: set[Call] = set()
        self._stopped = ""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def begin(self, host: str, seconds: float) -> Generator[Call]:
        """A call of a registry; whatever fails in it when its time is over failed for that."""
        call = Call()
        with self._lock:
            call.ended = self._stopped
            self._open.add(call)
        timer = threading.Timer(seconds, call.end, (f"it took more than {seconds:g} s",))
        timer.daemon = True
        timer.start()
        try:
            yield call
        except Exception:
            if not call.ended:
                raise
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(call)
            call.close()
        if call.ended:
            raise failed(host, call.ended)

    def stop(self) -> None:
        """End all that are under way, and all to come."""
        with self._lock:
            self._stopped = "the gateway is being stopped"
            for call in self._open:
                call.end(self._stopped)


class _Connection(http.client.HTTPConnection):
    call: Call | None = None

    def connect(self) -> None:
        super().connect()
        if self.call is not None:
            self.call.watch(self.sock)


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """Watched before TLS begins: its ``connect`` calls the one above."""


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self._make = _maker(_Connection, call)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._make, req)


class _Tls(urllib.request.HTTPSHandler):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self._make = _maker(_TlsConnection, call)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._make, req)


def _maker(kind: type[_Connection], call: Call) -> Any:
    def make(host: str, **options: Any) -> _Connection:
        connection = kind(host, **options)
        connection.call = call
        return connection

    return make
