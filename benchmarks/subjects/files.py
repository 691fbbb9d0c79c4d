"""Files into a session and back, against the host writing to and reading from its workspace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks import timing
from benchmarks.stage import Stage
from k8e import SandboxClient
from k8e.bench.measure import Goal, Series, TableRow
from k8e.guest import wire

ROUNDS = 8
SIZE = 100 << 20
SMALL_ROUNDS = 100
SMALL = 1 << 10
LOCAL_BAR, REMOTE_BAR = Goal("least", 300), Goal("least", 200)


def measure(stage: Stage) -> Iterator[TableRow]:
    for runtime in stage.runtimes:
        local, remote = stage.local_client(), stage.remote_client()
        session_id = local.create_session(runtime)
        # The session's workspace as the host sees it: the same loop-mounted file system.
        workspace = stage.runtime(runtime).mount_point(stage.sandbox_of(session_id))
        for size, rounds in ((SMALL, SMALL_ROUNDS), (SIZE, ROUNDS)):
            content = os.urandom(size)
            took = timing.interleave(
                stage.rounds(rounds),
                {
                    "SDK write": _write(local, session_id, content),
                    "SDK read": _read(local, session_id, content),
                    "SDK write over gRPC": _write(remote, session_id, content),
                    "SDK read over gRPC": _read(remote, session_id, content),
                    "host write": _host_write(workspace / "host", content),
                    "host read": _host_read(workspace / "host"),
                },
                # The first write makes what the others read.
                warm_up=1,
            )
            yield from _rows(runtime, size, took)
        local.destroy_session(session_id)


def _rows(runtime: str, size: int, took: dict[str, list[float]]) -> Iterator[TableRow]:
    series = {name: _series(name, size, took[name]) for name in took}
    for name in ("SDK write", "SDK read", "SDK write over gRPC", "SDK read over gRPC"):
        bar = None
        if runtime == "container" and size == SIZE:
            bar = REMOTE_BAR if "gRPC" in name else LOCAL_BAR
        peer = series["host write" if "write" in name else "host read"]
        yield TableRow("files", runtime, series[name], peer, bar)


def _series(name: str, size: int, seconds: list[float]) -> Series:
    """Small files are a matter of time, large ones of speed."""
    if size == SMALL:
        return Series(f"{name}, 1 KiB", "ms", timing.milliseconds(seconds))
    return Series(f"{name}, 100 MiB", "MB/s", timing.megabytes_per_second(size, seconds))


def _write(client: SandboxClient, session_id: str, content: bytes) -> timing.Timed:
    return timing.timed(lambda: client.write_file(session_id, "ours", content))


def _read(client: SandboxClient, session_id: str, content: bytes) -> timing.Timed:
    def read() -> None:
        if len(client.read_bytes(session_id, "ours")) != len(content):
            raise timing.ProgramFailed("the file came back with another length")

    return timing.timed(read)


def _host_write(path: Path, content: bytes) -> timing.Timed:
    """As the guest writes: to a new file, in frames, and renamed into place."""

    def write() -> None:
        scratch = path.with_suffix(".new")
        view = memoryview(content)
        with open(scratch, "wb", buffering=0) as file:
            file.writelines(view[at : at + wire.CHUNK] for at in range(0, len(content), wire.CHUNK))
        scratch.rename(path)

    return timing.timed(write)


def _host_read(path: Path) -> timing.Timed:
    return timing.timed(path.read_bytes)
