"""``k8e sandbox expose|unexpose|exposed``: servers in sandboxes, on local URLs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from k8e import errors
from k8e.cli import output, sessions, state
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands
from k8e.client.exposures import Exposed, expose_port, unexpose_port


def expose(options: argparse.Namespace) -> int:
    call = {**_where(options), "host": options.host}
    found: Exposed = sessions.ask(options, expose_port(call))
    if not call["session_id"]:
        _remember(call["tenant"] or state.DEFAULT_TENANT, found.session_id)
    output.answer({"port": found.port, "session_id": found.session_id, "url": found.url})
    return 0


def _remember(tenant: str, session_id: str) -> None:
    """Update K8E's state file; a session may have been made."""
    if state.load(tenant) != session_id:
        state.save(tenant, session_id)


def unexpose(options: argparse.Namespace) -> int:
    call = _where(options)
    session_id = sessions.ask(options, unexpose_port(call))
    output.answer({"ok": True, "port": call["port"], "session_id": session_id})
    return 0


def exposed(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.list_exposed(options.session_id)
    output.answer({"services": [_service(item) for item in found]})
    return 0


def _service(item: Exposed) -> dict[str, Any]:
    return {
        "host": item.host,
        "port": item.port,
        "session_id": item.session_id,
        "started_at": int(item.started_at),
        "url": item.url,
    }


def _where(options: argparse.Namespace) -> dict[str, Any]:
    """The port, and the session; without a session, the tenant whose standing session is meant."""
    given = {port for port in (options.port, options.port_flag) if port is not None}
    if len(given) != 1:
        raise errors.InvalidRequest(
            "two ports are named" if given else "no port is named",
            hint="k8e sandbox expose 8000",
        )
    session_id = options.session_id or os.environ.get("K8E_SANDBOX_SESSION_ID") or ""
    return {"port": given.pop(), "session_id": session_id, "tenant": cli_parser.tenant(options)}


def add_expose(commands: Commands) -> None:
    parser = commands.add(
        "expose",
        "make a port of a sandbox reachable on this machine, and print its URL with a token",
        "k8e sandbox expose 8000\n"
        "         k8e sandbox expose 5173 --host localhost --session-id ID",
        expose,
        remote=True,
    )
    _add_port(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="where in the sandbox the server listens (127.0.0.1): a loopback address, or "
        "localhost for 127.0.0.1 and ::1",
    )


def add_unexpose(commands: Commands) -> None:
    parser = commands.add(
        "unexpose",
        "close the URL of a port, and every connection that came through it",
        "k8e sandbox unexpose 8000",
        unexpose,
        remote=True,
        answers_ok=True,
    )
    _add_port(parser)


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("port", nargs="?", type=int, metavar="PORT", help="in the sandbox")
    parser.add_argument(
        "--port", dest="port_flag", type=int, metavar="PORT", help="the same, as a flag"
    )
    parser.add_argument(
        "--session-id",
        metavar="ID",
        help="whose port [K8E_SANDBOX_SESSION_ID]; by default the standing session's",
    )
    parser.add_argument(
        "--tenant", metavar="NAME", help="whose standing session [K8E_SANDBOX_TENANT]"
    )


def add_exposed(commands: Commands) -> None:
    parser = commands.add(
        "exposed",
        "list exposed ports and their URLs",
        "k8e sandbox exposed",
        exposed,
        remote=True,
    )
    parser.add_argument("--session-id", default="", metavar="ID", help="only of this session")
