"""Snapshots: saved workspaces, for sessions to begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k8e.client import operations, requests, results
from k8e.client.operations import Operation
from k8e.client.records import Record
from k8e.client.requests import SessionOptions
from k8e.guest import wire


class Snapshot(Record):
    """The /workspace of a session at the time when it was saved."""

    name: str
    created_at: float
    """Unix time."""
    file_count: int
    """Files and links; folders are not counted."""
    size_bytes: int
    """Of its archive."""
    digest: str
    """Of its archive; empty if only a name is known here (K8E's SnapshotPut), and no content."""
    session_id: str
    """The session that it was made from."""
    layers: tuple[str, ...] = ()


class Progress(Record):
    """The progress of a save or a restore."""

    bytes: int
    total: int
    """0 if it is not known."""


def _snapshot(data: Mapping[str, Any]) -> Snapshot:
    return Snapshot(
        name=str(data["name"]),
        created_at=float(data["created_at"]),
        file_count=int(data["file_count"]),
        size_bytes=int(data["size_bytes"]),
        digest=str(data["digest"]),
        session_id=str(data["session_id"]),
        layers=tuple(data["layers"]),
    )


def one(call: Mapping[str, Any]) -> Operation[Snapshot]:
    return _snapshot((yield from operations.call(call)))


def many(call: Mapping[str, Any]) -> Operation[list[Snapshot]]:
    return [_snapshot(item) for item in (yield from operations.call(call))["snapshots"]]


def save(session_id: str, name: str, *, replace: bool) -> Operation[Snapshot]:
    """Save a snapshot: emits Progress, returns the snapshot."""
    call = {
        "op": "save_snapshot",
        "session_id": session_id,
        "name": name,
        "replace": replace,
        "progress": True,
    }
    return _snapshot((yield from watched(call)))


def restore(
    name: str,
    runtime_class: str,
    allowed_hosts: Sequence[str] | None,
    tenant_id: str,
    options: SessionOptions,
) -> Operation[results.SessionInfo]:
    """Make a session that begins with a snapshot: emits Progress."""
    call = requests.create_call(runtime_class, allowed_hosts, tenant_id, options)
    call["spec"]["snapshot"] = name
    told = yield from watched({**call, "progress": True})
    return results.session(told["session"])


def watched(call: Mapping[str, Any]) -> Operation[dict[str, Any]]:
    """An operation that reports progress before it is answered."""
    asking = operations.call(call)
    step = next(asking)
    try:
        while True:
            answer = yield step
            if step is operations.RECEIVE and answer[0] == wire.DATA:
                told = wire.unpack_dict(answer[1])
                yield Progress(int(told["bytes"]), int(told["total"]))
                continue  # it still waits for a frame
            step = asking.send(answer)
    except StopIteration as stop:
        return stop.value
    finally:
        asking.close()
