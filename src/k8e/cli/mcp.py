"""``k8e sandbox-mcp``: sandboxes as tools for agents."""

from __future__ import annotations

import argparse
import importlib.util
import os

from k8e import errors
from k8e.cli import parser as cli_parser
from k8e.cli import sessions
from k8e.cli.parser import Commands
from k8e.mcp import stdio
from k8e.mcp.options import McpOptions

TLS_VARIABLES = ("K8E_SANDBOX_CERT", "K8E_SANDBOX_KEY")
ADDRESS_VARIABLE = "K8E_SANDBOX_MCP_ADDR"
DEFAULT_ADDRESS = ":8811"


def serve(options: argparse.Namespace) -> int:
    given = vars(options)
    if given.get("apikey_file") == sessions.STDIN and not options.http:
        raise errors.InvalidRequest(
            "stdin is the client's here", hint="give --apikey-file a path, or use a profile"
        )
    for variable, path in zip(TLS_VARIABLES, (options.tls_cert, options.tls_key), strict=True):
        if path:
            os.environ[variable] = path
    chosen = McpOptions(
        endpoint=given.get("endpoint"),
        api_key=sessions.api_key(options),
        profile=given.get("profile"),
        tenant=cli_parser.tenant(options),
        allowed_hosts=tuple(cli_parser.hosts(options.allowed_hosts) or ()),
    )
    if importlib.util.find_spec("mcp") is None:
        raise errors.InvalidRequest(
            "a part of the MCP server is missing: the package mcp",
            hint=errors.install_extra("mcp"),
        )
    if not options.http:
        return stdio.serve(chosen)
    from k8e.mcp import http_server

    address = options.http_addr or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    return http_server.run(chosen, address, options.http_host or [], insecure=options.http_insecure)


def add_sandbox_mcp(commands: Commands) -> None:
    parser = commands.add(
        "sandbox-mcp",
        "serve sandboxes as MCP tools, on stdin and stdout or on HTTP",
        "k8e sandbox-mcp\n         k8e sandbox-mcp --http --http-addr 127.0.0.1:8811",
        serve,
        remote=True,
    )
    parser.add_argument(
        "--tenant",
        "--tenant-id",
        metavar="NAME",
        help="share this tenant's sessions between all connections [K8E_SANDBOX_TENANT]",
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="the CA of a gateway elsewhere; with --tls-key our certificate [K8E_SANDBOX_CERT]",
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its key [K8E_SANDBOX_KEY]")
    parser.add_argument(
        "--http", action="store_true", help="serve HTTP instead of stdin and stdout"
    )
    parser.add_argument(
        "--http-addr",
        metavar="HOST:PORT",
        help="its address (:8811, on this machine alone) [K8E_SANDBOX_MCP_ADDR]",
    )
    parser.add_argument(
        "--http-host",
        action="append",
        metavar="NAME",
        help="another name by which clients may call the server; repeatable",
    )
    parser.add_argument(
        "--http-insecure",
        action="store_true",
        help="listen for other machines without TLS: others on the network can read the token",
    )
    parser.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="HOSTS",
        help="hosts that agents may allow their sessions without asking a person, beside the "
        "gateway's default; a comma list, repeatable",
    )
