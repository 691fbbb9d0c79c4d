"""``k8e sandbox-mcp --http``: the HTTP app on a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket

import uvicorn

from k8e import access, errors, http_connections
from k8e.access import HostPolicy
from k8e.mcp import http
from k8e.mcp.options import McpOptions
from k8e.mcp.server import World

LOOPBACK = "127.0.0.1"
BACKLOG = 512
GRACE_SECONDS = 3


def parse(address: str) -> tuple[str, int]:
    """``HOST:PORT``; without a host, this machine alone."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise errors.InvalidRequest(
            f"{address!r} is not an address", hint="write HOST:PORT, such as 127.0.0.1:8811"
        )
    return host.strip("[]") or LOOPBACK, int(port)


def check(host: str, *, insecure: bool) -> None:
    """Refuse to send a token over a network in clear text, unless a flag allows it."""
    if access.is_loopback(host):
        return
    if not insecure:
        raise errors.Denied(
            f"{host} can be reached from other machines, and the token would travel in clear text",
            hint="listen on 127.0.0.1 behind a proxy with TLS; in a network where nobody else can "
            "listen --http-insecure allows it",
        )
    os.write(2, b"k8e sandbox-mcp: warning: the token and all files cross the network in clear\n")


def run(options: McpOptions, address: str, names: list[str], *, insecure: bool = False) -> int:
    """Serve until we are stopped."""
    logging.basicConfig(level=logging.WARNING, format="k8e sandbox-mcp: %(message)s")
    host, port = parse(address)
    check(host, insecure=insecure)
    token = access.token()
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    door = HostPolicy.of(token, shown, names)
    place = f"http://{shown}:{listening.getsockname()[1]}{http.PATH}"
    where = "in the environment" if os.environ.get(access.VARIABLE) else access.default_file()
    os.write(2, f"k8e sandbox-mcp: {place}, token {where}\n".encode())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options, door, listening))
    return 0


async def _serve(options: McpOptions, door: HostPolicy, listening: socket.socket) -> None:
    world = World(client=options.client(), allowed_hosts=options.allowed_hosts)
    config = uvicorn.Config(
        http.App(world, door),
        http=http_connections.protocol(),
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
    )
    serving = uvicorn.Server(config)

    def hang_up() -> None:  # uvicorn itself knows only SIGINT and SIGTERM
        serving.should_exit = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    await serving.serve(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise errors.InvalidRequest(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another with --http-addr HOST:PORT",
        ) from None
