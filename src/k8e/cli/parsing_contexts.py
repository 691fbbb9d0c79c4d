"""The commands about contexts, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
"""How the parser adds a command: group, name, text, example, handler, flags shared with others."""


def add_flag(run: argparse.ArgumentParser) -> None:
    """``--context``, for ``run``."""
    run.add_argument(
        "--context",
        metavar="NAME",
        help="run in a program that keeps its variables between runs, made at its first use "
        "(python, bash or node)",
    )


def add(group: Any, common: argparse.ArgumentParser, command: Command) -> None:
    """Add ``context`` to ``k8e sandbox``."""
    context = command(
        group,
        "context",
        "look after the contexts of a session: programs that keep their variables between runs",
        "k8e sandbox context list",
        "contexts.listing",
    )
    inner = context.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=type(context)
    )
    listing = command(
        inner,
        "list",
        "list the contexts of a session, and how they are",
        "k8e sandbox context list --session-id ID",
        "contexts.listing",
        common,
    )
    restart = command(
        inner,
        "restart",
        "end a context's program, whatever it does, and start a new one without variables",
        "k8e sandbox context restart NAME",
        "contexts.restart",
        common,
    )
    interrupt = command(
        inner,
        "interrupt",
        "interrupt what a context runs, as Ctrl-C does; fails if the code goes on",
        "k8e sandbox context interrupt NAME",
        "contexts.interrupt",
        common,
    )
    delete = command(
        inner,
        "delete",
        "remove a context and everything that it runs",
        "k8e sandbox context delete NAME",
        "contexts.delete",
        common,
    )
    for parser in (listing, restart, interrupt, delete):
        parser.add_argument("--session-id", metavar="ID", help="whose [K8E_SANDBOX_SESSION_ID]")
        parser.add_argument(
            "--tenant", metavar="NAME", help="whose standing session [K8E_SANDBOX_TENANT]"
        )
    for parser in (restart, interrupt, delete):
        parser.add_argument("context", metavar="NAME")
    interrupt.add_argument(
        "--grace",
        type=float,
        default=5,
        metavar="SECONDS",
        help="how long the code has to stop (default 5)",
    )
