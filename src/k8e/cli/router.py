"""``k8e router``: the way into the sandboxes of a cluster; and the keys of its callers."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.cli import fast
from k8e.cli.parser import Commands

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_MODE = 0o600


def add_router(commands: Commands) -> None:
    parser = commands.add(
        "router",
        "lead requests to the pods of a cluster's sandboxes",
        "k8e router --access access.yaml --kubeconfig /etc/k8e/k8e.yaml",
        router,
    )
    parser.add_argument(
        "--access",
        metavar="PATH",
        required=True,
        help="who may use which namespaces; k8e router-key writes it",
    )
    parser.add_argument(
        "--kubeconfig", metavar="PATH", help="of the cluster; in a pod its service account"
    )
    parser.add_argument("--bind-address", metavar="HOST:PORT", help="of the router (:8080)")
    parser.add_argument(
        "--health-probe-bind-address",
        metavar="HOST:PORT",
        help="of /healthz and /readyz (:8081); 0: none",
    )
    parser.add_argument(
        "--pod-network",
        metavar="CIDR",
        action="append",
        default=[],
        help="addresses that pods can have; repeat it (all but loopback and link-local ones)",
    )
    parser.add_argument(
        "--name",
        metavar="HOST",
        action="append",
        default=[],
        help="a host name of the router, for callers without a key; repeat it",
    )
    parser.add_argument(
        "--no-wake", action="store_true", help="leave sandboxes asleep that traffic could wake"
    )
    parser.add_argument(
        "--hold-seconds", metavar="N", type=float, help="how long a request waits for that (60)"
    )
    parser.add_argument("--log-level", choices=tuple(_LEVELS), default="info", help="of stderr")


def add_router_key(commands: Commands) -> None:
    parser = commands.add(
        "router-key",
        "let somebody use the sandboxes of some namespaces through k8e router; print the key",
        "k8e router-key team-a --namespace team-a --access access.yaml",
        router_key,
    )
    parser.add_argument("name", help="of the caller; again for a second key")
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        action="append",
        default=[],
        help="whose sandboxes it may use; repeat it; * means all",
    )
    parser.add_argument(
        "--access", metavar="PATH", required=True, help="the file, which is made if it is missing"
    )


def router(options: argparse.Namespace) -> int:
    from k8e.agent_sandbox import cluster_router, principals

    logging.basicConfig(
        level=_LEVELS[options.log_level], format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if options.hold_seconds is not None and not 0 < options.hold_seconds <= 3600:
        raise errors.InvalidRequest("--hold-seconds is not between 0 and 3600")
    given: dict[str, Any] = {
        "kubeconfig": Path(options.kubeconfig) if options.kubeconfig else None,
        "address": options.bind_address,
        "probe_address": options.health_probe_bind_address,
        "networks": tuple(map(principals.parse_network, options.pod_network)),
        "names": tuple(options.name),
        "wake": not options.no_wake,
        "hold_seconds": options.hold_seconds,
    }
    given = {name: value for name, value in given.items() if value is not None}
    asyncio.run(cluster_router.run(cluster_router.Options(Path(options.access), **given)))
    return 0


def router_key(options: argparse.Namespace) -> int:
    from k8e.agent_sandbox import principals

    path = Path(options.access)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise errors.InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    key = principals.new_key()
    made = principals.with_key(data, options.name, options.namespace, key)
    _replace(path, made)
    fast.write(1, f"{key}\n".encode())
    return 0


def _replace(path: Path, data: bytes) -> None:
    """Write a file anew; whoever reads it meanwhile has the old one or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.touch(mode=_MODE)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise errors.InvalidRequest(f"{path} cannot be written: {error.strerror}") from None
