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
from k8e.cli import keyfiles, parsing, printing


def serve(options: argparse.Namespace) -> int:
    try:
        from k8e.a2a import server
    except ImportError as error:
        raise errors.InvalidRequest(
            f"a part of A2A is missing: {error}", hint=errors.install_extra("a2a")
        ) from None
    from k8e.a2a.desk import Terms
    from k8e.client.asynchronous import AsyncSandboxClient

    if options.max_running < 1 or not 0 < options.max_timeout < float("inf"):
        raise errors.InvalidRequest("--max-running and --max-timeout must be above 0")
    logging.basicConfig(level=logging.WARNING)
    where = server.place(options.addr, options.public_url, options.tls_cert, options.tls_key)
    terms = Terms(
        runtime=options.runtime,
        template=options.template,
        allowed_hosts=parsing.hosts(options.allowed_hosts),
        running=options.max_running,
        longest=options.max_timeout,
    )
    given, api_key = vars(options), keyfiles.api_key(options)

    def connect() -> AsyncSandboxClient:
        return AsyncSandboxClient(
            given.get("endpoint"), api_key=api_key, profile=given.get("profile")
        )

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows ends us in its own way
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await server.serve(where, _tokens(options), terms, connect, printing.answer, stop)

    asyncio.run(main())
    return 0


def token(options: argparse.Namespace) -> int:
    tokens = _tokens(options)
    if options.revoke:
        tokens.revoke(options.name)
        printing.answer({"name": options.name, "ok": True})
    else:
        found = tokens.token(options.name)
        printing.answer({"file": str(tokens.path), "name": options.name, "token": found})
    return 0


def _tokens(options: argparse.Namespace) -> Tokens:
    return Tokens(Path(options.tokens) if options.tokens else Path.home() / ".k8e/a2a/tokens")
