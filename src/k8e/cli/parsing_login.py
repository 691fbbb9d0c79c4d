"""The commands about keys, logins and profiles, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
"""How the parser adds a command: group, name, text, example, handler, flags shared with others."""


def add_to_sandbox(command: Command, group: Any, common: argparse.ArgumentParser) -> None:
    _add_keys(command, group, common, "api-key", "k8e sandbox api-key")
    _add_login(command, group, common)
    _add_profiles(command, group)


def add_apikey(command: Command, commands: Any, common: argparse.ArgumentParser) -> None:
    """The commands for keys under K8E's newer name."""
    name = "sandbox-apikey"
    _add_keys(command, commands, common, name, f"k8e {name}")
    # Not offered by a TAB, nor listed: `k8e sand` shall go on to mean `k8e sandbox`.
    listed = commands._choices_actions
    listed[:] = [item for item in listed if item.dest != name]


def add_fingerprint(command: Command, group: Any) -> None:
    command(
        group,
        "fingerprint",
        "print the fingerprint of the gateway's CA, for k8e sandbox login on another machine",
        "k8e gateway fingerprint",
        "login.fingerprint",
    )


def _add_keys(
    command: Command, group: Any, common: argparse.ArgumentParser, name: str, full: str
) -> None:
    keys = command(
        group,
        name,
        "manage the API keys of callers from other machines",
        f"{full} create laptop",
        "login.list_keys",
        common,
    )
    below = keys.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=type(keys)
    )
    create = command(
        below,
        "create",
        "make a key and print it, once; only a hash of it is kept",
        f"{full} create laptop --ttl 90d\n         {full} create boss --role approver --ttl never",
        "login.create_key",
        common,
    )
    create.add_argument("name", metavar="NAME", help="what to call it: who or what will use it")
    _add_ttl(create)
    create.add_argument(
        "--role",
        action="append",
        choices=("agent", "approver", "admin"),
        help="what it may do: agent (default) uses sessions, approver decides on actions of all, "
        "admin manages the gateway; repeatable",
    )
    create.add_argument(
        "--max-sessions",
        type=int,
        default=0,
        metavar="N",
        help="how many sessions it may have at once; default: as many as the gateway takes",
    )
    create.add_argument(
        "--rate",
        type=float,
        default=0,
        metavar="N",
        help="how many calls it may make a second; default: K8E_CALL_RATE",
    )
    _add_secret_file(create)
    command(
        below,
        "list",
        "list the keys, without their secrets",
        f"{full} list",
        "login.list_keys",
        common,
    )
    rotate = command(
        below,
        "rotate",
        "replace a key's secret and print the new one, once; sessions stay, the old secret, its "
        "certificates and its open calls end at once",
        f"{full} rotate laptop --ttl 90d",
        "login.rotate_key",
        common,
    )
    rotate.add_argument("name", metavar="NAME")
    _add_ttl(rotate)
    _add_secret_file(rotate)
    delete = command(
        below,
        "delete",
        "delete a key: it, its certificates, its open calls, its sessions and its snapshots end "
        "at once",
        f"{full} delete laptop",
        "login.delete_key",
        common,
    )
    delete.add_argument("name", metavar="NAME")


def _add_ttl(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ttl",
        default="30d",
        metavar="TIME",
        help="how long it is good: 30d (default), 12h, never",
    )


def _add_secret_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--secret-file",
        metavar="PATH",
        help="the approver's secret, which an approver's key needs after `k8e approver init` "
        "[K8E_APPROVER_SECRET]",
    )


def _add_login(command: Command, group: Any, common: argparse.ArgumentParser) -> None:
    login = command(
        group,
        "login",
        "get a client certificate from a gateway elsewhere, or renew it, and make the gateway the "
        "current profile",
        "k8e sandbox login --endpoint gateway.example:50051 --apikey-file key.txt "
        "--ca-fingerprint sha256:…\n"
        "         k8e sandbox login --profile work",
        "login.login",
        common,
    )
    login.add_argument("--device-name", default="", metavar="NAME", help="a name for this machine")
    login.add_argument(
        "--ca-fingerprint",
        default="",
        metavar="SHA256",
        help="what k8e gateway fingerprint prints there; without it the CA must be known already "
        "(K8E_SANDBOX_CERT, the profile's ca.crt, the system)",
    )
    login.add_argument(
        "--key-only",
        action="store_true",
        help="keep the API key instead of a certificate; needs no further package",
    )


def _add_profiles(command: Command, group: Any) -> None:
    profiles = command(
        group,
        "profiles",
        "list the gateways that have a name, and choose the usual one",
        "k8e sandbox profiles\n         k8e sandbox profiles use work",
        "login.list_profiles",
    )
    below = profiles.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=type(profiles)
    )
    use = command(
        below,
        "use",
        "choose the gateway that commands use when they name none",
        "k8e sandbox profiles use work\n         k8e sandbox profiles use none",
        "login.use_profile",
    )
    use.add_argument("name", metavar="NAME", help="a profile, or none for this host's own gateway")
