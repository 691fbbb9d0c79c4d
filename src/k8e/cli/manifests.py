"""What a new session begins with, from ``--manifest`` and the ``--git-…`` flags."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from k8e import errors

_MAX_FILE = 4 << 20
"""Bytes of YAML: escapes and indentation need more room than the 1 MiB that they may hold."""
_DEFAULT_PATH = "repo"


def entries(options: argparse.Namespace, *, stdin: bool) -> list[dict[str, Any]]:
    """The entries that were asked for, checked; ``stdin`` tells whether they may come from it."""
    found: list[dict[str, Any]] = []
    if not is_asked(options):
        return found
    if options.manifest:
        found += _read(options.manifest, stdin=stdin)
    if options.git_repo:
        fields = {"path": options.git_path or _DEFAULT_PATH, "repo": options.git_repo}
        found.append({"gitRepo": fields | ({"ref": options.git_ref} if options.git_ref else {})})
    elif options.git_ref or options.git_path:
        raise errors.InvalidRequest("--git-ref and --git-path need --git-repo")
    from k8e import manifests  # most commands do without

    manifests.from_json(found)  # before a gateway is bothered with it
    return found


def _read(name: str, *, stdin: bool) -> list[dict[str, Any]]:
    if name == "-" and not stdin:
        raise errors.InvalidRequest(
            "--manifest - is for create: the stdin of a run is its code's", hint="name a file"
        )
    try:
        if name == "-":
            data = sys.stdin.buffer.read(_MAX_FILE + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the manifest {name} cannot be read: {error.strerror}", hint="check the path"
        ) from None
    if len(data) > _MAX_FILE:
        raise errors.LimitExceeded(f"the manifest {name} is longer than {_MAX_FILE} bytes")
    return _parse(data, name)


def _parse(data: bytes, name: str) -> list[dict[str, Any]]:
    import yaml  # takes as long to import as everything else of a run

    try:
        value: Any = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = str(error).replace("\n", " ") or type(error).__name__
        raise errors.InvalidRequest(
            f"the manifest {name} is not YAML: {what}", hint="k8e's documents have an example"
        ) from None
    items: Any = value.get("entries") if isinstance(value, dict) else value  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    if not isinstance(items, list) or (isinstance(value, dict) and set(value) != {"entries"}):  # pyright: ignore[reportUnknownArgumentType]
        raise errors.InvalidRequest(
            f"the manifest {name} has no list of entries",
            hint="it begins with 'entries:', and each entry has one of file, dir and gitRepo",
        )
    return items  # pyright: ignore[reportUnknownVariableType]


def refuse_named_session(session_id: str) -> None:
    """Content is for a session that is made for a run, not for one that is there already."""
    if session_id:
        raise errors.InvalidRequest(
            "--manifest and --git-repo are for a session that is made for the run, and session "
            f"{session_id[:80]} was named (--session-id, K8E_SANDBOX_SESSION_ID)",
            hint=f"k8e sandbox cp FOLDER {session_id[:80]}:/workspace copies files into it",
        )


def is_asked(options: argparse.Namespace) -> bool:
    names = ("manifest", "git_repo", "git_ref", "git_path")
    return any(getattr(options, name) is not None for name in names)
