"""The REST protocol of upstream's sandboxd, which sandboxes there serve on port 8080.

Answered by the gateway, as that of port 8888 is. Its other half, programs over gRPC on port 9090,
is not served.
"""

from __future__ import annotations

import errno
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope

from k8e import errors
from k8e.agent_sandbox import paths
from k8e.agent_sandbox.answers import Answer, Refusal, refusal_of, unless_left
from k8e.agent_sandbox.bodies import pieces
from k8e.agent_sandbox.client import InsideClient
from k8e.client.results import FileEntry

PORT = 8080
FILES = "/v1/files/"
ROUTES = ("/v1/health", "/v1/metadata")
TRUE = ("true", "1")
TYPES = {"file": "file", "dir": "directory", "link": "symlink"}
CODES = {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "CONFLICT"}


def is_route(path: str) -> bool:
    """Whether a path is one of this protocol; all others are the sandbox's own."""
    return path in ROUTES or path == FILES.rstrip("/") or path.startswith(FILES)


class Sandboxd:
    """Answers for the sandboxes of one caller."""

    def __init__(self, client: InsideClient) -> None:
        self._client = client

    async def serve(
        self, session_id: str, path: str, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        try:
            await self._serve(session_id, path, scope, receive, answer)
        except (Refusal, OSError, errors.K8eError, paths.Outside) as error:
            if answer.begun or (isinstance(error, TimeoutError) and error.errno is None):
                raise
            refused = refusal_of(error)
            code = CODES.get(refused.code, "INTERNAL" if refused.code >= 500 else "FAILED")
            await answer.tell({"code": code, "message": str(refused)}, refused.code)

    async def _serve(
        self, session_id: str, path: str, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        method = scope["method"]
        if path in ROUTES:
            if method != "GET":
                raise Refusal(405, "use GET")
            about = {"status": "ok"} if path == ROUTES[0] else {"SANDBOX_NAME": session_id}
            await answer.tell(about)
            return
        place = paths.locate(path.removeprefix(FILES.rstrip("/")).lstrip("/"))
        query = parse_qs(scope["query_string"].decode("latin-1"))
        match method:
            case "GET":
                await unless_left(receive, self._read(session_id, place, answer))
            case "HEAD":
                await self._look(session_id, place, answer)
            case "PUT":
                mode = _mode(query.get("mode", [""])[-1])
                async with aclosing(pieces(receive)) as content:
                    await self._client.write_file(session_id, place, content, mode=mode)
                await answer.give(204)
            case "DELETE":
                recursive = query.get("recursive", [""])[-1] in TRUE
                await self._delete(session_id, place, answer, recursive=recursive)
            case _:
                raise Refusal(405, f"{method} is not served for files")

    async def _read(self, session_id: str, path: str, answer: Answer) -> None:
        """A file's bytes, or what is in a folder."""
        found = await self._client.stat(session_id, path, follow=True)
        if found.type != "dir":
            await answer.give_file(self._client, session_id, path)
            return
        listed = await self._client.list_files(session_id, path=path, depth=1, directories=True)
        entries = [_entry(item) for item in listed]
        await answer.tell({"path": _shown(path), "entries": entries})

    async def _look(self, session_id: str, path: str, answer: Answer) -> None:
        try:
            await self._client.stat(session_id, path, follow=True)
        except (FileNotFoundError, NotADirectoryError):
            await answer.give(404)
        else:
            await answer.give(200)

    async def _delete(self, session_id: str, path: str, answer: Answer, *, recursive: bool) -> None:
        if path == paths.ROOT:
            raise Refusal(400, "the sandbox's folder itself cannot be removed")
        try:
            await self._client.remove(session_id, path, recursive=recursive)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise Refusal(409, "the folder is not empty; ask with recursive=true") from None
        await answer.give(204)


def _mode(text: str) -> int | None:
    if not text:
        return None
    if len(text) > 5 or not set(text) <= set("01234567"):
        raise Refusal(400, "mode is not an octal number such as 0644")
    return int(text, 8) & 0o777


def _shown(path: str) -> str:
    return path.removeprefix(paths.ROOT).lstrip("/") or "."


def _entry(item: FileEntry) -> dict[str, Any]:
    modified = datetime.fromtimestamp(item.modified_ns // 10**9, UTC)
    return {
        "name": item.path.rpartition("/")[2],
        "size": item.size,
        "type": TYPES.get(item.type, "other"),
        "modified_at": modified.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "mode": f"{item.mode:04o}",
    }
