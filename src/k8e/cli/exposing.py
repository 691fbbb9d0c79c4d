"""``k8e sandbox expose|unexpose|exposed``: servers in sandboxes, on local URLs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from k8e import errors
from k8e.cli import parsing, printing, sandbox, state
from k8e.client.exposing import Exposed, expose_port, unexpose_port


def expose(options: argparse.Namespace) -> int:
    call = {**_where(options), "host": options.host}
    found: Exposed = sandbox.ask(options, expose_port(call))
    if not call["session_id"]:
        _remember(call["tenant"] or state.DEFAULT_TENANT, found.session_id)
    printing.answer({"port": found.port, "session_id": found.session_id, "url": found.url})
    return 0


def _remember(tenant: str, session_id: str) -> None:
    """Keep K8E's state file true; a session may have been made."""
    if state.load(tenant) != session_id:
        state.save(tenant, session_id)


def unexpose(options: argparse.Namespace) -> int:
    call = _where(options)
    session_id = sandbox.ask(options, unexpose_port(call))
    printing.answer({"ok": True, "port": call["port"], "session_id": session_id})
    return 0


def exposed(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.list_exposed(options.session_id)
    printing.answer({"services": [_service(item) for item in found]})
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
    """The port, and the session; without one the tenant whose standing session is meant."""
    given = {port for port in (options.port, options.port_flag) if port is not None}
    if len(given) != 1:
        raise errors.InvalidRequest(
            "two ports are named" if given else "no port is named",
            hint="k8e sandbox expose 8000",
        )
    session_id = options.session_id or os.environ.get("K8E_SANDBOX_SESSION_ID") or ""
    return {"port": given.pop(), "session_id": session_id, "tenant": parsing.tenant(options)}
