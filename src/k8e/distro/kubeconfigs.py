"""Kubeconfigs: the address of the API and the credentials of a component or a person."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import yaml

from k8e.distro.layout import write_private


def by_files(server: str, *, authority: Path, certificate: Path, key: Path) -> dict[str, Any]:
    """A kubeconfig that names files, so that a renewed certificate is used without a restart."""
    user = {"client-certificate": str(certificate), "client-key": str(key)}
    return _config({"server": server, "certificate-authority": str(authority)}, user)


def by_content(server: str, *, authority: Path, certificate: Path, key: Path) -> dict[str, Any]:
    """A kubeconfig that can be copied to another machine."""
    user = {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)}
    return _config({"server": server, "certificate-authority-data": _base64(authority)}, user)


def _config(cluster: dict[str, str], user: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "default", "cluster": cluster}],
        "users": [{"name": "default", "user": user}],
        "contexts": [{"name": "default", "context": {"cluster": "default", "user": "default"}}],
        "current-context": "default",
    }


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def write(path: Path, config: dict[str, Any]) -> bool:
    """Write a kubeconfig that only root may read."""
    return write_private(path, yaml.safe_dump(config, sort_keys=False))
