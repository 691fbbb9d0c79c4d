"""``k8e sandbox login|profiles`` and ``k8e gateway fingerprint``: trust between machines."""

from __future__ import annotations

import argparse
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from k8e import errors, settings
from k8e.cli import approvals, keyfiles, printing, sandbox
from k8e.client import credentials, endpoints, profiles, renewing
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
        if ca and issued.ca:  # told by a gateway that the one of before vouches for
            files[credentials.CA] = issued.ca.encode()
        files[renewing.FILE] = renewing.plan(issued.days, device)
        told |= {"device_name": device, "valid_days": issued.days}
    with renewing.only_one(folder, LOCK_SECONDS):  # what is renewed now is for the key of before
        client_login.store(folder, files)
    profile = profiles.Profile(name, endpoint.target, str(folder), device, key_file)
    profiles.save(Path(endpoints.profiles_file()), profile)
    printing.answer(told)
    return 0


def _where(options: argparse.Namespace, named: str) -> tuple[endpoints.Endpoint, profiles.Profile]:
    """The endpoint to log in to, and the profile of before if there is one."""
    file = profiles.load(Path(endpoints.profiles_file()))
    given = getattr(options, "endpoint", None) or os.environ.get("K8E_SANDBOX_ENDPOINT")
    known = file.profiles.get(named or ("" if given else file.current), profiles.Profile(""))
    text = given or known.endpoint
    found = endpoints.resolve(text or None, keyfiles.api_key(options), named or None)
    if not found.target:
        raise errors.InvalidRequest(
            "no gateway is named to log in to; this host's own needs no login",
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
    printing.answer({"current_profile": file.current, "file": str(file.path), "profiles": items})
    return 0


def use_profile(options: argparse.Namespace) -> int:
    name = "" if options.name == NOBODY else options.name
    profiles.use(Path(endpoints.profiles_file()), name)
    printing.answer({"current_profile": name, "ok": True})
    return 0


def fingerprint(options: argparse.Namespace) -> int:
    """Print what ``login --ca-fingerprint`` takes on another machine."""
    path = settings.load().data_dir / "tls" / credentials.CA
    try:
        found = client_login.fingerprint(path.read_text("ascii"))
    except (OSError, ValueError):
        raise errors.InvalidRequest(
            f"there is no CA yet: {path} cannot be read",
            hint="it is made when a gateway with a gRPC endpoint starts: k8e gateway --background",
        ) from None
    printing.answer({"ca_file": str(path), "fingerprint": found})
    return 0


# API keys.


def create_key(options: argparse.Namespace) -> int:
    roles: list[str] = options.role or []
    call = {"op": "create_api_key", "name": options.name, "ttl": options.ttl, "roles": roles}
    call |= {"max_sessions": options.max_sessions, "rate": options.rate}
    if "approver" in roles and _ask(options, {"op": "approver"})["configured"]:
        call["secret"] = approvals.secret(options, "the approver's secret: ")
    printing.answer(_ask(options, call))
    return 0


def list_keys(options: argparse.Namespace) -> int:
    printing.answer({"keys": _ask(options, {"op": "list_api_keys"})["keys"]})
    return 0


def rotate_key(options: argparse.Namespace) -> int:
    call = {"op": "rotate_api_key", "name": options.name, "ttl": options.ttl}
    keys = _ask(options, {"op": "list_api_keys"})["keys"]
    roles = [role for key in keys if key["name"] == options.name for role in key["roles"]]
    if "approver" in roles and _ask(options, {"op": "approver"})["configured"]:
        call["secret"] = approvals.secret(options, "the approver's secret: ")
    printing.answer(_ask(options, call))
    return 0


def delete_key(options: argparse.Namespace) -> int:
    printing.answer(_ask(options, {"op": "delete_api_key", "name": options.name}))
    return 0


def _ask(options: argparse.Namespace, call: dict[str, Any]) -> dict[str, Any]:
    from k8e.client import operations

    return sandbox.ask(options, operations.call(call))
