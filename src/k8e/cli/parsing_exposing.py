"""The commands about exposed ports, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]


def add(group: Any, common: argparse.ArgumentParser, command: Command) -> None:
    expose = command(
        group,
        "expose",
        "make a port of a sandbox reachable on this machine, and print its URL with a token",
        "k8e sandbox expose 8000\n"
        "         k8e sandbox expose 5173 --host localhost --session-id ID",
        "exposing.expose",
        common,
    )
    unexpose = command(
        group,
        "unexpose",
        "end the URL of a port, and every connection that came through it",
        "k8e sandbox unexpose 8000",
        "exposing.unexpose",
        common,
    )
    for parser in (expose, unexpose):
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
    expose.add_argument(
        "--host",
        default="127.0.0.1",
        help="where in the sandbox the server listens (127.0.0.1): a loopback address, or "
        "localhost for 127.0.0.1 and ::1",
    )
    exposed = command(
        group,
        "exposed",
        "list exposed ports and their URLs",
        "k8e sandbox exposed",
        "exposing.exposed",
        common,
    )
    exposed.add_argument("--session-id", default="", metavar="ID", help="only of this session")
