"""``k8e a2a``: let other agents run code here."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from k8e import errors
from k8e.a2a.tokens import Tokens
from k8e.cli import output, sessions
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands


def serve(options: argparse.Namespace) -> int:
    try:
        from k8e.a2a import server
    except ImportError as error:
        raise errors.InvalidRequest(
            f"a part of A2A is missing: {error}", hint=errors.install_extra("a2a")
        ) from None
    from k8e.a2a.runner import TaskTerms
    from k8e.client.asynchronous import AsyncSandboxClient

    if options.max_running < 1 or not 0 < options.max_timeout < float("inf"):
        raise errors.InvalidRequest("--max-running and --max-timeout must be above 0")
    logging.basicConfig(level=logging.WARNING)
    where = server.place(options.addr, options.public_url, options.tls_cert, options.tls_key)
    terms = TaskTerms(
        runtime=options.runtime,
        template=options.template,
        allowed_hosts=cli_parser.hosts(options.allowed_hosts),
        running=options.max_running,
        longest=options.max_timeout,
    )
    given, api_key = vars(options), sessions.api_key(options)

    def connect() -> AsyncSandboxClient:
        return AsyncSandboxClient(
            given.get("endpoint"), api_key=api_key, profile=given.get("profile")
        )

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows ends us in its own way
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await server.serve(where, _tokens(options), terms, connect, output.answer, stop)

    asyncio.run(main())
    return 0


def token(options: argparse.Namespace) -> int:
    tokens = _tokens(options)
    if options.revoke:
        tokens.revoke(options.name)
        output.answer({"name": options.name, "ok": True})
    else:
        found = tokens.token(options.name)
        output.answer({"file": str(tokens.path), "name": options.name, "token": found})
    return 0


def _tokens(options: argparse.Namespace) -> Tokens:
    return Tokens(Path(options.tokens) if options.tokens else Path.home() / ".k8e/a2a/tokens")


ADDRESS = "127.0.0.1:8812"


def add_a2a(commands: Commands) -> None:
    parser = commands.add(
        "a2a",
        "let other agents run code here, over the Agent2Agent protocol",
        "k8e a2a\n"
        "         k8e a2a --addr 127.0.0.1:8812 --allowed-hosts none\n"
        "         k8e a2a token researcher",
        serve,
        remote=True,
    )
    parser.add_argument(
        "--addr", default=ADDRESS, metavar="HOST:PORT", help=f"where to listen ({ADDRESS})"
    )
    _add_tokens(parser)
    parser.add_argument(
        "--public-url", default="", metavar="URL", help="what the card says, behind a proxy"
    )
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="certificate, as PEM")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="its key, as PEM")
    _add_terms(parser)
    token_parser = parser.commands().add(
        "token",
        "print the token of a caller, who is added if new; each caller has tasks of its own",
        "k8e a2a token researcher\n         k8e a2a token researcher --revoke",
        token,
    )
    token_parser.add_argument(
        "name", nargs="?", default="default", metavar="NAME", help="the caller"
    )
    _add_tokens(token_parser)
    token_parser.add_argument("--revoke", action="store_true", help="take it away, from now on")


def _add_terms(parser: argparse.ArgumentParser) -> None:
    """What sandboxes and callers get."""
    parser.add_argument("--runtime", default="", help="runtime of the sandboxes")
    parser.add_argument("--template", default="", metavar="NAME", help="what they are made from")
    parser.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="HOSTS",
        help="what they may reach; a comma list, repeatable",
    )
    parser.add_argument(
        "--max-running", type=int, default=4, metavar="N", help="tasks of a caller at once (4)"
    )
    parser.add_argument(
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
