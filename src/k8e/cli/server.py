"""``k8e server`` and ``k8e agent``: Kubernetes on this machine."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from k8e import errors
from k8e.cli import fast, output
from k8e.cli.parser import Commands

if TYPE_CHECKING:
    from k8e.distro.configuration import Configuration

_ACTIONS = {
    "run": "start it and stay in the foreground (the default)",
    "stop": "end the components; pods keep running",
    "uninstall": "end everything and remove all that it wrote",
}


def add_server(commands: Commands) -> None:
    parser = commands.add(
        "server",
        "run a Kubernetes cluster made for sandboxes: its control plane, and a node",
        "k8e server\n         k8e server --cni basic --detach\n         k8e server uninstall",
        server,
    )
    _add_common(parser)
    _add_server_flags(parser)


def add_agent(commands: Commands) -> None:
    parser = commands.add(
        "agent",
        "join this machine to a cluster as a node",
        "k8e agent --server https://10.0.0.1:6443 --token K10…\n         k8e agent uninstall",
        agent,
    )
    _add_common(parser)
    parser.add_argument("--server", metavar="URL", help="https://SERVER:6443 [K8E_URL]")


def _add_common(parser: argparse.ArgumentParser) -> None:
    actions = "; ".join(f"{name}: {text}" for name, text in _ACTIONS.items())
    parser.add_argument("action", nargs="?", choices=tuple(_ACTIONS), default="run", help=actions)
    parser.add_argument(
        "--config", metavar="PATH", help="flags as YAML (/etc/k8e/config.yaml, if it is there)"
    )
    parser.add_argument(
        "--token", metavar="TOKEN", help="the token with which nodes join [K8E_TOKEN]"
    )
    parser.add_argument("--data-dir", metavar="PATH", help="its state (/var/lib/k8e)")
    parser.add_argument("--node-name", metavar="NAME", help="by default the host's name")
    parser.add_argument("--node-ip", metavar="ADDRESS", help="by default that of the default route")
    parser.add_argument(
        "--node-label", metavar="K=V", action="append", help="of the new node; repeatable"
    )
    parser.add_argument(
        "--node-taint", metavar="K=V:EFFECT", action="append", help="of the new node; repeatable"
    )
    parser.add_argument(
        "--components-dir", metavar="PATH", help="where the programs are [K8E_COMPONENTS_DIR]"
    )
    parser.add_argument(
        "--allow-swap",
        action="store_true",
        default=None,
        help="start although swap is on, where limits of memory do not hold",
    )
    parser.add_argument(
        "--detach", "-d", action="store_true", help="go to the background once the node is ready"
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cni",
        metavar="NETWORK",
        help="cilium (default), basic (no policies; for tiny machines and kernels without BPF) or "
        "none (bring your own)",
    )
    parser.add_argument("--cluster-cidr", metavar="CIDR", help="of pods (10.42.0.0/16)")
    parser.add_argument("--service-cidr", metavar="CIDR", help="of services (10.43.0.0/16)")
    parser.add_argument("--cluster-domain", metavar="NAME", help="of names (cluster.local)")
    parser.add_argument("--https-listen-port", metavar="PORT", type=int, help="of the API (6443)")
    parser.add_argument(
        "--tls-san",
        metavar="NAME",
        action="append",
        help="another name or address of this server; repeatable",
    )
    parser.add_argument(
        "--disable",
        metavar="ADDON",
        action="append",
        help="coredns, metrics-server or local-path; repeatable",
    )
    parser.add_argument(
        "--disable-sandbox-matrix",
        action="store_true",
        default=None,
        help="start no gateway for sandboxes",
    )
    parser.add_argument(
        "--pod-security",
        metavar="LEVEL",
        help="the default that namespaces enforce: privileged, baseline (default), restricted",
    )
    parser.add_argument(
        "--write-kubeconfig",
        metavar="PATH",
        help="the administrator's kubeconfig (/etc/k8e/k8e.yaml) [K8E_KUBECONFIG_OUTPUT]",
    )
    parser.add_argument(
        "--certificate-days",
        metavar="DAYS",
        type=int,
        help="how long certificates live (365); they are renewed in the last third",
    )


def server(options: argparse.Namespace) -> int:
    return _run(options, "server")


def agent(options: argparse.Namespace) -> int:
    return _run(options, "agent")


def _run(options: argparse.Namespace, role: str) -> int:
    if sys.platform != "linux":
        raise errors.InvalidRequest(
            "a cluster needs Linux", hint="use one elsewhere, with kubectl and its kubeconfig"
        )
    from k8e.distro import configuration, launch

    flags = {
        name: value
        for name, value in vars(options).items()
        if name not in ("action", "answers_ok", "config", "detach", "handler")
    }
    path = Path(options.config) if options.config else None
    config = configuration.load(flags, role=role, path=path, again=options.action != "run")
    if options.action == "stop":
        launch.stop(config, role)
        output.answer({"ok": True, "running": False})
        return 0
    if options.action == "uninstall":
        output.answer({"ok": True, "removed": launch.uninstall(config, role, _tell())})
        return 0
    return _serve(config, role, detach=options.detach)


def _serve(config: Configuration, role: str, *, detach: bool) -> int:
    from k8e.distro import launch
    from k8e.skills import install

    launch.check(config, role)
    launch.stage_skills(config, install.texts() if role == "server" else {})
    if detach:
        return launch.detach(config, role, _tell())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    asyncio.run(launch.run(config, role, _tell()))
    return 0


def _tell() -> Callable[[str], None]:
    """Print progress on stderr, with the time since the start."""
    began = time.monotonic()

    def tell(text: str) -> None:
        fast.write(2, f"k8e: [{time.monotonic() - began:5.1f} s] {text}\n".encode())

    return tell
