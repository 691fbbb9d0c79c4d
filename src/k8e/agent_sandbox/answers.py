"""Answers of the router and of both runtimes: JSON, files, and errors with their status."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from k8e import errors
from k8e.agent_sandbox.bodies import Left, TooLarge
from k8e.agent_sandbox.client import InsideClient
from k8e.agent_sandbox.paths import Outside
from k8e.bounded_sockets import SLOW_SECONDS, BoundedSocket, Gone
from k8e.client.results import Chunk, FileEntry
from k8e.http_headers import Headers

T = TypeVar("T")
Switch = Callable[[Headers], BoundedSocket]
LARGE = 256 << 10
"""Bytes of text whose JSON is made in a thread."""
JSON, BYTES = b"application/json", b"application/octet-stream"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Refusal(Exception):
    """A refusal with its HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Answer:
    """The answer to one request."""

    def __init__(self, send: Send, switch: Switch | None = None) -> None:
        """``switch`` is the server's way to turn the connection into a WebSocket's."""
        self._send = send
        self._switch = switch
        self.begun = False

    async def send(self, message: Message) -> None:
        self.begun = True
        async with asyncio.timeout(SLOW_SECONDS):
            await self._send(message)

    def switch(self, headers: Headers) -> BoundedSocket:
        """Answer that the connection is a WebSocket's from now on; its bytes.

        Raises:
            Left: the client is gone.
        """
        if self._switch is None:
            raise Refusal(501, "this server has no WebSockets")
        self.begun = True
        try:
            return self._switch(headers)
        except Gone:
            raise Left from None

    async def begin(self, code: int, *headers: tuple[bytes, bytes]) -> None:
        await self.send({"type": "http.response.start", "status": code, "headers": headers})

    async def give(
        self, code: int, body: bytes = b"", kind: bytes = JSON, *, more: Headers | None = None
    ) -> None:
        """A whole answer."""
        headers = [(b"content-length", b"%d" % len(body))] if code != 204 else []
        headers += [(b"content-type", kind)] if body else []
        await self.begin(code, *headers, *(more or []))
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def tell(self, value: Any, code: int = 200) -> None:
        """A whole answer in JSON."""
        await self.give(code, json.dumps(value).encode())

    async def refuse(self, refused: Refusal) -> None:
        """An error as both routers tell it; a client may come back later after a 503."""
        more = [(b"retry-after", b"1")] if refused.code == 503 else []
        if refused.code == 401:
            more = [(b"www-authenticate", b"Bearer"), (b"connection", b"close")]
        await self.give(refused.code, json.dumps({"detail": str(refused)}).encode(), more=more)

    async def give_file(self, client: InsideClient, session_id: str, path: str) -> None:
        """A file of the sandbox. It says its length, so that one that is cut off is noticed."""
        async with aclosing(client.open_file(session_id, path)) as parts:
            entry = await anext(parts)
            if not isinstance(entry, FileEntry):
                raise errors.GuestFailed("the guest described no file")
            length = [(b"content-length", b"%d" % entry.size)] if entry.size else []
            await self.begin(200, (b"content-type", BYTES), *length)
            await self._give_parts(parts, entry.size)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _give_parts(self, parts: AsyncGenerator[FileEntry | Chunk], size: int) -> None:
        sent = 0
        async for part in parts:
            data = part.data if isinstance(part, Chunk) else b""
            sent += len(data)
            if size and sent > size:
                raise errors.GuestFailed("the guest sent more than the file has")
            await self.send({"type": "http.response.body", "body": data, "more_body": True})


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, which ends when the client leaves; its request's body must have been read."""
    return await unless(_leave(receive), work)


async def unless(left: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``; Left if ``left`` ends before."""
    doing = asyncio.create_task(work)
    leaving = asyncio.create_task(left)
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Left
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait({doing, leaving})


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal_of(error: Exception) -> Refusal:
    """An error as the router tells it."""
    match error:
        case Refusal():
            return error
        case TooLarge():
            return Refusal(413, str(error))
        case Outside():
            return Refusal(403, str(error))
        case errors.K8eError():
            text = f"{error.message} ({error.hint})" if error.hint else error.message
            broken = isinstance(error, errors.SandboxDied | errors.GuestFailed)
            return Refusal(502 if broken else error.wire_status.http, text)
        case ConnectionRefusedError():
            return Refusal(502, "nothing listens on this port in the sandbox")
        case OSError():
            code = 507 if error.errno in _FULL else errors.status_of_errno(error.errno or 0).http
            return Refusal(code, error.strerror or "the file operation failed")
        case _:
            raise error
