"""Certificates of gateways where K8E keeps them, in the order in which its clients look.

| place | what |
|---|---|
| ``/var/lib/k8e/server/tls`` | ``sandbox-ca.crt``, ``serving-kube-apiserver.crt`` |
| ``/etc/k8e/tls/serving-kube-apiserver.crt`` | the same, elsewhere |
| ``$KUBECONFIG``, ``~/.kube/config`` | the CA of a cluster |
| ``/etc/k8e/k8e.yaml``, ``/var/lib/k8e/server/cred/admin.kubeconfig`` | the CA of K8E's own |

The files are for this machine. Of a kubeconfig, what counts is the cluster whose server is the host
that is called: another one's CA would be trusted for what it has nothing to do with.
"""

from __future__ import annotations

import base64
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

MAX_FILE = 1 << 20
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
FILES = (
    "/var/lib/k8e/server/tls/sandbox-ca.crt",
    "/var/lib/k8e/server/tls/serving-kube-apiserver.crt",
    "/etc/k8e/tls/serving-kube-apiserver.crt",
)
KUBECONFIGS = ("/etc/k8e/k8e.yaml", "/var/lib/k8e/server/cred/admin.kubeconfig")


def find(host: str, is_this_machine: Callable[[str], bool]) -> bytes | None:
    """The certificate to trust for ``host``; None if no place has one."""
    local = is_this_machine(host)
    for path in FILES if local else ():
        if found := _certificates(_read(Path(path))):
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
    text = _read(path)
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
                yield host, _certificates(_read(file))
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        return  # it is no kubeconfig


def _certificates(text: bytes) -> bytes:
    """The certificates of a PEM file, whatever else is in it."""
    return b"".join(item + b"\n" for item in _CERTIFICATE.findall(text))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE)
    except OSError:
        return b""
