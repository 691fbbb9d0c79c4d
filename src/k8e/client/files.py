"""Files of a sandbox, one at a time, for the synchronous SDK; whole trees are in ``transfers``."""

from __future__ import annotations

import io
from collections.abc import Generator

from k8e.client import operations, requests
from k8e.client.callers import Caller
from k8e.client.operations import Progress
from k8e.client.requests import Content
from k8e.client.results import FileEntry


class Files(Caller):
    """What a client can do with files."""

    def write_file(
        self,
        session_id: str,
        path: str,
        content: Content,
        *,
        append: bool = False,
        mode: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Write text, bytes, an open binary file or an iterable of them; the number of bytes.

        A new file appears whole or not at all. Folders above it are made. ``progress`` is called
        with the bytes that were sent and, if it is known, how many it will be.
        """
        call = requests.file_call("write", session_id, path, append=append, mode=mode)
        operation = operations.write(call, progress, requests.size_of(content))
        return self._call(operation, content)["size"]

    def read_file(self, session_id: str, path: str, *, progress: Progress | None = None) -> str:
        """A file as text; what is not UTF-8 is replaced."""
        return self.read_bytes(session_id, path, progress=progress).decode("utf-8", "replace")

    def read_bytes(
        self,
        session_id: str,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> bytes:
        whole = io.BytesIO()  # joining chunks would need twice the memory, and half the speed
        whole.writelines(
            self.read_chunks(session_id, path, offset=offset, length=length, progress=progress)
        )
        return whole.getvalue()

    def read_chunks(
        self,
        session_id: str,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> Generator[bytes]:
        """A file, piece by piece, in constant memory."""
        call = requests.file_call("read", session_id, path, offset=offset, length=length)
        for chunk in self._stream(operations.read(call, progress)):
            yield chunk.data

    def list_files(
        self,
        session_id: str,
        since: float = 0,
        *,
        path: str = "/workspace",
        depth: int | None = None,
        directories: bool = False,
    ) -> list[FileEntry]:
        """Files below a folder that changed after ``since`` (seconds since 1970)."""
        found = self._call(operations.listing(requests.list_call(session_id, path, since, depth)))
        return [entry for entry in found if directories or entry.type != "dir"]

    def stat(self, session_id: str, path: str, *, follow: bool = False) -> FileEntry:
        call = requests.file_call("stat", session_id, path, follow=follow)
        return self._call(operations.stat(call))

    def remove(self, session_id: str, path: str, *, recursive: bool = False) -> None:
        call = requests.file_call("remove", session_id, path, recursive=recursive)
        self._call(operations.call(call))

    def rename(self, session_id: str, path: str, to: str) -> None:
        self._call(operations.call(requests.file_call("rename", session_id, path, to=to)))

    def mkdir(self, session_id: str, path: str, *, exist_ok: bool = True) -> None:
        """Make a folder and those above it."""
        call = requests.file_call("mkdir", session_id, path, exist_ok=exist_ok)
        self._call(operations.call(call))
