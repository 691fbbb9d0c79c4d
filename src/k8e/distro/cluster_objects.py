"""Objects that a cluster has before its first node joins: rights, a token, settings for nodes."""

from __future__ import annotations

import json
from typing import Any

from k8e import _version
from k8e.distro import approval, tokens
from k8e.distro.configuration import Configuration

CLUSTER_MAP = "k8e-cluster"
CLUSTER_PATH = f"/api/v1/namespaces/kube-system/configmaps/{CLUSTER_MAP}"
_RBAC = "rbac.authorization.k8s.io"
_NODES = "system:nodes"

Object = dict[str, Any]


def first(config: Configuration, token: str) -> list[Object]:
    """The objects that joining needs."""
    return [
        tokens.secret(token, description=tokens.NODE_TOKEN),
        cluster_map(config),
        _binding("k8e:bootstrap", "system:node-bootstrapper", [_group(tokens.GROUP)]),
        # A node renews its own client certificate; that is approved by Kubernetes itself.
        _binding(
            "k8e:renewal",
            "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient",
            [_group(_NODES)],
        ),
        {
            **_named("Role", CLUSTER_MAP, "kube-system"),
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["configmaps"],
                    "resourceNames": [CLUSTER_MAP],
                    "verbs": ["get"],
                }
            ],
        },
        {
            **_named("RoleBinding", CLUSTER_MAP, "kube-system"),
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": CLUSTER_MAP},
            "subjects": [_group(tokens.GROUP), _group(_NODES)],
        },
        _binding(
            "k8e:kube-proxy",
            "system:node-proxier",
            [_group(approval.component_group("kube-proxy"))],
        ),
    ]


def cluster_map(config: Configuration) -> Object:
    """The facts that a node must know about its cluster; none of them is secret."""
    told = {
        "version": _version.__version__,
        "cni": config.cni,
        "cluster_cidr": config.cluster_cidr,
        "service_cidr": config.service_cidr,
        "cluster_dns": config.cluster_dns,
        "cluster_domain": config.cluster_domain,
        "client_ca": (config.layout.tls / "client-ca.crt").read_text("ascii"),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CLUSTER_MAP, "namespace": "kube-system"},
        "data": {"cluster.json": json.dumps(told)},
    }


def _named(kind: str, name: str, namespace: str = "") -> Object:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": metadata}


def _group(name: str) -> Object:
    return {"apiGroup": _RBAC, "kind": "Group", "name": name}


def _binding(name: str, role: str, subjects: list[Object]) -> Object:
    return {
        **_named("ClusterRoleBinding", name),
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role},
        "subjects": subjects,
    }
