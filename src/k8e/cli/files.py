"""``k8e sandbox cp``, ``write``, ``read`` and their like: files and folders of a session."""

from __future__ import annotations

import argparse
import contextlib
import os
import posixpath
import re
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from k8e import errors
from k8e.cli import fast, output, sessions, state
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands
from k8e.client import operations, requests, trees
from k8e.client.blocking import SandboxClient
from k8e.guest import wire

_REMOTE = re.compile(r"([a-z0-9][a-z0-9-]*)?:(.*)", re.DOTALL)


class Remote(NamedTuple):
    """A path in a session; an empty id means the tenant's standing session."""

    session_id: str
    path: str


def copy(options: argparse.Namespace) -> int:
    """Copy; 1 if a file could not be copied."""
    source, target = parse(options.source), parse(options.target)
    if isinstance(source, Remote):
        if isinstance(target, Remote):
            raise _one_side()
        session_id = _session_id(source, options)
        with sessions.connect(options) as client, output.shown() as bar, _local():
            place = _place(client, session_id, source.path, target)
            copied = client.download(
                session_id, source.path, place, progress=bar.draw, on_skip=bar.skip
            )
    elif isinstance(target, Remote):
        with _local():
            Path(source).stat()
        session_id = _session_id(target, options)
        with sessions.connect(options) as client, output.shown() as bar, _local():
            path = _path(client, session_id, source, target.path)
            copied = client.upload(session_id, source, path, progress=bar.draw, on_skip=bar.skip)
    else:
        raise _one_side()
    output.answer({**asdict(copied), "session_id": session_id})
    return 1 if copied.failed else 0


def _place(client: SandboxClient, session_id: str, path: str, target: str) -> str:
    """The local path of a copy: ``target``, or a name in it if that is a folder.

    Of ``PATH/.`` only the content is copied, without the folder itself.
    """
    if not Path(target).is_dir():
        if target.endswith("/") and client.stat(session_id, path, follow=True).type == "file":
            raise errors.InvalidRequest(f"the local folder {target} does not exist", hint="make it")
        return target
    # A link that the user named is followed; links below it never are.
    folder = os.path.realpath(target)
    contents = path == "." or path.endswith("/.")
    name = "" if contents else trees.base_name(path)
    return os.path.join(folder, name) if name else folder  # noqa: PTH118 - names are any bytes


def _path(client: SandboxClient, session_id: str, source: str, path: str) -> str:
    """The path of a copy in a sandbox, by the same rules."""
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
    """Name the file in errors of local files, so that they are not taken for the sandbox's."""
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
    tenant = cli_parser.tenant(options) or state.DEFAULT_TENANT
    call = {"op": "ping", "session": requests.auto(tenant)}
    found = str(sessions.ask(options, operations.call(call))["session_id"])
    fast.note_session(tenant, found)
    return found


def add_cp(commands: Commands) -> None:
    parser = commands.add(
        "cp",
        "copy a file or a folder into a session or out of it; links and permissions are kept, and "
        "the host follows no link that the sandbox made",
        "k8e sandbox cp project ID:/workspace\n"
        "         k8e sandbox cp ID:results/. results\n"
        "         k8e sandbox cp notes.txt :",
        copy,
        remote=True,
    )
    parser.add_argument("source", metavar="SRC", help="a local path, or SESSION:PATH")
    parser.add_argument("target", metavar="DST", help="the same; one of the two is a session's")
    parser.add_argument(
        "--tenant", metavar="NAME", help="whose standing session :PATH means [K8E_SANDBOX_TENANT]"
    )


# Single files.


def write(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        client.write_file(options.session_id, options.path, _stdin(), append=options.mode == "a")
    output.answer({"ok": True, "path": options.path})
    return 0


def _stdin() -> Iterator[bytes]:
    while data := os.read(0, wire.CHUNK):
        yield data


def read(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        chunks = client.read_chunks(options.session_id, options.path)
        if options.raw:
            for chunk in chunks:
                fast.write(1, chunk)
            return 0
        content = b"".join(chunks).decode("utf-8", "replace")
    output.answer({"content": content, "path": options.path})
    return 0


def list_files(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.list_files(options.session_id, options.since)
    output.answer({"files": [{"modified": item.modified, "path": item.path} for item in found]})
    return 0


def add_write(commands: Commands) -> None:
    parser = commands.add(
        "write",
        "write stdin to a file of a sandbox",
        "k8e sandbox write ID data.csv < data.csv",
        write,
        remote=True,
        answers_ok=True,
    )
    _add_file(parser)
    parser.add_argument("--mode", choices=["w", "a"], default="w", help="replace (w) or append (a)")


def add_read(commands: Commands) -> None:
    parser = commands.add(
        "read",
        "read a file of a sandbox",
        "k8e sandbox read --raw ID data.csv > data.csv",
        read,
        remote=True,
    )
    _add_file(parser)
    parser.add_argument(
        "--raw", action="store_true", help="print the file's bytes and nothing else"
    )


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session_id", metavar="ID")
    parser.add_argument("path", help="absolute, or relative to /workspace")


def add_list(commands: Commands) -> None:
    parser = commands.add(
        "list", "list the files in /workspace", "k8e sandbox list ID", list_files, remote=True
    )
    parser.add_argument("session_id", metavar="ID")
    parser.add_argument(
        "--since", type=float, default=0, metavar="SECONDS", help="only what changed after this"
    )
