"""Arguments of ``k8e sandbox-mcp``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add(command: Callable[..., argparse.ArgumentParser], commands: Any, common: Any) -> None:
    mcp = command(
        commands,
        "sandbox-mcp",
        "serve sandboxes as MCP tools, on stdin and stdout or on HTTP",
        "k8e sandbox-mcp\n         k8e sandbox-mcp --http --http-addr 127.0.0.1:8811",
        "mcp.serve",
        common,
    )
    mcp.add_argument(
        "--tenant",
        "--tenant-id",
        metavar="NAME",
        help="share this tenant's sessions between all connections [K8E_SANDBOX_TENANT]",
    )
    mcp.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="the CA of a gateway elsewhere; with --tls-key our certificate [K8E_SANDBOX_CERT]",
    )
    mcp.add_argument("--tls-key", metavar="FILE", help="the key of it [K8E_SANDBOX_KEY]")
    mcp.add_argument("--http", action="store_true", help="serve HTTP instead of stdin and stdout")
    mcp.add_argument(
        "--http-addr",
        metavar="HOST:PORT",
        help="where (:8811, on this machine alone) [K8E_SANDBOX_MCP_ADDR]",
    )
    mcp.add_argument(
        "--http-host",
        action="append",
        metavar="NAME",
        help="a further name by which clients may call the server; repeatable",
    )
    mcp.add_argument(
        "--http-insecure",
        action="store_true",
        help="listen for other machines without TLS: who hears the network has the token",
    )
    mcp.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="HOSTS",
        help="what agents may give their sessions to reach without asking a person, beside what "
        "the gateway allows by default; a comma list, repeatable",
    )
