"""A web server for tests, which runs inside a sandbox: it tells exactly what it was sent.

Started as ``python3 echo_server.py PORT``; prints ``ready`` when it listens.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
from typing import Any

PIECE = bytes(range(256)) * 256
MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

state: dict[str, Any] = {"requests": 0, "endless": 0, "left": 0}
more = asyncio.Event()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        state["requests"] += 1
        path = head.split(b" ", 2)[1].partition(b"?")[0].decode()
        answer = ANSWERS.get(path, echo)
        await answer(head, reader, writer)
    except (ConnectionError, asyncio.IncompleteReadError):
        state["left"] += 1
    finally:
        writer.close()


def headers_of(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


async def body_of(head: bytes, reader: asyncio.StreamReader) -> tuple[int, str]:
    """How many bytes a request's body has, and their digest."""
    headers, size, digest = headers_of(head), 0, hashlib.sha256()
    if "chunked" in headers.get("transfer-encoding", ""):
        while length := int((await reader.readline()).split(b";")[0], 16):
            digest.update(await reader.readexactly(length))
            await reader.readexactly(2)
            size += length
        await reader.readline()
    else:
        left = int(headers.get("content-length", 0))
        while left:
            data = await reader.read(min(left, 65536))
            if not data:
                raise ConnectionError
            digest.update(data)
            left -= len(data)
            size += len(data)
    return size, digest.hexdigest()


def send_json(writer: asyncio.StreamWriter, told: Any, *more_headers: str) -> None:
    body = json.dumps(told).encode()
    head = [
        "HTTP/1.1 200 OK",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *more_headers,
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + body)


async def echo(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if "100-continue" in headers_of(head).get("expect", ""):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    size, digest = await body_of(head, reader)
    send_json(writer, {"head": head.decode("latin-1"), "size": size, "digest": digest})
    await writer.drain()


async def tell(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    send_json(writer, state)
    await writer.drain()


async def set_cookies(
    head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    names = [f"Set-Cookie: {name}=evil" for name in headers_of(head)["x-names"].split()]
    send_json(writer, {}, *names)
    await writer.drain()


async def events(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One event at once, and one more for each request for ``/more``."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 0\n\n")
    for number in range(1, 4):
        await more.wait()
        more.clear()
        writer.write(b"data: %d\n\n" % number)
        await writer.drain()


async def one_more(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    more.set()
    send_json(writer, {})
    await writer.drain()


async def big(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    count = int(headers_of(head)["x-pieces"])
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (count * len(PIECE)))
    for _ in range(count):
        writer.write(PIECE)
        await writer.drain()


async def endless(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"%x\r\n%s\r\n" % (len(PIECE), PIECE))
        await writer.drain()
        state["endless"] += len(PIECE)


async def hold(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer never; notice when the other side leaves."""
    await reader.readexactly(1)


async def websocket(
    head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Say every message back, until one says that it is the end."""
    key = headers_of(head)["sec-websocket-key"].encode()
    accept = base64.b64encode(hashlib.sha1(key + MAGIC).digest())
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )
    opcode = 0
    while opcode != 8:
        first, second = await reader.readexactly(2)
        opcode, length = first & 15, second & 127
        if length > 125:
            length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
        mask = await reader.readexactly(4)
        payload = bytes(
            byte ^ mask[at % 4] for at, byte in enumerate(await reader.readexactly(length))
        )
        writer.write(frame(first, payload))
        await writer.drain()


def frame(first: int, payload: bytes) -> bytes:
    size = len(payload)
    if size < 126:
        return bytes((first, size)) + payload
    if size < 65536:
        return bytes((first, 126)) + size.to_bytes(2, "big") + payload
    return bytes((first, 127)) + size.to_bytes(8, "big") + payload


ANSWERS = {
    "/state": tell,
    "/set-cookies": set_cookies,
    "/events": events,
    "/more": one_more,
    "/big": big,
    "/endless": endless,
    "/hold": hold,
    "/ws": websocket,
}


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
