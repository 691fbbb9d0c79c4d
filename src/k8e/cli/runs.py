"""``k8e sandbox run --background``, and what finds the run again: poll, log, kill, ps."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Generator
from typing import Any

from k8e import errors
from k8e.cli import fast, printing, sandbox
from k8e.client import attaching, requests
from k8e.client.blocking import SandboxClient
from k8e.client.results import ExecEvent, ExecInfo, Exit, Stdout


def start(options: argparse.Namespace, chosen: dict[str, Any]) -> int:
    """Start what ``run`` was asked for, and leave."""
    for flag in ("raw", "stdin"):
        if chosen[flag]:
            raise errors.InvalidRequest(
                f"--background and --{flag} exclude each other", hint="k8e sandbox log RUN --follow"
            )
    fast.check(chosen)
    call = requests.in_background(fast.fields(chosen, requests.new_exec_id()))
    told = sandbox.ask(options, attaching.start(call))
    session_id, exec_id = str(told["session_id"]), str(told["id"])
    if not chosen["session_id"]:
        fast.note_session(chosen["tenant"] or "default", session_id)
    run_id = requests.run_id(session_id, exec_id)
    printing.answer({"run_id": run_id, "session_id": session_id, "status": "started"})
    return 0


def poll(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        state = client.get_run(options.run).poll()
    told = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    del told["stdout_bytes"], told["stderr_bytes"], told["exec_id"]
    printing.answer({**told, "stdout": state.stdout, "stderr": state.stderr})
    return 0


def log(options: argparse.Namespace) -> int:
    """Print output; without ``--follow`` what there is, and 0."""
    with sandbox.connect(options) as client:
        at = options.offset
        for event in _output(client, options.run, at, follow=options.follow):
            if isinstance(event, Exit):
                return event.exit_code if options.follow else 0
            if event.seq > at:
                fast.write(2, b"k8e: warning: %d bytes are no longer kept\n" % (event.seq - at))
            at = event.seq + len(event.data)
            fast.write(1 if isinstance(event, Stdout) else 2, event.data)
    return 0


def _output(client: SandboxClient, name: str, start: int, *, follow: bool) -> Generator[ExecEvent]:
    """What a run printed; by the id of a session, what all its runs did."""
    if "." in name:
        yield from client.get_run(name).output(start, follow=follow)
        return
    try:
        yield from client.transcript(name, start, follow=follow)
    except errors.ExecNotFound:  # the sandbox was started by an earlier release
        runs = [item for item in client.execs(name) if item.background]
        if not runs:
            raise
        run = client.get_run(requests.run_id(name, runs[-1].exec_id))
        yield from run.output(start, follow=follow)


def kill(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        run = client.get_run(options.run)
        if options.signal:
            run.signal(options.signal)
        else:
            run.kill()
    printing.answer({"ok": True, "run_id": options.run})
    return 0


def ps(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.processes(options.session_id)
        runs = client.execs(options.session_id)
    printing.answer(
        {
            "processes": [dataclasses.asdict(item) for item in found],
            "runs": [_run(options.session_id, item) for item in runs],
            "session_id": options.session_id,
        }
    )
    return 0


def _run(session_id: str, item: ExecInfo) -> dict[str, Any]:
    told = dataclasses.asdict(item)
    del told["exec_id"], told["pid"]
    return {**told, "run_id": requests.run_id(session_id, item.exec_id)}
