"""``k8e sandbox login|profiles``, keys and fingerprints: trust between machines."""

from __future__ import annotations

import argparse
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.cli import approvals, output, sessions
from k8e.cli.parser import Commands
from k8e.client import credentials, endpoints, profiles, renewal
from k8e.client import login as client_login

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,60}[A-Za-z0-9])?")
LOCK_SECONDS = 10.0
NOBODY = "none"
"""What ``profiles use`` takes for this host's own gateway."""


def login(options: argparse.Namespace) -> int:
    """Trust a gateway, get a certificate for our key, and note both in a profile."""
    named = getattr(options, "profile", None) or os.environ.get("K8E_SANDBOX_PROFILE") or ""
    endpoint, known = _where(options, named)
    name = named or known.name or _profile_name(endpoint.target)
    if not _NAME.fullmatch(name):
        raise errors.InvalidRequest(
            f"{name[:80]!r} cannot be the name of a profile",
            hint="use letters, digits, and inner hyphens, dots and underscores",
        )
    folder = Path(endpoint.cert_dir or Path.home() / ".k8e/sandbox/profiles" / name)
    endpoint = replace(endpoint, cert_dir=str(folder))
    ca = client_login.trust(endpoint, options.ca_fingerprint)
    device = options.device_name or os.environ.get("K8E_SANDBOX_DEVICE_NAME") or known.device_name
    device = device or socket.gethostname()
    told: dict[str, Any] = {"cert_dir": str(folder), "endpoint": endpoint.target, "profile": name}
    files = {credentials.CA: ca} if ca else {}
    files[credentials.ENDPOINT] = f"{endpoint.target}\n".encode()
    key_file = ""
    if options.key_only:
        key_file = str(folder / credentials.API_KEY)
        files[credentials.API_KEY] = _checked_key(endpoint, ca)
    else:
        pair = client_login.new_pair(device)
        issued = client_login.login(endpoint, pair.csr, device, ca)
        if not pair.fits(issued.certificate):
            raise errors.Denied(f"{endpoint.target} answered with no certificate for our key")
        files |= {credentials.KEY: pair.key, credentials.CERT: issued.certificate.encode()}
        if ca and issued.ca:  # from a gateway for which the old CA vouches
            files[credentials.CA] = issued.ca.encode()
        files[renewal.FILE] = renewal.plan(issued.days, device)
        told |= {"device_name": device, "valid_days": issued.days}
    with renewal.only_one(folder, LOCK_SECONDS):  # a renewal under way would be for the old key
        client_login.store(folder, files)
    profile = profiles.Profile(name, endpoint.target, str(folder), device, key_file)
    profiles.save(Path(endpoints.profiles_file()), profile)
    output.answer(told)
    return 0


def _where(options: argparse.Namespace, named: str) -> tuple[endpoints.Endpoint, profiles.Profile]:
    """The endpoint to log in to, and its existing profile if there is one."""
    file = profiles.load(Path(endpoints.profiles_file()))
    given = getattr(options, "endpoint", None) or os.environ.get("K8E_SANDBOX_ENDPOINT")
    known = file.profiles.get(named or ("" if given else file.current), profiles.Profile(""))
    text = given or known.endpoint
    found = endpoints.resolve(text or None, sessions.api_key(options), named or None)
    if not found.target:
        raise errors.InvalidRequest(
            "no gateway is named to log in to; this host's own gateway needs no login",
            hint="k8e sandbox login --endpoint gateway.example:50051 --apikey-file key.txt",
        )
    same = endpoints.parse(known.endpoint).target == found.target if known.endpoint else False
    return replace(found, cert_dir=found.cert_dir or (known.cert_dir if same else "")), known


def _profile_name(target: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", target.rpartition(":")[0]).strip("-.") or "default"


def _checked_key(endpoint: endpoints.Endpoint, ca: bytes | None) -> bytes:
    if not endpoint.api_key:
        raise errors.InvalidRequest(
            "there is no API key to keep", hint="pass it with --apikey-file or K8E_SANDBOX_APIKEY"
        )
    client_login.check(endpoint, ca)
    return f"{endpoint.api_key}\n".encode()


def list_profiles(options: argparse.Namespace) -> int:
    file = profiles.load(Path(endpoints.profiles_file()))
    shown = ("cert_dir", "device_name", "endpoint", "name")
    items = [
        {name: getattr(item, name) for name in shown} for _, item in sorted(file.profiles.items())
    ]
    output.answer({"current_profile": file.current, "file": str(file.path), "profiles": items})
    return 0


def use_profile(options: argparse.Namespace) -> int:
    name = "" if options.name == NOBODY else options.name
    profiles.use(Path(endpoints.profiles_file()), name)
    output.answer({"current_profile": name, "ok": True})
    return 0


# API keys.


def create_key(options: argparse.Namespace) -> int:
    roles: list[str] = options.role or []
    call = {"op": "create_api_key", "name": options.name, "ttl": options.ttl, "roles": roles}
    call |= {"max_sessions": options.max_sessions, "rate": options.rate}
    if "approver" in roles and _ask(options, {"op": "approver"})["configured"]:
        call["secret"] = approvals.secret(options, "the approver's secret: ")
    output.answer(_ask(options, call))
    return 0


def list_keys(options: argparse.Namespace) -> int:
    output.answer({"keys": _ask(options, {"op": "list_api_keys"})["keys"]})
    return 0


def rotate_key(options: argparse.Namespace) -> int:
    call = {"op": "rotate_api_key", "name": options.name, "ttl": options.ttl}
    keys = _ask(options, {"op": "list_api_keys"})["keys"]
    roles = [role for key in keys if key["name"] == options.name for role in key["roles"]]
    if "approver" in roles and _ask(options, {"op": "approver"})["configured"]:
        call["secret"] = approvals.secret(options, "the approver's secret: ")
    output.answer(_ask(options, call))
    return 0


def delete_key(options: argparse.Namespace) -> int:
    output.answer(_ask(options, {"op": "delete_api_key", "name": options.name}))
    return 0


def _ask(options: argparse.Namespace, call: dict[str, Any]) -> dict[str, Any]:
    from k8e.client import operations

    return sessions.ask(options, operations.call(call))


def add_api_key(commands: Commands) -> None:
    _add_keys(commands, "api-key", "k8e sandbox api-key")


def add_sandbox_apikey(commands: Commands) -> None:
    """The commands for keys under K8E's newer name.

    Not listed, so that a shell goes on completing `k8e sand` to `k8e sandbox`.
    """
    _add_keys(commands, "sandbox-apikey", "k8e sandbox-apikey", listed=False)


def _add_keys(commands: Commands, name: str, full: str, *, listed: bool = True) -> None:
    keys = commands.add(
        name,
        "manage the API keys of callers from other machines",
        f"{full} create laptop",
        remote=True,
        listed=listed,
    )
    below = keys.commands(required=True)
    create = below.add(
        "create",
        "make a key and print it, once; only a hash of it is kept",
        f"{full} create laptop --ttl 90d\n         {full} create boss --role approver --ttl never",
        create_key,
        remote=True,
    )
    create.add_argument("name", metavar="NAME", help="its name: who or what will use it")
    _add_ttl(create)
    create.add_argument(
        "--role",
        action="append",
        choices=("agent", "approver", "admin"),
        help="its role: agent (default) uses sessions, approver decides on everyone's actions, "
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
    below.add(
        "list",
        "list the keys, without their secrets",
        f"{full} list",
        list_keys,
        remote=True,
    )
    rotate = below.add(
        "rotate",
        "replace a key's secret and print the new one, once; sessions stay, the old secret, its "
        "certificates and its open calls end at once",
        f"{full} rotate laptop --ttl 90d",
        rotate_key,
        remote=True,
    )
    rotate.add_argument("name", metavar="NAME")
    _add_ttl(rotate)
    _add_secret_file(rotate)
    delete = below.add(
        "delete",
        "delete a key: it, its certificates, its open calls, its sessions and its snapshots end "
        "at once",
        f"{full} delete laptop",
        delete_key,
        remote=True,
        answers_ok=True,
    )
    delete.add_argument("name", metavar="NAME")


def _add_ttl(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ttl",
        default="30d",
        metavar="TIME",
        help="how long it is valid: 30d (default), 12h, never",
    )


def _add_secret_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--secret-file",
        metavar="PATH",
        help="the approver's secret, which an approver's key needs after `k8e approver init` "
        "[K8E_APPROVER_SECRET]",
    )


def add_login(commands: Commands) -> None:
    parser = commands.add(
        "login",
        "get a client certificate from a gateway elsewhere, or renew it, and make the gateway the "
        "current profile",
        "k8e sandbox login --endpoint gateway.example:50051 --apikey-file key.txt "
        "--ca-fingerprint sha256:…\n"
        "         k8e sandbox login --profile work",
        login,
        remote=True,
    )
    parser.add_argument("--device-name", default="", metavar="NAME", help="a name for this machine")
    parser.add_argument(
        "--ca-fingerprint",
        default="",
        metavar="SHA256",
        help="what k8e gateway fingerprint prints there; without it the CA must be known already "
        "(K8E_SANDBOX_CERT, the profile's ca.crt, the system)",
    )
    parser.add_argument(
        "--key-only",
        action="store_true",
        help="keep the API key instead of a certificate; needs no further package",
    )


def add_profiles(commands: Commands) -> None:
    parser = commands.add(
        "profiles",
        "list the named gateways, and choose the default one",
        "k8e sandbox profiles\n         k8e sandbox profiles use work",
        list_profiles,
    )
    use = parser.commands().add(
        "use",
        "choose the gateway that commands use when they name none",
        "k8e sandbox profiles use work\n         k8e sandbox profiles use none",
        use_profile,
        answers_ok=True,
    )
    use.add_argument("name", metavar="NAME", help="a profile, or none for this host's own gateway")
