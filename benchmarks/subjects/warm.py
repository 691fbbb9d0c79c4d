"""``run`` of Python code by a warm and by a new interpreter, against ``python3 -c`` of that code.

All three in the same sandbox, by the same client. A warm one is waited for before it is used: what
is measured is a run, not how quickly the next interpreter starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import timing
from benchmarks.samples import Bar, Row, Series
from benchmarks.stage import Stage
from benchmarks.subjects.execs import one_exec
from k8e import SandboxClient
from k8e.client import local
from k8e.guest import wire

ROUNDS = 60
CODE = "print(1)"
WARM = Bar("ratio", 0.25)
COLD = Bar("ratio", 1.1)
READY_SECONDS = 30.0
LOOK = 0.01  # seconds between two looks whether one is ready
SETTLE = 0.05  # seconds for a new interpreter's start to be over


class NeverReady(Exception):
    """No interpreter was kept warm."""


def measure(stage: Stage) -> Iterator[Row]:
    for runtime in stage.runtimes:
        yield from _measure(stage, runtime)


def _measure(stage: Stage, runtime: str) -> Iterator[Row]:
    client = stage.local_client()
    session_id = client.create_session(runtime)
    guest = local.Connection(local.dial(str(stage.settings.socket)))
    peer = "python3 -c"
    try:
        client.run(CODE, "python", session_id=session_id)
        took = timing.interleave(
            stage.rounds(ROUNDS),
            {
                "run(python), warm": lambda: _warm_run(client, guest, session_id),
                "run(python), new": lambda: _new_run(client, guest, session_id),
                peer: lambda: _command(client, guest, session_id),
            },
            warm_up=2,
        )
    finally:
        guest.close()
        client.destroy_session(session_id)
    series = {name: Series(name, "ms", timing.milliseconds(took[name])) for name in took}
    for name, bar in (("run(python), warm", WARM), ("run(python), new", COLD)):
        yield Row("warm", runtime, series[name], series[peer], bar)


def _warm_run(client: SandboxClient, guest: local.Connection, session_id: str) -> float:
    before = _wait_until_ready(guest, session_id)
    took = timing.timed(lambda: client.run(CODE, "python", session_id=session_id))()
    if _ready(guest, session_id) >= before:
        raise NeverReady("a run that should have been warm used no warm interpreter")
    return took


def _new_run(client: SandboxClient, guest: local.Connection, session_id: str) -> float:
    _wait_until_ready(guest, session_id)
    off = {"K8E_WARM": "0"}
    return timing.timed(lambda: client.run(CODE, "python", session_id=session_id, env=off))()


def _command(client: SandboxClient, guest: local.Connection, session_id: str) -> float:
    _wait_until_ready(guest, session_id)
    return timing.timed(one_exec(client, session_id, ["python3", "-c", CODE]))()


def _wait_until_ready(guest: local.Connection, session_id: str) -> int:
    """Wait until an interpreter waits and nothing is being started; how many there are."""
    until = time.monotonic() + READY_SECONDS
    while not (count := _ready(guest, session_id)):
        if time.monotonic() > until:
            raise NeverReady(f"no interpreter was ready within {READY_SECONDS:g} s")
        time.sleep(LOOK)
    time.sleep(SETTLE)
    return count


def _ready(guest: local.Connection, session_id: str) -> int:
    guest.begin()
    guest.send(wire.CALL, wire.pack({"op": "execs", "session": {"id": session_id}}))
    kind, body = guest.receive()
    if kind != wire.RESULT:
        raise NeverReady(str(wire.unpack(body)))
    return int(wire.unpack_dict(body)["warm"])
