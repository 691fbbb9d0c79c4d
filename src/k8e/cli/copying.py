"""``k8e sandbox cp``: files and folders into a session and out of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import posixpath
import re
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from k8e import errors
from k8e.cli import fast, parsing, printing, progress, sandbox, state
from k8e.client import downloading, operations, requests
from k8e.client.blocking import SandboxClient

_REMOTE = re.compile(r"([a-z0-9][a-z0-9-]*)?:(.*)", re.DOTALL)


class Remote(NamedTuple):
    """A path in a session; an empty id means the tenant's standing session."""

    session_id: str
    path: str


def copy(options: argparse.Namespace) -> int:
    """Copy; 1 if something that should be there could not be copied."""
    source, target = parse(options.source), parse(options.target)
    if isinstance(source, Remote):
        if isinstance(target, Remote):
            raise _one_side()
        session_id = _session_id(source, options)
        with sandbox.connect(options) as client, progress.shown() as bar, _local():
            place = _place(client, session_id, source.path, target)
            copied = client.download(
                session_id, source.path, place, progress=bar.draw, on_skip=bar.skip
            )
    elif isinstance(target, Remote):
        with _local():
            Path(source).stat()
        session_id = _session_id(target, options)
        with sandbox.connect(options) as client, progress.shown() as bar, _local():
            path = _path(client, session_id, source, target.path)
            copied = client.upload(session_id, source, path, progress=bar.draw, on_skip=bar.skip)
    else:
        raise _one_side()
    printing.answer({**asdict(copied), "session_id": session_id})
    return 1 if copied.failed else 0


def _place(client: SandboxClient, session_id: str, path: str, target: str) -> str:
    """What a copy becomes here: ``target``, or in it if that is a folder.

    Of ``PATH/.`` only the content is copied, without the folder itself.
    """
    if not Path(target).is_dir():
        if target.endswith("/") and client.stat(session_id, path, follow=True).type == "file":
            raise errors.InvalidRequest(f"the local folder {target} does not exist", hint="make it")
        return target
    # What the user named is followed wherever it leads; what is made in it never is.
    folder = os.path.realpath(target)
    contents = path == "." or path.endswith("/.")
    name = "" if contents else downloading.base_name(path)
    return os.path.join(folder, name) if name else folder  # noqa: PTH118 - names are any bytes


def _path(client: SandboxClient, session_id: str, source: str, path: str) -> str:
    """The same for a copy in a sandbox."""
    contents = Path(source).is_dir() and (source in (".", "..") or source.endswith(("/.", "/..")))
    is_folder = path.endswith("/")
    try:
        is_folder |= client.stat(session_id, path, follow=True).type == "dir"
    except (FileNotFoundError, NotADirectoryError):
        if is_folder:
            client.mkdir(session_id, path)
    return posixpath.join(path, Path(source).name) if is_folder and not contents else path


@contextlib.contextmanager
def _local() -> Generator[None]:
    """Errors of local files are told apart from those of the sandbox, which name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        name = os.fsdecode(error.filename)
        raise errors.InvalidRequest(
            f"the local file {name} cannot be used: {error.strerror}",
            hint=errors.folder_hint(error, "check the path"),
        ) from None


def parse(text: str) -> Remote | str:
    """``SESSION:PATH``, or a local path."""
    found = _REMOTE.fullmatch(text)
    return Remote(found[1] or "", found[2] or ".") if found else text


def _one_side() -> errors.InvalidRequest:
    return errors.InvalidRequest(
        "one of SRC and DST is a path in a session, SESSION:PATH, and the other is local",
        hint="k8e sandbox cp project ID:/workspace; a local name with a colon is written ./a:b",
    )


def _session_id(remote: Remote, options: argparse.Namespace) -> str:
    named = remote.session_id or os.environ.get("K8E_SANDBOX_SESSION_ID")
    if named:
        return named
    tenant = parsing.tenant(options) or state.DEFAULT_TENANT
    call = {"op": "ping", "session": requests.auto(tenant)}
    found = str(sandbox.ask(options, operations.call(call))["session_id"])
    fast.note_session(tenant, found)
    return found
