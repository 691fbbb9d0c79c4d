"""Starts the confined unpacker, a short-lived process of its own, and reads its answer."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from k8e import errors
from k8e.images import confined

UNPACK_SECONDS = 3600.0
MOST_ENTRIES = 2_000_000
MOST_SAID = 1 << 16


@dataclass(frozen=True)
class Unpacked:
    """What came of an archive."""

    diff_id: str
    """The digest of the archive without its compression."""
    size: int
    entries: int
    skipped: int


class Unpacking:
    """The unpackers of one gateway, so that none outlives it."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def unpack(
        self, archive: BinaryIO, folder: Path, max_bytes: int, max_entries: int = MOST_ENTRIES
    ) -> Unpacked:
        """Unpack what a file has from here on into an empty folder; ImageUnusable says why not."""
        argv = [sys.executable, "-I", "-S", "-B", str(Path(confined.__file__).resolve())]
        argv += [str(folder), str(max_bytes), str(max_entries)]
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
            said, complaint = process.communicate(timeout=UNPACK_SECONDS)
        except subprocess.TimeoutExpired:
            raise _unusable(f"unpacking it took more than {UNPACK_SECONDS:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            with self._lock:
                self._running.discard(process)
        return _read(said[:MOST_SAID], complaint, process.returncode)

    def stop(self) -> None:
        """End all that run, and start none any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()


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
