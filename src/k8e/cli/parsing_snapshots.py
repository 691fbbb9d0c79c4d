"""The commands about snapshots, and the flags for what a session begins with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
"""How the parser adds a command: group, name, text, example, handler, flags shared with others."""


def add(
    group: Any,
    common: Any,
    command: Command,
    add_create_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add ``snapshot`` to ``k8e sandbox``; ``add_create_flags`` are those of a new session."""
    snapshot = command(
        group,
        "snapshot",
        "save what /workspace holds, and make sessions that begin with it",
        "k8e sandbox snapshot save ID NAME",
        "snapshots.listing",
    )
    inner = snapshot.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=type(snapshot)
    )
    save = command(
        inner,
        "save",
        "save /workspace of a session under a name; the session goes on",
        "k8e sandbox snapshot save ID before-the-upgrade\n"
        "         k8e sandbox snapshot save --replace ID nightly",
        "snapshots.save",
        common,
    )
    save.add_argument("session_id", metavar="ID")
    _add_name(save)
    save.add_argument(
        "--replace", action="store_true", help="replace the snapshot of this name, if there is one"
    )
    command(
        inner,
        "list",
        "list your snapshots, oldest first",
        "k8e sandbox snapshot list",
        "snapshots.listing",
        common,
    )
    restore = command(
        inner,
        "restore",
        "make a session whose /workspace begins with a snapshot",
        "k8e sandbox snapshot restore before-the-upgrade\n"
        "         k8e sandbox snapshot restore nightly --runtime container --disk 4G",
        "snapshots.restore",
        common,
    )
    _add_name(restore)
    add_create_flags(restore)
    delete = command(
        inner,
        "delete",
        "delete a snapshot; sessions that were made of it stay",
        "k8e sandbox snapshot delete nightly",
        "snapshots.delete",
        common,
    )
    _add_name(delete)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="1 to 63 letters, digits, hyphens, dots and underscores"
    )


def add_content(parser: argparse.ArgumentParser, *, stdin: bool) -> None:
    """The flags for what a new session's workspace begins with."""
    parser.add_argument(
        "--manifest",
        metavar="FILE",
        help="put the files, folders and repositories of a YAML file into /workspace first"
        + ("; - for stdin" if stdin else ""),
    )
    parser.add_argument("--git-repo", metavar="URL", help="put this git repository there, too")
    parser.add_argument(
        "--git-ref", metavar="REF", help="its branch, tag or commit id (default: its HEAD)"
    )
    parser.add_argument("--git-path", metavar="PATH", help="where, below /workspace (default repo)")
