"""Changes that have begun and have no row yet: one small file each, for as long as they take.

A gateway that is killed in between leaves the file, and the next one makes a row of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from k8e.audit.acting import Act, Caller

log = logging.getLogger(__name__)

FOLDER = "pending"
MAX_BYTES = 64 << 10


class Begun(NamedTuple):
    """A change that somebody began, and perhaps ended."""

    act: Act
    action: str
    detail: dict[str, str]


class Pending:
    """The changes of one trail."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    @contextlib.contextmanager
    def during(self, begun: Begun) -> Generator[None]:
        """Remember a change while the block runs, which writes its row.

        It does not fail, as rows do not: a disk that is full must not stop who could make room.
        """
        path = self._folder / f"{time.time_ns():020d}-{os.urandom(4).hex()}"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _write(path, json.dumps([begun.act.caller, begun.action, begun.detail]).encode())
        except OSError as error:
            log.error("nothing would tell of %s after a crash: %s", begun.action, error)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def left(self) -> Iterator[Begun]:
        """What the gateway before us had begun; each is forgotten once it has been dealt with."""
        paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        for path in paths:
            found = _read(path)
            if found is not None:  # else it was being written, and nothing had begun
                yield found
            path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def _read(path: Path) -> Begun | None:
    try:
        with path.open("rb") as file:
            told: Any = json.loads(file.read(MAX_BYTES))
        (principal, via, peer), action, detail = told
        texts = {str(name): json.dumps(json.loads(value)) for name, value in detail.items()}
        return Begun(Act(Caller(str(principal), str(via), str(peer)), ""), str(action), texts)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
