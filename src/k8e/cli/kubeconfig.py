"""``k8e kubeconfig``: a kubeconfig file with which clients of agent-sandbox find this gateway."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from k8e import errors, system
from k8e.cli import output, sessions
from k8e.cli.parser import Commands

PATH, ROUTER = "/agent-sandbox", "/router"
NAME = "agent-sandbox"
"""Of the cluster, the user and the context in the file, and of the API key."""
DEFAULT_FILE = Path(".k8e") / "agent-sandbox.yaml"


def kubeconfig(options: argparse.Namespace) -> int:
    """Make an API key, and write it into a file with the gateway's address."""
    server = _server(options)
    op = "rotate_api_key" if options.rotate else "create_api_key"
    call = {"op": op, "name": options.name, "ttl": options.ttl, "roles": ["agent"]}
    if options.rotate:
        del call["roles"]
    try:
        made = _ask(options, call)
    except errors.Conflict as error:
        error.hint = "k8e kubeconfig --rotate gives it a new secret, --name NAME makes another key"
        raise
    file = Path(options.file) if options.file else Path.home() / DEFAULT_FILE
    text = _text(server, str(made["key"]), options.namespace)
    system.replace_files(file.parent.absolute(), {file.name: text.encode()})
    output.answer(
        {"file": str(file), "key": options.name, "router": server + ROUTER, "server": server}
    )
    return 0


def _server(options: argparse.Namespace) -> str:
    if options.server:
        return options.server.rstrip("/") + PATH
    told = str(_ask(options, {"op": "status"}).get("http") or "none")
    if not told.startswith("http"):
        raise errors.InvalidRequest(
            f"the gateway has no HTTP endpoint ({told})",
            hint="start one that stays: k8e gateway --http 127.0.0.1:8811",
        )
    return told + PATH


def _ask(options: argparse.Namespace, call: dict[str, Any]) -> dict[str, Any]:
    from k8e.client import operations

    return sessions.ask(options, operations.call(call))


def _text(server: str, key: str, namespace: str) -> str:
    import yaml

    cluster: dict[str, str] = {"server": server}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": NAME, "cluster": cluster}],
            "users": [{"name": NAME, "user": {"token": key}}],
            "contexts": [
                {
                    "name": NAME,
                    "context": {"cluster": NAME, "user": NAME, "namespace": namespace},
                }
            ],
            "current-context": NAME,
        },
        sort_keys=False,
    )


def add_kubeconfig(commands: Commands) -> None:
    parser = commands.add(
        "kubeconfig",
        "write the kubeconfig file with which clients of agent-sandbox use this gateway",
        "k8e kubeconfig && export KUBECONFIG=~/.k8e/agent-sandbox.yaml",
        kubeconfig,
        remote=True,
    )
    parser.add_argument(
        "--file", metavar="PATH", help="the file to write; default: ~/.k8e/agent-sandbox.yaml"
    )
    parser.add_argument(
        "--name", default=NAME, metavar="NAME", help="the name of the API key that is made for it"
    )
    parser.add_argument(
        "--ttl", default="30d", metavar="TIME", help="how long the key is valid: 12h, 30d, never"
    )
    parser.add_argument(
        "--rotate", action="store_true", help="give the key of that name a new secret"
    )
    parser.add_argument(
        "--namespace", default="default", metavar="NAME", help="the namespace that kubectl uses"
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="the gateway's address for clients, where a server with TLS is in front of it",
    )
