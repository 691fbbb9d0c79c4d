"""``k8e service …``: start a server or an agent with the machine, or no longer."""

from __future__ import annotations

import argparse
import os

from k8e import errors
from k8e.cli import output
from k8e.cli.parser import Commands


def add_service(commands: Commands) -> None:
    group = commands.add(
        "service",
        "start k8e server or k8e agent with this machine",
        "k8e service install server --cni basic",
    )
    below = group.commands(required=True)
    install_parser = below.add(
        "install",
        "write the unit and start it; without systemd, start it in the background",
        "k8e service install agent --server https://10.0.0.1:6443",
        install,
    )
    install_parser.add_argument(
        "--no-start", action="store_true", help="write and enable the unit, but do not start it"
    )
    install_parser.add_argument(
        "role", choices=("server", "agent"), help="the role of this machine"
    )
    install_parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="flags of k8e server or k8e agent; variables K8E_* are kept too",
    )
    below.add(
        "remove",
        "end the services of this machine and remove their units; their data stays",
        "k8e service remove",
        remove,
    )


def install(options: argparse.Namespace) -> int:
    from k8e.distro.service import Service

    _need_root()
    service = Service(options.role, options.arguments, dict(os.environ))
    said = service.install(start=not options.no_start)
    output.answer({"detail": said, "name": service.name, "ok": True})
    return 0


def remove(_: argparse.Namespace) -> int:
    from k8e.distro.service import ROLES, Service

    _need_root()
    removed = [service.name for service in map(Service, ROLES) if service.remove()]
    output.answer({"ok": True, "removed": removed})
    return 0


def _need_root() -> None:
    if os.geteuid() != 0:
        raise errors.Denied(
            "only root can change the machine's services", hint="run this with sudo"
        )
