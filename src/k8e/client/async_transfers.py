"""Files and whole trees between here and a sandbox, for the asynchronous SDK.

What the methods do is explained in :mod:`k8e.client.transfers`. Local files are used in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from k8e.client import operations, requests
from k8e.client.callers import AsyncCaller
from k8e.client.downloading import download
from k8e.client.operations import Progress
from k8e.client.scripts import Ask, Copied, Do, Script, Skipped, Step, Tally
from k8e.client.uploading import upload

T = TypeVar("T")


class AsyncTransfers(AsyncCaller):
    """What a client can copy."""

    async def upload(
        self,
        session_id: str,
        source: str | Path | BinaryIO,
        path: str,
        *,
        progress: Progress | None = None,
        on_skip: Skipped | None = None,
    ) -> Copied:
        tally = Tally(progress, on_skip)
        if isinstance(source, (str, Path)):
            await self._perform(upload(session_id, os.fspath(source), path, tally))
        else:
            tally.total = requests.size_of(source)
            call = requests.file_call("write", session_id, path)
            await self._call(operations.write(call, tally.part()), source)
            tally.copied.files += 1
        return tally.copied

    async def download(
        self,
        session_id: str,
        path: str,
        target: str | Path | BinaryIO,
        *,
        progress: Progress | None = None,
        on_skip: Skipped | None = None,
    ) -> Copied:
        tally = Tally(progress, on_skip)
        if isinstance(target, (str, Path)):
            await self._perform(download(session_id, path, os.fspath(target), tally))
        else:
            call = requests.file_call("read", session_id, path)
            async with contextlib.aclosing(self._stream(operations.read(call, progress))) as chunks:
                async for chunk in chunks:
                    tally.copied.bytes += await asyncio.to_thread(target.write, chunk.data)
            tally.copied.files += 1
        return tally.copied

    async def _perform(self, script: Script[T]) -> T:
        worker = _Worker()
        try:
            step = next(script)
            while True:
                try:
                    answer = await self._perform_step(step, worker)
                except BaseException as error:
                    step = script.throw(error)
                else:
                    step = script.send(answer)
                    if worker.cancelled is not None:
                        step = script.throw(worker.cancelled)
        except StopIteration as stop:
            return stop.value
        finally:
            script.close()

    async def _perform_step(self, step: Step, worker: _Worker) -> Any:
        if isinstance(step, Do):
            return await worker.do(step.work)
        if isinstance(step, Ask):
            return await self._call(step.operation, step.source)
        async with contextlib.aclosing(self._stream(step.operation)) as chunks:
            async for chunk in chunks:
                await worker.do(lambda data=chunk.data: step.write(data))
                if worker.cancelled is not None:
                    raise worker.cancelled
        return None


class _Worker:
    """Does local work in threads. Work that has begun is never left alone with what it opened."""

    def __init__(self) -> None:
        self.cancelled: asyncio.CancelledError | None = None

    async def do(self, work: Callable[[], T]) -> T:
        task = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            self.cancelled = error
            await asyncio.wait({task})
            return task.result()
