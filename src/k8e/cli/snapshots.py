"""``k8e sandbox snapshot …``: save, list, restore and delete, with a bar where somebody looks."""

from __future__ import annotations

import argparse
import datetime
from typing import Any, TypeVar

from k8e.cli import parsing, printing, progress, sandbox, state
from k8e.client import driving, snapshotting
from k8e.client.operations import Operation

T = TypeVar("T")


def save(options: argparse.Namespace) -> int:
    operation = snapshotting.save(options.session_id, options.name, replace=options.replace)
    saved = watched(options, operation)
    printing.answer(
        {
            "file_count": saved.file_count,
            "name": saved.name,
            "ok": True,
            "size_bytes": saved.size_bytes,
        }
    )
    return 0


def restore(options: argparse.Namespace) -> int:
    tenant = parsing.tenant(options)
    asked = sandbox.session_options(options)
    hosts = parsing.hosts(options.allowed_hosts)
    operation = snapshotting.restore(options.name, options.runtime, hosts, tenant, asked)
    made = watched(options, operation)
    printing.answer(
        {
            "pod_ip": "",
            "restored_from": options.name,
            "session_id": made.session_id,
            "tenant_id": tenant or state.DEFAULT_TENANT,
        }
    )
    return 0


def listing(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.list_snapshots()
    printing.answer({"snapshots": [_shown(item) for item in found]})
    return 0


def delete(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        client.delete_snapshot(options.name)
    printing.answer({"ok": True})
    return 0


def _shown(item: snapshotting.Snapshot) -> dict[str, Any]:
    when = datetime.datetime.fromtimestamp(item.created_at, datetime.UTC)
    return {
        "created_at": when.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "file_count": item.file_count,
        "name": item.name,
        "size_bytes": item.size_bytes,
    }


def watched(options: argparse.Namespace, operation: Operation[T]) -> T:
    """The result of an operation, with its progress shown."""
    pool = driving.Pool(driving.connector(sandbox.endpoint(options)))
    try:
        running = driving.Running(pool.take(), operation, None)
        with progress.shown() as report:
            while (event := running.next_event()) is not None:
                if isinstance(event, snapshotting.Progress):
                    report.draw(event.bytes, event.total)
        running.connection.close()
        return running.result
    finally:
        pool.close()
