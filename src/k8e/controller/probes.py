"""The controller's own HTTP: metrics for Prometheus, and what the kubelet asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import h11

_SECONDS = 10.0
_MOST_HEAD = 16 << 10

Answer = Callable[[], tuple[int, bytes]]


async def serve(address: str, answers: dict[str, Answer]) -> asyncio.Server:
    """Serve GET requests of a few paths at ``HOST:PORT``."""
    host, _, port = address.rpartition(":")

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_SECONDS):
                await _answer(reader, writer, answers)
        except (OSError, TimeoutError, h11.ProtocolError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(on_connection, host.strip("[]") or None, int(port))


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: dict[str, Answer]
) -> None:
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_HEAD)
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await reader.read(_MOST_HEAD))
    if not isinstance(event, h11.Request):
        return
    path = event.target.decode("ascii", "replace").partition("?")[0]
    found = answers.get(path) if event.method == b"GET" else None
    status, body = found() if found is not None else (404, b"not found\n")
    headers = [
        ("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    out = http.send(h11.Response(status_code=status, headers=headers)) or b""
    out += http.send(h11.Data(data=body)) or b""
    writer.write(out + (http.send(h11.EndOfMessage()) or b""))
    await writer.drain()
