"""Files of a sandbox, one at a time, for the asynchronous SDK."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncGenerator

from k8e.client import operations, requests
from k8e.client.callers import AsyncCaller
from k8e.client.operations import Progress
from k8e.client.requests import AsyncContent
from k8e.client.results import FileEntry


class AsyncFiles(AsyncCaller):
    """What a client can do with files; explained at its blocking twin."""

    async def write_file(
        self,
        session_id: str,
        path: str,
        content: AsyncContent,
        *,
        append: bool = False,
        mode: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        call = requests.file_call("write", session_id, path, append=append, mode=mode)
        operation = operations.write(call, progress, requests.size_of(content))
        return (await self._call(operation, content))["size"]

    async def read_file(
        self, session_id: str, path: str, *, progress: Progress | None = None
    ) -> str:
        data = await self.read_bytes(session_id, path, progress=progress)
        return data.decode("utf-8", "replace")

    async def read_bytes(
        self,
        session_id: str,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> bytes:
        chunks = self.read_chunks(session_id, path, offset=offset, length=length, progress=progress)
        whole = io.BytesIO()  # joining chunks would need twice the memory, and half the speed
        async for chunk in chunks:
            whole.write(chunk)
        return whole.getvalue()

    async def read_chunks(
        self,
        session_id: str,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> AsyncGenerator[bytes]:
        call = requests.file_call("read", session_id, path, offset=offset, length=length)
        async with contextlib.aclosing(self._stream(operations.read(call, progress))) as chunks:
            async for chunk in chunks:
                yield chunk.data

    async def list_files(
        self,
        session_id: str,
        since: float = 0,
        *,
        path: str = "/workspace",
        depth: int | None = None,
        directories: bool = False,
    ) -> list[FileEntry]:
        call = requests.list_call(session_id, path, since, depth)
        found = await self._call(operations.listing(call))
        return [entry for entry in found if directories or entry.type != "dir"]

    async def stat(self, session_id: str, path: str, *, follow: bool = False) -> FileEntry:
        call = requests.file_call("stat", session_id, path, follow=follow)
        return await self._call(operations.stat(call))

    async def remove(self, session_id: str, path: str, *, recursive: bool = False) -> None:
        call = requests.file_call("remove", session_id, path, recursive=recursive)
        await self._call(operations.call(call))

    async def rename(self, session_id: str, path: str, to: str) -> None:
        await self._call(operations.call(requests.file_call("rename", session_id, path, to=to)))

    async def mkdir(self, session_id: str, path: str, *, exist_ok: bool = True) -> None:
        call = requests.file_call("mkdir", session_id, path, exist_ok=exist_ok)
        await self._call(operations.call(call))
