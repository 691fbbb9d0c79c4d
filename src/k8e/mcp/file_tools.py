"""Tools for files."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from k8e import errors
from k8e.client.results import FileEntry
from k8e.mcp.calls import Reply, ToolCall, said
from k8e.mcp.catalog import WORKSPACE

MAX_LISTED = 2000


def absolute(path: str) -> str:
    """The absolute path in the sandbox; the guest judges where it leads."""
    return path if path.startswith("/") else f"{WORKSPACE}/{path}"


async def write_file(call: ToolCall) -> Reply:
    path, content = absolute(call["path"]), _content(call)

    async def work(session_id: str) -> int:
        return await call.client.write_file(session_id, path, content, append=call["mode"] == "a")

    size = await call.desk.within(call.session_id, work)
    return Reply({"ok": True, "path": path, "size": size})


def _content(call: ToolCall) -> bytes:
    if call["encoding"] == "utf-8":
        return call["content"].encode("utf-8", "surrogateescape")
    try:
        return base64.b64decode(call["content"], validate=True)
    except binascii.Error as error:
        raise errors.InvalidRequest(
            f"content is not base64: {error}", hint="leave encoding out for plain text"
        ) from None


async def read_file(call: ToolCall) -> Reply:
    path, offset, limit = absolute(call["path"]), call["offset"], call["limit"]

    async def work(session_id: str) -> tuple[FileEntry, bytes]:
        found = await call.client.stat(session_id, path, follow=True)
        # One byte more shows whether there is more; files of the kernel do not know their size.
        data = await call.client.read_bytes(session_id, path, offset=offset, length=limit + 1)
        return found, data

    found, data = await call.desk.within(call.session_id, work)
    content, encoding = decoded(data[:limit], cut=len(data) > limit)
    fields = {
        "content": content,
        "encoding": encoding,
        "path": path,
        "size": max(found.size, offset + len(data[:limit])),
        "truncated": len(data) > limit,
    }
    return Reply(fields, text=content, more=said(_notes(fields, offset)))


def _notes(fields: dict[str, Any], offset: int) -> list[str]:
    """Notes that a reader of the text alone would otherwise miss."""
    content, notes = fields["content"], list[str]()
    size = len(content.encode())
    if fields["encoding"] == "base64":
        size = len(base64.b64decode(content))
        notes.append(f"The text above is base64 of {size} bytes that are not UTF-8 text.")
    if fields["truncated"]:
        notes.append(f"There is more: read on with offset {offset + size}.")
    return notes


def decoded(data: bytes, *, cut: bool = False) -> tuple[str, str]:
    """Text, or base64 if it is binary; a character cut off at the end does not make it binary."""
    for spare in range(4 if cut else 1):
        try:
            return data[: len(data) - spare].decode("utf-8"), "utf-8"
        except UnicodeDecodeError:
            continue
    return base64.b64encode(data).decode("ascii"), "base64"


async def list_files(call: ToolCall) -> Reply:
    async def work(session_id: str) -> list[FileEntry]:
        return await call.client.list_files(session_id, call["since"], path=absolute(call["path"]))

    found = await call.desk.within(call.session_id, work)
    fields = {
        "files": [
            {
                "path": item.path,
                "modified": int(item.modified),
                "size": item.size,
                "type": item.type,
            }
            for item in found[:MAX_LISTED]
        ]
    }
    more = {"truncated": True} if len(found) > MAX_LISTED else {}
    return Reply({**fields, **more})
