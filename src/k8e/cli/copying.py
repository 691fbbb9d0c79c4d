"""``k8e sandbox cp``: files and folders into a session and out of it."""

from __future__ import annotations

import argparse
import os
import re
from typing import NamedTuple

from k8e import errors
from k8e.cli import downloading, fast, parsing, printing, progress, sandbox, state, uploading
from k8e.client import operations, requests

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
        with sandbox.connect(options) as client, progress.shown() as report:
            downloading.receive(client, session_id, source.path, target, report)
    elif isinstance(target, Remote):
        session_id = _session_id(target, options)
        with sandbox.connect(options) as client, progress.shown() as report:
            uploading.send(client, session_id, source, target.path, report)
    else:
        raise _one_side()
    printing.answer({**report.summary(), "session_id": session_id})
    return 1 if report.failed else 0


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
