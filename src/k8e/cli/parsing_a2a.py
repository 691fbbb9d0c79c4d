"""The commands about A2A, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
ADDRESS = "127.0.0.1:8812"


def add(command: Command, commands: Any, common: argparse.ArgumentParser, kind: type[Any]) -> None:
    """``k8e a2a``; ``command`` adds one, ``kind`` is the class of its parser."""
    serve = command(
        commands,
        "a2a",
        "let other agents run code here, over the Agent2Agent protocol",
        "k8e a2a\n"
        "         k8e a2a --addr 127.0.0.1:8812 --allowed-hosts none\n"
        "         k8e a2a token researcher",
        "a2a.serve",
        common,
    )
    serve.add_argument(
        "--addr", default=ADDRESS, metavar="HOST:PORT", help=f"where to listen ({ADDRESS})"
    )
    _add_tokens(serve)
    serve.add_argument(
        "--public-url", default="", metavar="URL", help="what the card says, behind a proxy"
    )
    serve.add_argument("--tls-cert", default="", metavar="FILE", help="certificate, as PEM")
    serve.add_argument("--tls-key", default="", metavar="FILE", help="its key, as PEM")
    _add_terms(serve)
    group = serve.add_subparsers(title="commands", metavar="COMMAND", parser_class=kind)
    token = command(
        group,
        "token",
        "print the token of a caller, who is added if new; each caller has tasks of its own",
        "k8e a2a token researcher\n         k8e a2a token researcher --revoke",
        "a2a.token",
    )
    token.add_argument("name", nargs="?", default="default", metavar="NAME", help="the caller")
    _add_tokens(token)
    token.add_argument("--revoke", action="store_true", help="take it away, from now on")


def _add_terms(serve: argparse.ArgumentParser) -> None:
    """What sandboxes and callers get."""
    serve.add_argument("--runtime", default="", help="runtime of the sandboxes")
    serve.add_argument("--template", default="", metavar="NAME", help="what they are made from")
    serve.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="HOSTS",
        help="what they may reach; a comma list, repeatable",
    )
    serve.add_argument(
        "--max-running", type=int, default=4, metavar="N", help="tasks of a caller at once (4)"
    )
    serve.add_argument(
        "--max-timeout",
        type=float,
        default=600,
        metavar="SECONDS",
        help="the longest that a task may ask for (600)",
    )


def _add_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", default="", metavar="FILE", help="callers and tokens (~/.k8e/a2a/tokens)"
    )
