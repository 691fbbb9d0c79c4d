"""What a gateway elsewhere is checked against, and what we show it: files, found in one order.

| what | where |
|---|---|
| our certificate | K8E_SANDBOX_CERT with K8E_SANDBOX_KEY; else ``client.crt`` of the cert dir |
| the gateway's CA | K8E_SANDBOX_CA; K8E_SANDBOX_CERT without K8E_SANDBOX_KEY; ``ca.crt`` of the |
| | cert dir; for this machine its own gateway's; what K8E's places have, see |
| | :mod:`k8e.client.trust`; else what the system trusts |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from k8e import doors, errors, settings
from k8e.client import trust
from k8e.client.endpoints import Endpoint

CA, CERT, KEY, ENDPOINT, API_KEY = "ca.crt", "client.crt", "client.key", "endpoint", "api_key"


class Credentials(NamedTuple):
    """For TLS, in PEM; None for the system's own trust, or for no certificate of ours."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


def load(endpoint: Endpoint) -> Credentials:
    """Everything that is needed to talk to ``endpoint``."""
    environ = os.environ
    given, key = environ.get("K8E_SANDBOX_CERT"), environ.get("K8E_SANDBOX_KEY")
    ca = _read(environ.get("K8E_SANDBOX_CA"), "K8E_SANDBOX_CA must name the gateway's ca.crt")
    if given and key:
        hint = "K8E_SANDBOX_CERT and K8E_SANDBOX_KEY must name a client certificate and its key"
        pair = _read(given, hint), _read(key, hint)
    else:
        ca = ca or _read(given, "K8E_SANDBOX_CERT must name the gateway's ca.crt")
        pair = _pair(endpoint)
    ca = ca or _of_folder(endpoint, CA) or _found(endpoint)
    return Credentials(ca, *pair)


def is_of_folder(endpoint: Endpoint) -> bool:
    """Whether what we show is the certificate of a login, in the folder of the endpoint."""
    environ = os.environ
    elsewhere = environ.get("K8E_SANDBOX_CERT") and environ.get("K8E_SANDBOX_KEY")
    return not elsewhere and all(_pair(endpoint))


def _pair(endpoint: Endpoint) -> tuple[bytes | None, bytes | None]:
    """The certificate of a login; not beside an API key, which may be another's."""
    found = _of_folder(endpoint, CERT), _of_folder(endpoint, KEY)
    return found if all(found) and not endpoint.api_key else (None, None)


def _of_folder(endpoint: Endpoint, name: str) -> bytes | None:
    if not endpoint.cert_dir:
        return None
    try:
        return Path(endpoint.cert_dir, name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(f"{endpoint.cert_dir}/{name}", error, "log in again") from None


def _found(endpoint: Endpoint) -> bytes | None:
    """What nobody named: the CA of this machine's gateway, and that of K8E's places.

    Both: a user who has a gateway of their own may call the one of root, or K8E's.
    """
    own = _own() if is_this_machine(endpoint.target) else None
    host = endpoint.target.rpartition(":")[0].strip("[]")
    known = trust.find(host, _is_this_machine)
    return (own or b"") + (known or b"") or None


def _own() -> bytes | None:
    """The CA of this machine's gateway, for whoever dials this machine."""
    try:
        return (settings.load().data_dir / "tls" / CA).read_bytes()
    except (OSError, errors.K8eError):
        return None


def is_this_machine(target: str) -> bool:
    return _is_this_machine(target.rpartition(":")[0])


def _is_this_machine(host: str) -> bool:
    import socket

    return doors.is_loopback(host) or host == socket.gethostname()


def _read(path: str | None, hint: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error, hint) from None


def _unreadable(path: str, error: OSError, hint: str) -> errors.GatewayUnreachable:
    return errors.GatewayUnreachable(
        f"the certificate {path} cannot be read: {error.strerror}", hint=hint
    )
