"""What k8e costs while nobody uses it: memory of gateway and guest, and time until ready."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import floors, serving, timing
from benchmarks.stage import Stage, environment, make_settings
from k8e.bench.measure import Goal, Series, TableRow

STARTS = 10
SETTLE_SECONDS = 1.0
GATEWAY_MB, GUEST_MB, READY_MS = Goal("most", 80), Goal("most", 12), Goal("most", 500)


def measure(stage: Stage) -> Iterator[TableRow]:
    yield from _starts(stage)
    if "container" in stage.runtimes:
        yield _guest(stage)
    yield TableRow(
        "footprint",
        "",
        Series("gateway with sessions", "MB", [stage.gateway().resident_mb()]),
    )


def _starts(stage: Stage) -> Iterator[TableRow]:
    """A gateway of its own, started again and again on the same folders."""
    config = make_settings(stage.folder / "starts")
    env = environment(config, HOME=str(stage.folder))
    resident: list[float] = []

    def start() -> float:
        gateway = serving.Gateway(config, env)
        try:
            time.sleep(SETTLE_SECONDS)
            resident.append(gateway.resident_mb())
        finally:
            gateway.stop()
        return gateway.ready_seconds

    start()  # makes the database and the certificates
    resident.clear()
    peer = "python3 -c pass"
    contenders = {"gateway ready": start, peer: timing.python_pass()}
    took = timing.interleave(stage.rounds(STARTS), contenders)
    series = {name: Series(name, "ms", timing.milliseconds(took[name])) for name in took}
    yield TableRow("footprint", "", series["gateway ready"], series[peer], READY_MS)
    yield TableRow("footprint", "", Series("gateway idle", "MB", resident), None, GATEWAY_MB)


def _guest(stage: Stage) -> TableRow:
    """A guest that has worked a little; of one in gVisor, nobody outside can see the memory."""
    client = stage.local_client()
    session_id = client.create_session("container")
    for _ in range(stage.rounds(20)):
        client.exec(session_id, "true")
    resident = serving.resident_mb(floors.guest_pid(stage.host, stage.sandbox_of(session_id)))
    client.destroy_session(session_id)
    return TableRow("footprint", "container", Series("guest", "MB", [resident]), None, GUEST_MB)
