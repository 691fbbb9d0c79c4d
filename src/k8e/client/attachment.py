"""Runs that outlive their caller: how a client starts them, and attaches to them later.

Like all :mod:`k8e.client.operations`, these have no input or output of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k8e import errors
from k8e.client import operations, requests
from k8e.client.operations import RETRY_DELAYS, Operation, Send
from k8e.client.records import replace
from k8e.client.results import ExecEvent, ExecResult, Exit, RunState, Stderr, Stdout
from k8e.guest import wire


def start_run(fields: Mapping[str, Any]) -> Operation[dict[str, Any]]:
    """Start a command and leave it running; return the guest's answer."""
    result = yield from operations.call(fields)
    yield Send(wire.CANCEL)
    return result


def attached_output(fields: Mapping[str, Any], *, follow: bool) -> Operation[None]:
    """Attach to a command: emits its output from byte ``seq`` and, at its end, Exit.

    Without ``follow`` only what there is by now.
    """
    described = yield from operations.call(fields)
    session_id, exec_id = str(described["session_id"]), str(described["id"])
    at, ends = int(fields.get("seq") or 0), follow or described["code"] is not None
    consumed = operations.Consumed()
    while ends or at < int(described["seq"]):
        kind, body = yield from operations.frame()
        if kind in (wire.OUT, wire.ERR):
            event = operations.output_event(kind, body)
            at = event.seq + len(event.data)
            yield event
            yield from consumed.add(len(event.data))
        elif kind == wire.SHOW:
            seq, data = wire.numbered(body)
            at = seq + len(data)
            yield from consumed.add(len(data))
        elif kind == wire.EXIT:
            yield operations.exit_event(wire.unpack_dict(body), session_id, exec_id)
            return
    yield Send(wire.CANCEL)


def run_snapshot(fields: Mapping[str, Any]) -> Operation[RunState]:
    """A run's output so far, and its state.

    That is less than a window, so no credit is given: a guest that sends more fills no memory.
    """
    described = yield from operations.call(fields)
    streams = {wire.OUT: bytearray(), wire.ERR: bytearray()}
    at, lost = 0, False
    while described["code"] is not None or at < int(described["seq"]):
        kind, body = yield from operations.frame()
        if kind == wire.EXIT:
            described |= wire.unpack_dict(body)
            break
        if kind == wire.SHOW:
            seq, data = wire.numbered(body)
            at = seq + len(data)
        elif kind in streams:
            event = operations.output_event(kind, body)
            lost |= event.seq > at
            at = event.seq + len(event.data)
            streams[kind] += event.data
    else:
        yield Send(wire.CANCEL)
    return RunState(
        run_id=f"{described['session_id']}.{described['id']}",
        session_id=str(described["session_id"]),
        exec_id=str(described["id"]),
        status=str(described["status"]),
        exit_code=described["code"],
        duration_ms=int(described["duration_ms"]),
        stdout_bytes=bytes(streams[wire.OUT]),
        stderr_bytes=bytes(streams[wire.ERR]),
        truncated=lost or bool(described["truncated"]),
    )


class Collected:
    """Gathers the output of a command until its exit."""

    def __init__(self) -> None:
        self._output: dict[type[ExecEvent], bytearray] = {
            Stdout: bytearray(),
            Stderr: bytearray(),
        }
        self._at = 0
        self._lost = False
        self._exit: Exit | None = None

    def add(self, event: ExecEvent) -> None:
        if isinstance(event, Exit):
            self._exit = event
            return
        self._lost |= event.seq > self._at
        self._at = event.seq + len(event.data)
        self._output[type(event)] += event.data

    def result(self) -> ExecResult:
        if self._exit is None:
            raise errors.GuestFailed("the command ended without saying how")
        end = replace(self._exit, truncated=self._exit.truncated or self._lost)
        return operations.collected(end, bytes(self._output[Stdout]), bytes(self._output[Stderr]))


class RunHandle:
    """Something that runs in a session, by its name."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        """Names the run, also for other programs and on the command line."""
        self.session_id, self.exec_id = requests.split_run_id(run_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.run_id!r})"

    def _about(self, op: str, **fields: Any) -> dict[str, Any]:
        """An operation on it."""
        return requests.run_call(op, self.run_id, **fields)


class Following:
    """The position of a reader in a run, and its retries when a gateway is gone."""

    def __init__(self, start: int) -> None:
        self.at = start
        self._delays = iter(RETRY_DELAYS)

    def saw(self, event: ExecEvent) -> None:
        if not isinstance(event, Exit):
            self.at = event.seq + len(event.data)
        self._delays = iter(RETRY_DELAYS)

    def delay(self, error: errors.GatewayUnreachable) -> float:
        """Seconds until the next retry; raises ``error`` if that was the last one."""
        delay = next(self._delays, None)
        if delay is None:
            raise error
        return delay
