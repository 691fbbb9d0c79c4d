"""Files and whole trees between here and a sandbox, for the synchronous SDK."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from k8e.client import operations, requests
from k8e.client.callers import Caller
from k8e.client.downloading import download
from k8e.client.operations import Progress
from k8e.client.scripts import Ask, Copied, Do, Script, Skipped, Step, Tally
from k8e.client.uploading import upload

T = TypeVar("T")


class Transfers(Caller):
    """What a client can copy."""

    def upload(
        self,
        session_id: str,
        source: str | Path | BinaryIO,
        path: str,
        *,
        progress: Progress | None = None,
        on_skip: Skipped | None = None,
    ) -> Copied:
        """Make ``path`` a copy of a local file or folder, or write an open binary file to it.

        Permissions are kept, and links are copied as links. A folder that is there is added to.

        Args:
            session_id: where to copy to.
            source: what to copy.
            path: the copy itself, not a folder to put it in; folders above it are made.
            progress: called with the bytes that were sent and, if it is known, how many it will be.
            on_skip: called with a path that cannot be copied, and why; otherwise that is a warning.
        """
        tally = Tally(progress, on_skip)
        if isinstance(source, (str, Path)):
            self._perform(upload(session_id, os.fspath(source), path, tally))
        else:
            tally.total = requests.size_of(source)
            call = requests.file_call("write", session_id, path)
            self._call(operations.write(call, tally.part()), source)
            tally.copied.files += 1
        return tally.copied

    def download(
        self,
        session_id: str,
        path: str,
        target: str | Path | BinaryIO,
        *,
        progress: Progress | None = None,
        on_skip: Skipped | None = None,
    ) -> Copied:
        """Make a local file or folder a copy of one in a sandbox, or write to an open binary file.

        Nothing that the sandbox says leads out of ``target``, and files appear whole or not at all.

        Args:
            session_id: where to copy from.
            path: a file or folder.
            target: the copy itself, not a folder to put it in; the folder above must be there.
            progress: called with the bytes that came and, if it is known, how many it will be.
            on_skip: called with a path that cannot be copied, and why. Otherwise a file that cannot
                be read raises its error, and what is no file, or a link that leads out, a warning.
        """
        tally = Tally(progress, on_skip)
        if isinstance(target, (str, Path)):
            self._perform(download(session_id, path, os.fspath(target), tally))
        else:
            call = requests.file_call("read", session_id, path)
            for chunk in self._stream(operations.read(call, progress)):
                tally.copied.bytes += target.write(chunk.data)
            tally.copied.files += 1
        return tally.copied

    def _perform(self, script: Script[T]) -> T:
        try:
            step = next(script)
            while True:
                try:
                    answer = self._perform_step(step)
                except BaseException as error:
                    step = script.throw(error)
                else:
                    step = script.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            script.close()

    def _perform_step(self, step: Step) -> Any:
        if isinstance(step, Do):
            return step.work()
        if isinstance(step, Ask):
            return self._call(step.operation, step.source)
        for chunk in self._stream(step.operation):
            step.write(chunk.data)
        return None
