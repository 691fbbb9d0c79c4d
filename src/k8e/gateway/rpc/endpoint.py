"""The gRPC endpoint: ``sandbox.v1`` over TLS, for K8E's clients and for remote SDKs.

gRPC itself is imported only here, when the endpoint is opened: an installation without it has a
gateway too, on the unix socket.
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
from typing import TYPE_CHECKING

from k8e import errors
from k8e.gateway import identity
from k8e.gateway.service import Gateway

if TYPE_CHECKING:
    from k8e.gateway.rpc import server

log = logging.getLogger(__name__)

NEEDED = ("grpc", "google", "cryptography")
STOP_SECONDS = 0.25  # for answers under way when the gateway stops; idle streams never end alone


class GrpcEndpoint:
    """A running endpoint, or the reason why there is none."""

    def __init__(
        self,
        address: str,
        running: server.RunningServer | None = None,
        keeper: asyncio.Task[None] | None = None,
    ) -> None:
        self.address = address
        """``host:port`` as a client dials it, or ``none: why``."""
        self._running = running
        self._keeper = keeper

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        if self._running is not None:
            await self._running.stop(STOP_SECONDS)


async def listen(gateway: Gateway) -> GrpcEndpoint:
    """Serve ``K8E_LISTEN``; without the gateway extra, warn and serve nothing.

    Raises:
        Conflict: the port is taken.
        InvalidRequest: the address is not one of this machine's.
    """
    endpoint = parse(gateway.settings.listen)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        log.warning("no gRPC endpoint: %s not installed (extra 'gateway')", ", ".join(missing))
        return GrpcEndpoint("none: the extra 'gateway' is not installed")
    check_free(endpoint)
    certificates = gateway.certificates
    # Both take a tenth of a second: on first start at the same time.
    loading = gateway.spawn(certificates.load())
    await asyncio.to_thread(_import)
    await loading
    from k8e.gateway.rpc import server

    running = await server.start(gateway, endpoint, certificates)
    if running is None:
        check_free(endpoint)
        raise errors.K8eError(f"gRPC cannot listen on {endpoint} (K8E_LISTEN)")
    return GrpcEndpoint(str(running.endpoint), running, gateway.spawn(certificates.keep()))


def _import() -> None:
    # Else gRPC writes a line to stderr for every port scan.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    importlib.import_module("k8e.gateway.rpc.server")


def parse(address: str) -> identity.TcpEnd:
    """The address and port of ``K8E_LISTEN``."""
    host, _, port = address.rpartition(":")
    name = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    try:
        endpoint = identity.TcpEnd(ipaddress.ip_address(name), int(port))
    except ValueError:
        endpoint = None
    if endpoint is None or not 0 <= endpoint.port <= 65535:
        raise errors.InvalidRequest(
            f"K8E_LISTEN is {address!r}, not an address and port",
            hint="use 127.0.0.1:50051, [::1]:50051, an address of this machine, or none",
        )
    return endpoint


def check_free(endpoint: identity.TcpEnd) -> None:
    """Report clearly that a port is taken; gRPC's own message is for its developers."""
    family = socket.AF_INET if endpoint.address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(endpoint.address), endpoint.port))
        except OSError as error:
            hint = "set K8E_LISTEN to another port, or to none"
            if error.errno == errno.EADDRINUSE:
                raise errors.Conflict(
                    f"port {endpoint.port} is taken by another program (K8E_LISTEN)", hint=hint
                ) from None
            raise errors.InvalidRequest(
                f"cannot listen on {endpoint} (K8E_LISTEN): {error.strerror}", hint=hint
            ) from None
