"""The HTTP endpoint: bound when the gateway starts, loaded at the first connection.

The server and the dialects behind it take memory and time, and many gateways never need them.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import importlib.util
import ipaddress
import logging
import os
import socket
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING

from k8e import access, errors
from k8e.access import HostPolicy
from k8e.gateway import identity, tls
from k8e.gateway.service import Gateway
from k8e.settings import Settings

if TYPE_CHECKING:
    from k8e.gateway.http import server

log = logging.getLogger(__name__)

DEFAULT = "127.0.0.1:8811"
NONE = "none"
BACKLOG = 512


class HttpEndpoint:
    """A listening socket, and the server that is loaded at its first connection."""

    def __init__(
        self,
        gateway: Gateway,
        listening: socket.socket,
        door: HostPolicy,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """``context`` is that of TLS, where other machines can reach the endpoint."""
        self.address = _url(*listening.getsockname()[:2], tls=context is not None)
        self._context = context
        self._gateway = gateway
        self._socket = listening
        self._door = door
        self._server: server.UvicornServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listening, self._first)

    def _first(self) -> None:
        self._loop.remove_reader(self._socket)
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await asyncio.to_thread(importlib.import_module, "k8e.gateway.http.server")
            from k8e.gateway.http import server

            self._server = server.UvicornServer(self._gateway, self._door, self._context)
            if not self._closing:
                await self._server.serve(sockets=[self._socket])
        except Exception as error:
            log.exception("the HTTP endpoint failed")
            self._gateway.http_on = f"none: {error}"
        finally:
            self._socket.close()

    async def close(self) -> None:
        """Let answers under way end, and close everything that callers have open."""
        self._closing = True
        if self._serving is None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            return
        if self._server is not None:
            self._server.told.set()
        await asyncio.wait({self._serving})


async def open_endpoint(gateway: Gateway, *, background: bool) -> HttpEndpoint | None:
    """The endpoint that the settings ask for.

    If it cannot be opened, a gateway in the background starts all the same, and so does one whose
    settings name no address; the status says why there is none.
    """
    asked = gateway.settings.http
    address = asked or usual(gateway.settings, background=background)
    if address == NONE:
        gateway.http_on = NONE
        return None
    try:
        endpoint = await listen(gateway, address)
    except errors.K8eError as error:
        if asked and not background:
            raise
        log.warning("no HTTP endpoint: %s", error)
        gateway.http_on = f"none: {error}"
        return None
    gateway.http_on = endpoint.address
    log.info("HTTP on %s", endpoint.address)
    return endpoint


def usual(settings: Settings, *, background: bool) -> str:
    """The address that is served if the settings name none.

    A gateway in the background leaves when it is idle, so that a URL of it would lead nowhere. A
    user who turned the gRPC endpoint off wants no TCP listener at all.
    """
    return NONE if background or settings.listen == NONE else DEFAULT


async def listen(gateway: Gateway, address: str) -> HttpEndpoint:
    """Serve HTTP; on an address that other machines can reach, by TLS alone.

    Raises:
        Conflict: the port is taken.
        InvalidRequest: the address is none of this machine's.
        Denied: others can read the token.
    """
    place = parse(address)
    if importlib.util.find_spec("uvicorn") is None:
        raise errors.NotImplementedYet(
            "HTTP needs a package that is not installed", hint=errors.install_extra("gateway")
        )
    token = await asyncio.to_thread(access.token)
    names = [str(place.address), *tls.advertised(gateway.settings.advertise_names)]
    first, *more = (f"[{name}]" if ":" in name else name for name in names)
    door = HostPolicy.of(token, first, more)
    listening = _bind(place)
    try:
        context = None if place.address.is_loopback else await _secured(gateway)
    except BaseException:
        listening.close()
        raise
    known = replace(door, hint="K8E_ADVERTISE_NAMES makes it known")
    return HttpEndpoint(gateway, listening, known, context)


async def _secured(gateway: Gateway) -> ssl.SSLContext:
    """TLS with the gateway's certificate, which is shown anew once it was renewed."""
    certificates = gateway.certificates
    await certificates.load()
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])

    def show() -> None:
        made.load_cert_chain(certificates.folder / tls.CERT, certificates.folder / tls.KEY)

    show()
    gateway.spawn(certificates.keep(show))
    return made


def parse(address: str) -> identity.TcpEnd:
    """The address and port of ``K8E_HTTP``."""
    host, _, port = address.rpartition(":")
    name = "127.0.0.1" if host in ("", "localhost") else host.removeprefix("[").removesuffix("]")
    try:
        found = identity.TcpEnd(ipaddress.ip_address(name), int(port))
    except ValueError:
        found = None
    if found is None or not 0 <= found.port <= 65535:
        raise errors.InvalidRequest(
            f"K8E_HTTP is {address!r}, not an address and port", hint=f"use {DEFAULT}, or none"
        )
    return found


def _bind(place: identity.TcpEnd) -> socket.socket:
    family = socket.AF_INET if place.address.version == 4 else socket.AF_INET6
    # With the protocol named, asyncio turns Nagle's algorithm off; see listening.py.
    found = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setblocking(False)
        found.bind((str(place.address), place.port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        hint = "set K8E_HTTP to another port, or to none"
        if error.errno == errno.EADDRINUSE:
            raise errors.Conflict(
                f"port {place.port} is taken by another program (K8E_HTTP)", hint=hint
            ) from None
        why = error.strerror or os.strerror(error.errno or 0)
        raise errors.InvalidRequest(
            f"cannot listen on {place} (K8E_HTTP): {why}", hint=hint
        ) from None
    return found


def _url(host: str, port: int, *, tls: bool) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
