"""Clients of a real MCP server, over every transport and in both eras of the protocol."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncGenerator, Generator
from typing import Any, Protocol

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from k8e import access
from k8e.conformance.lab.ports import free_port
from tests.places import COMMAND, Place

PATIENCE = 30.0
LEGACY, MODERN = "legacy", "2026-07-28"
WAYS = ["stdio", "stdio-modern", "http", "http-modern"]


class HttpServer:
    """``k8e sandbox-mcp --http`` in a place."""

    def __init__(self, place: Place, *arguments: str) -> None:
        self.port = free_port()
        address = ["--http", "--http-addr", f"127.0.0.1:{self.port}"]
        command = [*COMMAND, "sandbox-mcp", *address, *arguments]
        self.process = subprocess.Popen(command, env=place.environ, stderr=subprocess.PIPE)
        self.token_file = place.home / ".k8e" / "sandbox" / "mcp-token"
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline().decode()
        assert "/mcp" in self.said, self.said
        self.token = access.token(self.token_file)
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.headers = {"authorization": f"Bearer {self.token}"}

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE) in (0, -15)
        assert self.process.stderr is not None
        self.process.stderr.close()


class Reachable(Protocol):
    """A server, and what its client shows to it."""

    url: str
    headers: dict[str, str]


@contextlib.contextmanager
def http_server(place: Place, *arguments: str) -> Generator[HttpServer]:
    server = HttpServer(place, *arguments)
    try:
        yield server
    finally:
        server.close()


def stdio_command(place: Place, *arguments: str, **environ: str) -> StdioServerParameters:
    command = [*COMMAND, "sandbox-mcp", *arguments]
    return StdioServerParameters(command=command[0], args=command[1:], env=place.environ | environ)


@contextlib.asynccontextmanager
async def over_http(
    server: Reachable, *, mode: Any = LEGACY, **options: Any
) -> AsyncGenerator[Client]:
    async with (
        httpx2.AsyncClient(headers=server.headers, timeout=PATIENCE) as http,
        Client(
            streamable_http_client(server.url, http_client=http), mode=mode, **options
        ) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def over_stdio(
    place: Place, *arguments: str, mode: Any = LEGACY, **options: Any
) -> AsyncGenerator[Client]:
    async with Client(stdio_command(place, *arguments), mode=mode, **options) as client:
        yield client


def told(result: Any) -> dict[str, Any]:
    """The fields of a tool's answer, which must be one."""
    assert not result.is_error, result.content
    assert result.structured_content is not None
    return result.structured_content


def refused(result: Any) -> str:
    """The text of a tool's error."""
    assert result.is_error, result
    return result.content[0].text
