"""``k8e a2a``: let other agents run code here.

The gateway serves them. The command starts one if none runs, prints its address and which
credentials it takes, and keeps it running as long as the command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from k8e import access, errors, settings
from k8e.cli import gateway, output
from k8e.cli.parser import Commands
from k8e.client import endpoints, local

if TYPE_CHECKING:
    import _socket

ADDRESS = "127.0.0.1:8811"
"""Of the HTTP endpoint of a gateway that is started here, unless K8E_HTTP says otherwise."""
OPEN_SECONDS = 30.0
HOW = "Authorization: Bearer TOKEN, with the token of token_file or an API key"
_ELSEWHERE = "every gateway serves A2A itself: its HTTP endpoint has it at /a2a"
_PROXY = (
    "put a proxy with TLS in front of the gateway's HTTP endpoint, and name it with "
    "K8E_ADVERTISE_NAMES; the card then gives the URL by which the caller came"
)
_KEYS = "a caller is an API key: k8e sandbox api-key create NAME, … list, … delete"
GONE = {
    "--public-url": _PROXY,
    "--tls-cert": _PROXY,
    "--tls-key": _PROXY,
    "--tokens": _KEYS,
    "--runtime": "set K8E_RUNTIME of the gateway, or a template that messages name",
    "--template": 'messages name it in their metadata: {"template": "NAME"}',
    "--allowed-hosts": "set K8E_ALLOWED_HOSTS of the gateway, or a template that messages name",
    "--max-running": "a caller has 4 tasks at a time",
    "--max-timeout": "a task may ask for up to an hour",
    "--endpoint": _ELSEWHERE,
    "--apikey": _ELSEWHERE,
    "--apikey-file": _ELSEWHERE,
    "--profile": _ELSEWHERE,
}
"""Flags from when this command was a server of its own, and what to do instead."""


class Stop(BaseException):
    """A signal asks us to end."""


def serve(options: argparse.Namespace) -> int:
    """Print where the gateway serves A2A, and keep the gateway running until we are stopped."""
    if sys.platform != "linux":
        raise errors.InvalidRequest("a gateway needs Linux", hint=_ELSEWHERE)
    with contextlib.closing(_dial(options.addr)) as sock:
        url = _http(local.Connection(sock), options.addr)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        try:
            output.answer(
                {
                    "authorization": HOW,
                    "card": f"{url}/.well-known/agent-card.json",
                    "token_file": _token_file(),
                    "url": f"{url}/a2a",
                }
            )
            _wait(sock)
        except Stop:
            return 0
    raise errors.GatewayUnreachable(
        "the gateway has ended", hint="run this again; it starts another one"
    )


def _stop(*_: object) -> NoReturn:
    raise Stop


def _dial(address: str) -> _socket.socket:
    """A connection to this machine's gateway, which is started if it does not run."""
    from k8e.client import autostart

    chosen = endpoints.resolve(None)
    if chosen.target:
        raise errors.InvalidRequest(
            f"the gateway of this shell is {chosen.target}, which serves A2A itself",
            hint="its HTTP endpoint has it at /a2a; unset K8E_SANDBOX_ENDPOINT, or choose no "
            "profile, to serve it here",
        )
    if chosen.socket:
        return local.dial(os.fsencode(chosen.socket))
    config = settings.load(http=address or None)
    return autostart.dial(replace(config, http=config.http or ADDRESS))


def _http(connection: local.Connection, address: str) -> str:
    """The URL of the gateway's HTTP endpoint."""
    until = time.monotonic() + OPEN_SECONDS
    # A gateway in the background serves its unix socket first, and has no answer before it listens.
    while not (found := str(gateway.ask(connection, "status")["http"])):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    restart = "k8e gateway stop ends it, and its sandboxes live on; then run this again"
    if not found.startswith("http"):
        raise errors.Conflict(f"the gateway runs without an HTTP endpoint ({found})", hint=restart)
    host, _, port = address.rpartition(":")
    host = "127.0.0.1" if host in ("", "localhost") else host
    if address and port != "0" and found != f"http://{host}:{port}":
        raise errors.Conflict(
            f"the HTTP endpoint of the gateway is {found}, not {address}",
            hint=f"leave --addr out; or {restart}",
        )
    return found


def _token_file() -> str:
    return f"${access.VARIABLE}" if os.environ.get(access.VARIABLE) else str(access.default_file())


def _wait(sock: _socket.socket) -> None:
    """Wait until the gateway ends: we ask nothing, so the only message is its goodbye.

    A gateway in the background ends when no client is connected and it has nothing to do.
    """
    import select

    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.poll()


def token(options: argparse.Namespace) -> int:
    if options.name is not None or options.revoke:
        raise errors.InvalidRequest("A2A has no tokens of its own any more", hint=_KEYS)
    output.answer({"file": _token_file(), "name": "local", "token": access.token()})
    return 0


class _Gone(argparse.Action):
    """A flag that was removed."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        name = option or ""
        raise errors.InvalidRequest(
            f"k8e a2a has no flag {name} any more, since the gateway serves A2A", hint=GONE[name]
        )


def add_a2a(commands: Commands) -> None:
    parser = commands.add(
        "a2a",
        "let other agents run code here, over the Agent2Agent protocol",
        "k8e a2a\n         k8e a2a --addr 127.0.0.1:8812\n         k8e a2a token",
        serve,
    )
    parser.add_argument(
        "--addr",
        default="",
        metavar="HOST:PORT",
        help=f"the HTTP endpoint of a gateway that is started ({ADDRESS}) [K8E_HTTP]",
    )
    for flag in GONE:
        parser.add_argument(flag, action=_Gone, help=argparse.SUPPRESS, dest="gone")
    token_parser = parser.commands().add(
        "token",
        "print the token of this machine's user; other callers have API keys",
        "k8e a2a token",
        token,
    )
    token_parser.add_argument("name", nargs="?", help=argparse.SUPPRESS)
    token_parser.add_argument("--revoke", action="store_true", help=argparse.SUPPRESS)
    token_parser.add_argument("--tokens", action=_Gone, help=argparse.SUPPRESS, dest="gone")
