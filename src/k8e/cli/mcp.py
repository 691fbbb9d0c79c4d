"""``k8e sandbox-mcp``: sandboxes as tools for agents."""

from __future__ import annotations

import argparse
import importlib.util
import os

from k8e import errors
from k8e.cli import keyfiles, parsing
from k8e.mcp import stdio
from k8e.mcp.options import Options

TLS_VARIABLES = ("K8E_SANDBOX_CERT", "K8E_SANDBOX_KEY")
ADDRESS_VARIABLE = "K8E_SANDBOX_MCP_ADDR"
DEFAULT_ADDRESS = ":8811"


def serve(options: argparse.Namespace) -> int:
    given = vars(options)
    if given.get("apikey_file") == keyfiles.STDIN and not options.http:
        raise errors.InvalidRequest(
            "stdin is the client's here", hint="give --apikey-file a path, or use a profile"
        )
    for variable, path in zip(TLS_VARIABLES, (options.tls_cert, options.tls_key), strict=True):
        if path:
            os.environ[variable] = path
    chosen = Options(
        endpoint=given.get("endpoint"),
        api_key=keyfiles.api_key(options),
        profile=given.get("profile"),
        tenant=parsing.tenant(options),
        allowed_hosts=tuple(parsing.hosts(options.allowed_hosts) or ()),
    )
    if importlib.util.find_spec("mcp") is None:
        raise errors.InvalidRequest(
            "a part of the MCP server is missing: the package mcp",
            hint=errors.install_extra("mcp"),
        )
    if not options.http:
        return stdio.serve(chosen)
    from k8e.mcp import serving

    address = options.http_addr or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    return serving.run(chosen, address, options.http_host or [], insecure=options.http_insecure)
