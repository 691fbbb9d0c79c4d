"""``k8e sandbox run --context``, and ``k8e sandbox context list|restart|interrupt|delete``."""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import os
from typing import Any

from k8e import errors
from k8e.cli import fast, output, sessions, state
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands
from k8e.client import driver, executions
from k8e.client.blocking import SandboxClient
from k8e.client.contexts import Context
from k8e.client.executions import Execution, ExecutionEvent, Result
from k8e.client.results import Stderr, Stdout

DEFAULT_LANGUAGE = "bash"  # as of every run
_LIVE = ("active", "paused")


# Running.


def run(options: argparse.Namespace, chosen: dict[str, Any], *, language: str | None) -> int:
    """Run code in a context, which is made at its first use; return the result."""
    for flag in ("background", "stdin"):
        if getattr(options, flag):
            raise errors.InvalidRequest(
                f"--context and --{flag} exclude each other", hint="run it without --context"
            )
    fast.check(chosen)
    done = _execute(options, _call(options.context, chosen, language), raw=chosen["raw"])
    if not chosen["session_id"]:
        fast.note_session(chosen["tenant"] or state.DEFAULT_TENANT, done.session_id)
    if chosen["raw"]:
        if done.error is not None:
            fast.write(2, done.error.traceback.encode("utf-8", "replace"))
    else:
        output.answer(_execution_fields(done))
    return done.exit_code


def _call(name: str, chosen: dict[str, Any], language: str | None) -> dict[str, Any]:
    fields = fast.fields(chosen, "")
    return executions.run_call(
        fields["session"],
        name,
        chosen["code"],
        chosen["timeout"],
        {"env": chosen["env"], "cwd": chosen["cwd"], "output_limit": fields["limit"]},
        make_context=language or DEFAULT_LANGUAGE,
        **({"language": language} if language else {}),
    )


def _execute(options: argparse.Namespace, call: dict[str, Any], *, raw: bool) -> Execution:
    pool = driver.Pool(driver.connector(sessions.endpoint(options)))
    running = driver.SyncOperation(pool.take(), executions.execution_events(call), None, pool.renew)
    with contextlib.closing(pool), contextlib.closing(running):
        while (event := running.next_event()) is not None:
            if raw:
                _print(event)
        running.connection.close()
        return running.result


def _print(event: ExecutionEvent) -> None:
    if isinstance(event, Stdout):
        fast.write(1, event.data)
    elif isinstance(event, Stderr):
        fast.write(2, event.data)
    elif isinstance(event, Result) and event.text is not None:
        fast.write(1, event.text.encode("utf-8", "replace") + b"\n")


def _execution_fields(done: Execution) -> dict[str, Any]:
    told = dataclasses.asdict(done)
    for name in ("stdout_bytes", "stderr_bytes", "exec_id"):
        del told[name]
    if not done.limits:  # as for other runs: most meet none
        del told["limits"]
    return {
        **told,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "results": [_result(item) for item in done.results],
    }


def _result(item: Result) -> dict[str, Any]:
    """A result as JSON, with binary data in base64 as in notebooks."""
    data = {
        kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for kind, value in item.data.items()
    }
    left_out = list(item.left_out)
    return {"data": data, "is_main_result": item.is_main_result, "left_out": left_out}


# Looking after them.


def listing(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        session_id = _session(client, options)
        found = client.list_contexts(session_id) if session_id else []
    output.answer({"contexts": [dataclasses.asdict(item) for item in found]})
    return 0


def restart(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        output.answer(dataclasses.asdict(_context(client, options).restart()))
    return 0


def interrupt(options: argparse.Namespace) -> int:
    """Interrupt a context; 1 if the code goes on."""
    with sessions.connect(options) as client:
        stopped = _context(client, options).interrupt(options.grace)
    hint = "" if stopped else f"k8e sandbox context restart {options.context} ends it"
    output.answer({"detail": hint, "stopped": stopped})
    return 0 if stopped else 1


def delete(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        _context(client, options).close()
    output.answer({"ok": True})
    return 0


def _context(client: SandboxClient, options: argparse.Namespace) -> Context:
    session_id = _session(client, options)
    if not session_id:
        raise errors.ContextNotFound(
            f"there is no context {options.context[:80]}, because there is no standing session",
            hint="name the session with --session-id",
        )
    return client.get_context(session_id, options.context)


def _session(client: SandboxClient, options: argparse.Namespace) -> str:
    """The named session, or the tenant's standing one if there is one."""
    named = options.session_id or os.environ.get("K8E_SANDBOX_SESSION_ID")
    if named:
        return named
    found = client.list_sessions(cli_parser.tenant(options) or state.DEFAULT_TENANT)
    return next((item.session_id for item in found if item.auto and item.phase in _LIVE), "")


def add_context(commands: Commands) -> None:
    context = commands.add(
        "context",
        "manage the contexts of a session: programs that keep their variables between runs",
        "k8e sandbox context list",
    )
    inner = context.commands(required=True)
    listing_parser = inner.add(
        "list",
        "list the contexts of a session, and their state",
        "k8e sandbox context list --session-id ID",
        listing,
        remote=True,
    )
    restart_parser = inner.add(
        "restart",
        "end a context's program in any case, and start a new one without variables",
        "k8e sandbox context restart NAME",
        restart,
        remote=True,
    )
    interrupt_parser = inner.add(
        "interrupt",
        "interrupt what a context runs, as Ctrl-C does; fails if the code goes on",
        "k8e sandbox context interrupt NAME",
        interrupt,
        remote=True,
    )
    delete_parser = inner.add(
        "delete",
        "remove a context and everything that it runs",
        "k8e sandbox context delete NAME",
        delete,
        remote=True,
        answers_ok=True,
    )
    for parser in (listing_parser, restart_parser, interrupt_parser, delete_parser):
        parser.add_argument("--session-id", metavar="ID", help="whose [K8E_SANDBOX_SESSION_ID]")
        parser.add_argument(
            "--tenant", metavar="NAME", help="whose standing session [K8E_SANDBOX_TENANT]"
        )
    for parser in (restart_parser, interrupt_parser, delete_parser):
        parser.add_argument("context", metavar="NAME")
    interrupt_parser.add_argument(
        "--grace",
        type=float,
        default=5,
        metavar="SECONDS",
        help="how long the code has to stop (default 5)",
    )
