"""Starts the confined unpacker, a short-lived process of its own, and reads its answer."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from k8e import errors
from k8e.images import unpacker

UNPACK_SECONDS = 3600.0
MOST_ENTRIES = 2_000_000
MOST_SAID = 1 << 16


@dataclass(frozen=True)
class Unpacked:
    """The result of unpacking an archive."""

    diff_id: str
    """The digest of the archive without its compression."""
    size: int
    entries: int
    skipped: int


class UnpackBudget:
    """How much one image may still unpack, over all of its layers that are unpacked at once."""

    def __init__(self, most_bytes: int, most_entries: int = MOST_ENTRIES) -> None:
        self._most, self._bytes, self._entries = most_bytes, most_bytes, most_entries
        self._lock = threading.Lock()

    def left(self) -> tuple[int, int]:
        """Bytes and entries."""
        with self._lock:
            return max(0, self._bytes), max(0, self._entries)

    def take(self, size: int, entries: int = 0) -> None:
        with self._lock:
            self._bytes -= size
            self._entries -= entries
            if self._bytes < 0 or self._entries < 0:
                raise errors.ImageUnusable(
                    f"the image has more than {self._most} bytes or {MOST_ENTRIES} entries "
                    "when it is unpacked",
                    hint="K8E_MAX_IMAGE_BYTES sets how large one may be",
                )


class Unpackers:
    """The unpackers of one gateway; none outlives it."""

    def __init__(self, min_free: int = 0) -> None:
        """``min_free`` bytes of the disk are left to others."""
        self._reserve = max(unpacker.RESERVE, min_free)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def unpack(
        self, archive: BinaryIO, folder: Path, max_bytes: int, max_entries: int = MOST_ENTRIES
    ) -> Unpacked:
        """Unpack a file from its position on into an empty folder; ImageUnusable says why not."""
        argv = [sys.executable, "-I", "-S", "-B", str(Path(unpacker.__file__).resolve())]
        argv += [str(folder), str(max_bytes), str(max_entries), str(self._reserve)]
        with self._lock:
            if self._stopped:
                raise errors.ImageUnusable("the gateway is being stopped")
            process = subprocess.Popen(
                argv,
                stdin=archive,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
            self._running.add(process)
        try:
            said, complaint = _listen(process)
        except subprocess.TimeoutExpired:
            raise _unusable(f"unpacking it took more than {UNPACK_SECONDS:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with process:  # closes its pipes
                process.wait()
            with self._lock:
                self._running.discard(process)
        return _read(said, complaint, process.returncode)

    def stop(self) -> None:
        """End all that run, and refuse new ones."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()


def _listen(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Its output and errors until it has ended, within bounds."""
    said = {item.fileno(): b"" for item in (process.stdout, process.stderr) if item is not None}
    deadline = time.monotonic() + UNPACK_SECONDS
    with selectors.DefaultSelector() as waiting:
        for fd in said:
            waiting.register(fd, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(process.args, UNPACK_SECONDS)
            for key, _ in ready:
                piece = os.read(key.fd, MOST_SAID)
                said[key.fd] += piece
                if not piece:
                    waiting.unregister(key.fd)
                elif len(said[key.fd]) > MOST_SAID:
                    raise _unusable("the unpacker prints too much")
    process.wait(max(0.0, deadline - time.monotonic()))
    output, complaint = said.values()
    return output, complaint


def _read(said: bytes, complaint: bytes, status: int) -> Unpacked:
    try:
        told: dict[str, Any] = json.loads(said)
        if "error" in told:
            raise _unusable(str(told["error"]))
        return Unpacked(
            diff_id=str(told["diff_id"]),
            size=int(told["size"]),
            entries=int(told["entries"]),
            skipped=int(told["skipped"]),
        )
    except (ValueError, KeyError, TypeError):
        last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise _unusable(" ".join(["the unpacker ended", f"(status {status})", *last])) from None


def _unusable(why: str) -> errors.ImageUnusable:
    return errors.ImageUnusable(
        f"an archive of the image is not used: {why}",
        hint="build the image again; K8E_MAX_IMAGE_BYTES sets how large one may be",
    )
