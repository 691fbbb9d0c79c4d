"""``k8e controller``: the resources of agent-sandbox on a Kubernetes cluster."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.cli.parser import Commands

_WORKERS = {"sandbox": 100, "claim": 50, "pool": 1, "template": 1}
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


def add_controller(commands: Commands) -> None:
    parser = commands.add(
        "controller",
        "serve the resources of agent-sandbox on a Kubernetes cluster",
        "k8e controller --kubeconfig /etc/k8e/k8e.yaml",
        controller,
    )
    # Upstream's Deployment may carry flags that mean nothing here.
    parser.set_defaults(takes_unknown=True)
    parser.add_argument(
        "--kubeconfig", metavar="PATH", help="of the cluster; in a pod its service account"
    )
    _add_switch(parser, "--extensions", "serve claims, templates and warm pools too (true)")
    _add_switch(parser, "--legacy", "serve the kinds of early write-ups too, as today's (false)")
    _add_switch(parser, "--leader-elect", "one active controller of many, by a Lease (true)")
    parser.add_argument("--leader-election-namespace", metavar="NAME", help="of the Lease")
    parser.add_argument("--leader-election-id", metavar="NAME", help="of the Lease")
    parser.add_argument("--cluster-domain", metavar="NAME", help="of services (cluster.local)")
    parser.add_argument(
        "--metrics-bind-address", metavar="HOST:PORT", help="of /metrics (:8080); 0: none"
    )
    parser.add_argument(
        "--health-probe-bind-address",
        metavar="HOST:PORT",
        help="of /healthz and /readyz (:8081); 0: none",
    )
    for name, count in _WORKERS.items():
        parser.add_argument(
            f"--{name}-concurrent-workers",
            metavar="N",
            type=int,
            help=f"how many objects of this kind are looked at at once ({count})",
        )
    parser.add_argument(
        "--trace-endpoint",
        metavar="URL",
        help="of an OpenTelemetry collector, for traces by OTLP over HTTP (none)",
    )
    parser.add_argument("--log-level", choices=tuple(_LEVELS), default="info", help="of stderr")


def _add_switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, nargs="?", const=True, type=_truth, metavar="BOOL", help=text)


def _truth(word: str) -> bool:
    """A truth value as Go's flags have it."""
    known = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    if word.lower() not in known:
        raise argparse.ArgumentTypeError(f"{word!r} is neither true nor false")
    return known[word.lower()]


def controller(options: argparse.Namespace) -> int:
    from k8e.controller import main
    from k8e.controller.election import LeadershipLost

    logging.basicConfig(
        level=_LEVELS[options.log_level], format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if options.unknown:
        logging.getLogger(__name__).warning("unknown flags are ignored: %s", options.unknown)
    given: dict[str, Any] = {
        "kubeconfig": Path(options.kubeconfig) if options.kubeconfig else None,
        "extensions": options.extensions,
        "legacy": options.legacy,
        "leader_elect": options.leader_elect,
        "leader_election_namespace": options.leader_election_namespace,
        "leader_election_id": options.leader_election_id,
        "cluster_domain": options.cluster_domain,
        "metrics_address": options.metrics_bind_address,
        "probe_address": options.health_probe_bind_address,
        "trace_endpoint": options.trace_endpoint,
    }
    for name in _WORKERS:
        given[f"{name}_workers"] = getattr(options, f"{name}_concurrent_workers")
    if any(
        given[f"{name}_workers"] is not None and given[f"{name}_workers"] < 1 for name in _WORKERS
    ):
        raise errors.InvalidRequest("a number of workers is less than 1")
    wanted = main.Options(**{name: value for name, value in given.items() if value is not None})
    try:
        asyncio.run(main.run(wanted))
    except LeadershipLost as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
    return 0
