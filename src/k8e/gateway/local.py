"""The unix socket: local clients speak frames, and the kernel identifies them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple, cast

from k8e.admission import Admission, UnknownConnection
from k8e.audit.act import Act, AuditCaller
from k8e.gateway.frames import MAX_UNREAD, ClientConnection
from k8e.gateway.identity import LOCAL, UnknownPeer
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.link import Outgoing, batch
from k8e.model import Principal

log = logging.getLogger(__name__)

_PEER = struct.Struct("3i")  # pid, uid, gid
MAX_SILENT = 512
"""Connections that have sent nothing yet; beyond that number, the oldest of them is closed."""


class Known(NamedTuple):
    """A caller, and how it was identified."""

    principal: Principal
    caller: AuditCaller


class LocalProtocol(asyncio.Protocol):
    """One connection of a local client."""

    def __init__(
        self, gateway: Gateway, known: Known | None = None, admission: Admission | None = None
    ) -> None:
        """``known`` is the caller, if the kernel need not be asked.

        ``admission`` has places for connections that say nothing.
        """
        self._gateway = gateway
        self._known = known
        self._admission = admission
        self._place: UnknownConnection | None = None
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._client: ClientConnection | None = None
        self._transport: asyncio.Transport | None = None
        self._outgoing = Outgoing()
        self._last = 0  # channel that was opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._outgoing.transport = cast("asyncio.Transport", transport)
        known = self._known or self._ask_kernel(transport.get_extra_info("socket"))
        if known is None:
            self._transport.abort()
            return
        if self._admission is not None:
            self._place = self._admission.enter("", self._transport.abort)
        # Above what all windows of an operation hold, so that a client that reads last may
        # send first; it is bounded, so that no client makes us hold answers without end.
        self._transport.set_write_buffer_limits(MAX_UNREAD)
        self._client = ClientConnection(
            self._gateway, known.principal, self._outgoing.send, known.caller
        )
        self._gateway.farewells.add(self._say_goodbye)

    def _ask_kernel(self, peer: socket.socket) -> Known | None:
        """The gateway's own user, or root; None for all others."""
        data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _ = _PEER.unpack(data)
        peer_name = f"uid {uid}, pid {pid}"
        if uid in (0, os.geteuid()):
            return Known(LOCAL, AuditCaller(LOCAL.name, "socket", peer_name))
        log.warning("refused a connection of uid %d to the local socket", uid)
        act = Act(AuditCaller("", "socket", peer_name), "connect")
        self._gateway.refused(UnknownPeer(f"uid {uid} is not served here"), act)
        return None

    def data_received(self, data: bytes) -> None:
        if self._client is None or self._transport is None:
            return
        try:
            with batch:
                for kind, channel, body in self._splitter.feed(data):
                    if self._place is not None:
                        self._place.leave()
                        self._place = None
                    if kind == wire.CALL:
                        self._last = channel
                    self._client.receive(kind, channel, body)
        except wire.WireError as error:
            log.warning("closed a local connection: %s", error)
            self._transport.abort()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _say_goodbye(self) -> None:
        """Report which calls were read, so that a client can send the others elsewhere."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._outgoing.send(wire.GOODBYE, 0, wire.CREDIT_BODY.pack(self._last))

    def connection_lost(self, exc: Exception | None) -> None:
        self._gateway.farewells.discard(self._say_goodbye)
        if self._place is not None:
            self._place.leave()
        if self._client is not None:
            self._client.close()


async def listen(gateway: Gateway, path: Path) -> asyncio.Server:
    """Serve local clients on ``path``, which appears complete and only for its owner."""
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.unlink(missing_ok=True)
    loop = asyncio.get_running_loop()
    admission = Admission(MAX_SILENT, MAX_SILENT)
    server = await loop.create_unix_server(
        lambda: LocalProtocol(gateway, admission=admission), scratch, backlog=512
    )
    scratch.chmod(0o600)
    scratch.rename(path)
    return server


async def inside(gateway: Gateway, known: Known) -> socket.socket:
    """A connection for a part of this process that works for ``known``.

    Never through the socket's path: there the kernel would say that it is us, and so an admin.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.connect_accepted_socket(lambda: LocalProtocol(gateway, known), ours)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return theirs
