"""``k8e sandbox snapshot …``: save, list, restore and delete."""

from __future__ import annotations

import argparse
import datetime
from typing import Any, TypeVar

from k8e.cli import output, sessions, state
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands
from k8e.client import driver, snapshots
from k8e.client.operations import Operation

T = TypeVar("T")


def save(options: argparse.Namespace) -> int:
    operation = snapshots.save(options.session_id, options.name, replace=options.replace)
    saved = watched(options, operation)
    output.answer(
        {
            "file_count": saved.file_count,
            "name": saved.name,
            "ok": True,
            "size_bytes": saved.size_bytes,
        }
    )
    return 0


def restore(options: argparse.Namespace) -> int:
    tenant = cli_parser.tenant(options)
    asked = sessions.session_options(options)
    hosts = cli_parser.hosts(options.allowed_hosts)
    operation = snapshots.restore(options.name, options.runtime, hosts, tenant, asked)
    made = watched(options, operation)
    output.answer(
        {
            "pod_ip": "",
            "restored_from": options.name,
            "session_id": made.session_id,
            "tenant_id": tenant or state.DEFAULT_TENANT,
        }
    )
    return 0


def listing(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.list_snapshots()
    output.answer({"snapshots": [_shown(item) for item in found]})
    return 0


def delete(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        client.delete_snapshot(options.name)
    output.answer({"ok": True})
    return 0


def _shown(item: snapshots.Snapshot) -> dict[str, Any]:
    when = datetime.datetime.fromtimestamp(item.created_at, datetime.UTC)
    return {
        "created_at": when.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "file_count": item.file_count,
        "name": item.name,
        "size_bytes": item.size_bytes,
    }


def watched(options: argparse.Namespace, operation: Operation[T]) -> T:
    """The result of an operation, with its progress shown."""
    pool = driver.Pool(driver.connector(sessions.endpoint(options)))
    try:
        running = driver.SyncOperation(pool.take(), operation, None)
        with output.shown() as report:
            while (event := running.next_event()) is not None:
                if isinstance(event, snapshots.Progress):
                    report.draw(event.bytes, event.total)
        running.connection.close()
        return running.result
    finally:
        pool.close()


def add_snapshot(commands: Commands) -> None:
    snapshot = commands.add(
        "snapshot",
        "save /workspace, and make sessions that begin with it",
        "k8e sandbox snapshot save ID NAME",
    )
    inner = snapshot.commands(required=True)
    save_parser = inner.add(
        "save",
        "save /workspace of a session under a name; the session goes on",
        "k8e sandbox snapshot save ID before-the-upgrade\n"
        "         k8e sandbox snapshot save --replace ID nightly",
        save,
        remote=True,
        answers_ok=True,
    )
    save_parser.add_argument("session_id", metavar="ID")
    _add_name(save_parser)
    save_parser.add_argument(
        "--replace", action="store_true", help="replace the snapshot of this name, if there is one"
    )
    inner.add(
        "list",
        "list your snapshots, oldest first",
        "k8e sandbox snapshot list",
        listing,
        remote=True,
    )
    restore_parser = inner.add(
        "restore",
        "make a session whose /workspace begins with a snapshot",
        "k8e sandbox snapshot restore before-the-upgrade\n"
        "         k8e sandbox snapshot restore nightly --runtime container --disk 4G",
        restore,
        remote=True,
    )
    _add_name(restore_parser)
    sessions.add_session_flags(restore_parser)
    delete_parser = inner.add(
        "delete",
        "delete a snapshot; sessions that were made from it stay",
        "k8e sandbox snapshot delete nightly",
        delete,
        remote=True,
        answers_ok=True,
    )
    _add_name(delete_parser)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="1 to 63 letters, digits, hyphens, dots and underscores"
    )
