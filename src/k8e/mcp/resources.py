"""Files of sandboxes as resources: ``sandbox://SESSION/workspace/a.txt``."""

from __future__ import annotations

import base64
import binascii
import mimetypes
from typing import Any
from urllib.parse import quote, unquote

from k8e import errors
from k8e.client.results import FileEntry
from k8e.mcp.catalog import WORKSPACE
from k8e.mcp.connection import ConnectionSessions

SCHEME = "sandbox://"
PAGE = 500  # resources in one answer
MAX_BYTES = 8 << 20  # of one resource
TEMPLATES: list[dict[str, Any]] = [
    {
        "name": "file",
        "title": "A file of a sandbox",
        "uriTemplate": SCHEME + "{session_id}/{+path}",
        "description": "A file by its session and its absolute path without the first slash, such "
        "as sandbox://sess-…/workspace/plot.png",
    }
]


def uri(session_id: str, path: str) -> str:
    return f"{SCHEME}{session_id}{quote(path.encode('utf-8', 'surrogateescape'))}"


def parse(text: str) -> tuple[str, str]:
    """Session and path of a resource."""
    session_id, slash, path = text.removeprefix(SCHEME).partition("/")
    if not text.startswith(SCHEME) or not session_id or not slash or not path:
        raise errors.InvalidRequest(
            f"{text[:200]!r} is not a file of a sandbox",
            hint="resources look like sandbox://SESSION/workspace/a.txt",
        )
    return session_id, "/" + unquote(path, errors="surrogateescape")


async def listing(desk: ConnectionSessions, cursor: str) -> dict[str, Any]:
    """Files of the connection's own session, in pages; does not make a session."""
    start = _position(cursor)
    if not desk.own:
        return {"resources": []}
    try:
        found = await desk.client.list_files(desk.own, path=WORKSPACE)
    except errors.SessionNotFound:
        desk.forget(desk.own)
        return {"resources": []}
    files = sorted((item for item in found if item.type == "file"), key=lambda item: item.path)
    told: dict[str, Any] = {
        "resources": [_resource(desk.own, item) for item in files[start : start + PAGE]]
    }
    if start + PAGE < len(files):
        told["nextCursor"] = base64.b64encode(str(start + PAGE).encode()).decode()
    return told


def _position(cursor: str) -> int:
    if not cursor:
        return 0
    try:
        return max(0, int(base64.b64decode(cursor, validate=True)))
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest(f"{cursor[:80]!r} is not a cursor of ours") from None


def _resource(session_id: str, item: FileEntry) -> dict[str, Any]:
    path = item.path.encode("utf-8", "replace").decode()
    told = {
        "uri": uri(session_id, item.path),
        "name": path.removeprefix(f"{WORKSPACE}/"),
        "size": item.size,
    }
    kind = mimetypes.guess_type(path)[0]
    return {**told, "mimeType": kind} if kind else told


async def read(desk: ConnectionSessions, text: str) -> dict[str, Any]:
    session_id, path = parse(text)
    data = await desk.client.read_bytes(await desk.find(session_id), path, length=MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise errors.LimitExceeded(
            f"{path} has more than {MAX_BYTES} bytes",
            hint="sandbox_read_file with offset and limit reads it in parts",
        )
    kind = mimetypes.guess_type(path)[0]
    try:
        body = {"text": data.decode("utf-8"), "mimeType": kind or "text/plain"}
    except UnicodeDecodeError:
        blob = base64.b64encode(data).decode("ascii")
        body = {"blob": blob, "mimeType": kind or "application/octet-stream"}
    return {"contents": [{"uri": text, **body}]}
