"""Certificates and keys of the SDK: files for one gateway, found in one order.

| what | where |
|---|---|
| our certificate | K8E_SANDBOX_CERT with K8E_SANDBOX_KEY; else ``client.crt`` of the cert dir |
| the gateway's CA | K8E_SANDBOX_CA; K8E_SANDBOX_CERT without K8E_SANDBOX_KEY; ``ca.crt`` of the |
| | cert dir; for this machine its own gateway's; what K8E's places have, see |
| | :mod:`k8e.client.credentials`; else what the system trusts |

| place | what |
|---|---|
| ``/var/lib/k8e/server/tls`` | ``sandbox-ca.crt``, ``serving-kube-apiserver.crt`` |
| ``/etc/k8e/tls/serving-kube-apiserver.crt`` | the same, elsewhere |
| ``$KUBECONFIG``, ``~/.kube/config`` | the CA of a cluster |
| ``/etc/k8e/k8e.yaml``, ``/var/lib/k8e/server/cred/admin.kubeconfig`` | the CA of K8E's own |

The files are for this machine. Of a kubeconfig, only the cluster counts whose server is the host
that is called: the CA of another cluster must not be trusted for this host.
"""

from __future__ import annotations

import base64
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from k8e import access, errors, settings
from k8e.client.endpoints import Endpoint

MAX_FILE = 1 << 20
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
FILES = (
    "/var/lib/k8e/server/tls/sandbox-ca.crt",
    "/var/lib/k8e/server/tls/serving-kube-apiserver.crt",
    "/etc/k8e/tls/serving-kube-apiserver.crt",
)
KUBECONFIGS = ("/etc/k8e/k8e.yaml", "/var/lib/k8e/server/cred/admin.kubeconfig")


def find_certificate(host: str, is_this_machine: Callable[[str], bool]) -> bytes | None:
    """The certificate to trust for ``host``; None if no place has one."""
    local = is_this_machine(host)
    for path in FILES if local else ():
        if found := _certificates(_read_certificate(Path(path))):
            return found
    for path in _kubeconfigs():
        for name, ca in _clusters(path):
            if (name == host or (local and is_this_machine(name))) and ca:
                return ca
    return None


def _kubeconfigs() -> list[Path]:
    named = [item for item in os.environ.get("KUBECONFIG", "").split(os.pathsep) if item]
    paths = [*named, "~/.kube/config", *KUBECONFIGS]
    return [Path(path).expanduser() for path in paths]


def _clusters(path: Path) -> Iterator[tuple[str, bytes]]:
    """The clusters of a kubeconfig: the host of each and its CA."""
    text = _read_certificate(path)
    if b"clusters" not in text:
        return
    import yaml

    try:
        for item in yaml.safe_load(text)["clusters"]:
            cluster = cast("dict[str, Any]", item["cluster"])
            host = urllib.parse.urlsplit(str(cluster["server"])).hostname or ""
            data = cluster.get("certificate-authority-data")
            if data:
                yield host, _certificates(base64.b64decode(data))
            elif cluster.get("certificate-authority"):
                file = path.parent / str(cluster["certificate-authority"])
                yield host, _certificates(_read_certificate(file))
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        return  # it is not a kubeconfig


def _certificates(text: bytes) -> bytes:
    """The certificates of a PEM file, whatever else is in it."""
    return b"".join(item + b"\n" for item in _CERTIFICATE.findall(text))


def _read_certificate(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE)
    except OSError:
        return b""


CA, CERT, KEY, ENDPOINT, API_KEY = "ca.crt", "client.crt", "client.key", "endpoint", "api_key"


class Credentials(NamedTuple):
    """Credentials for TLS, in PEM; None for the system's own trust, or no certificate of ours."""

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
    """Whether our certificate is that of a login, in the folder of the endpoint."""
    environ = os.environ
    elsewhere = environ.get("K8E_SANDBOX_CERT") and environ.get("K8E_SANDBOX_KEY")
    return not elsewhere and all(_pair(endpoint))


def _pair(endpoint: Endpoint) -> tuple[bytes | None, bytes | None]:
    """The certificate of a login; not beside an API key, which may belong to another principal."""
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
    """The CA without configuration: that of this machine's gateway, or from K8E's places.

    Both: a user who has a gateway of their own may call the one of root, or K8E's.
    """
    own = _own() if is_this_machine(endpoint.target) else None
    host = endpoint.target.rpartition(":")[0].strip("[]")
    known = find_certificate(host, _is_this_machine)
    return (own or b"") + (known or b"") or None


def _own() -> bytes | None:
    """The CA of this machine's gateway, for clients that connect to this machine."""
    try:
        return (settings.load().data_dir / "tls" / CA).read_bytes()
    except (OSError, errors.K8eError):
        return None


def is_this_machine(target: str) -> bool:
    return _is_this_machine(target.rpartition(":")[0])


def _is_this_machine(host: str) -> bool:
    import socket

    return access.is_loopback(host) or host == socket.gethostname()


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
