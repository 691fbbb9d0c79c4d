"""Files of a sandbox: listed, read and written in constant memory, removed."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from k8e import errors
from k8e.client.results import Chunk, FileEntry
from k8e.rest import models
from k8e.rest.bodies import pieces, unless_left
from k8e.rest.requests import Reply, Request

BYTES = b"application/octet-stream"
MAX_FILES = 10_000
"""Files that an answer has."""


def _described(item: FileEntry) -> models.File:
    return models.File(
        path=item.path,
        type=item.type,
        size=item.size,
        mode=item.mode,
        modified_at=item.modified_ns / 1e9,
    )


async def list_files(request: Request, reply: Reply) -> None:
    wanted = request.query(models.FolderQuery)
    found: list[FileEntry] = []
    listing = request.calls.list_files(
        request.request_id, request.sandbox_id, wanted.path, wanted.depth
    )
    async with aclosing(listing) as parts:
        async for part in parts:
            found += part
            if len(found) > MAX_FILES:  # a program may have made millions
                break
    found.sort(key=lambda item: item.path)
    files = [_described(item) for item in found[:MAX_FILES]]
    size = 200 * len(files)
    await reply.tell_large(models.Folder(files=files, truncated=len(found) > MAX_FILES), size)


async def stat_file(request: Request, reply: Reply) -> None:
    path = request.query(models.FileQuery).path
    found: dict[str, Any] = await request.calls.on_file(
        request.request_id, "stat", request.sandbox_id, path=path, follow=True
    )
    modified_at = found["modified_ns"] / 1e9
    names = ("path", "type", "size", "mode")
    await reply.tell(models.File(**{name: found[name] for name in names}, modified_at=modified_at))


async def read_file(request: Request, reply: Reply) -> None:
    path = request.query(models.FileQuery).path
    await unless_left(request.receive, _read(request, reply, path))


async def _read(request: Request, reply: Reply, path: str) -> None:
    """Send a file. It says its length, so that one that is cut off is noticed."""
    async with aclosing(
        request.calls.open_file(request.request_id, request.sandbox_id, path)
    ) as parts:
        entry = await anext(parts)
        if not isinstance(entry, FileEntry):
            raise errors.GuestFailed("the guest described no file")
        length = [(b"content-length", b"%d" % entry.size)] if entry.size else []
        await reply.begin(200, BYTES, *length)
        sent = 0
        async for part in parts:
            data = part.data if isinstance(part, Chunk) else b""
            sent += len(data)
            if entry.size and sent > entry.size:
                raise errors.GuestFailed("the guest sent more than the file has")
            await reply.piece(data)
        if sent < entry.size:
            raise errors.GuestFailed("the file became shorter meanwhile")
    await reply.end()


async def write_file(request: Request, reply: Reply) -> None:
    path = request.query(models.FileQuery).path
    async with aclosing(pieces(request.receive)) as content:
        written = await request.calls.write_file(
            request.request_id, request.sandbox_id, path, content
        )
    await reply.tell(models.Written(path=str(written["path"]), size=int(written["size"])))


async def remove_file(request: Request, reply: Reply) -> None:
    wanted = request.query(models.RemoveQuery)
    await request.calls.on_file(
        request.request_id,
        "remove",
        request.sandbox_id,
        path=wanted.path,
        recursive=wanted.recursive,
    )
    await reply.begin(204, b"text/plain")
    await reply.end()
