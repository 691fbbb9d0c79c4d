"""One gateway and one HTTP server for all tests of the MCP server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest
from mcp import Client

from tests.mcp import connecting
from tests.mcp.connecting import HttpServer
from tests.places import Place

Connect = Callable[..., contextlib.AbstractAsyncContextManager[Client]]


@pytest.fixture(scope="session")
def http(place: Place) -> Generator[HttpServer]:
    with connecting.http_server(place) as server:
        yield server


@pytest.fixture(params=connecting.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def connect(way: str, place: Place, http: HttpServer) -> Connect:
    """Opens a client in one of the ways."""
    mode = connecting.MODERN if way.endswith("modern") else connecting.LEGACY

    @contextlib.asynccontextmanager
    async def opened(**options: Any) -> AsyncGenerator[Client]:
        made = (
            connecting.over_stdio(place, mode=mode, **options)
            if way.startswith("stdio")
            else connecting.over_http(http, mode=mode, **options)
        )
        async with made as client:
            yield client

    return opened
