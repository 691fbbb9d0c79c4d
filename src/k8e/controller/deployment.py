"""Manifests of the controller, in upstream's two files: ``manifest.yaml`` and ``extensions.yaml``.

``extensions-legacy.yaml`` comes after them where manifests of early write-ups are to be served. All
are rendered from here; ``deploy/agent-sandbox`` has them as files.
"""

from __future__ import annotations

from typing import Any

import yaml

from k8e._version import __version__
from k8e.controller import definitions, resources
from k8e.controller.resources import Object

IMAGE = f"k8e.internal/k8e:{__version__}"
_NAME, _NAMESPACE = resources.CONTROLLER, resources.SYSTEM_NAMESPACE
_EXTENSIONS_NAME = f"{_NAME}-extensions"
_LEGACY_NAME = f"{_NAME}-legacy"
_LABELS = {"app": _NAME}
_READ = ["get", "list", "watch"]
PARTS = ("core", "extensions", "extensions-legacy")


def render(part: str, image: str = IMAGE) -> str:
    """One of :data:`PARTS` as YAML."""
    return yaml.safe_dump_all(objects(part, image), sort_keys=False, width=100)


def objects(part: str, image: str = IMAGE) -> list[Object]:
    """What is applied to serve Sandbox (``core``), and claims, templates and pools besides.

    ``extensions-legacy`` adds the kinds that early write-ups have in Sandbox's group.
    """
    if part == "core":
        return [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}},
            *definitions.core(),
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(_NAME)},
            *_roles(),
            _deployment(image, "--extensions=false"),
        ]
    if part == "extensions-legacy":
        return [
            *definitions.legacy(),
            _cluster_role(_LEGACY_NAME, _legacy_rules()),
            _cluster_binding(_LEGACY_NAME),
            _deployment(image, "--extensions=true", "--legacy=true"),
        ]
    return [
        *definitions.extensions(),
        _cluster_role(_EXTENSIONS_NAME, _extension_rules()),
        _cluster_binding(_EXTENSIONS_NAME),
        _deployment(image, "--extensions=true"),
    ]


def _metadata(name: str) -> Object:
    return {"name": name, "namespace": _NAMESPACE, "labels": _LABELS}


def _rule(groups: str, names: str, verbs: list[str]) -> Object:
    return {"apiGroups": [groups], "resources": names.split(), "verbs": verbs}


def _core_rules() -> list[Object]:
    core = resources.CORE_GROUP
    return [
        _rule(core, "sandboxes", [*_READ, "patch", "delete"]),
        _rule(core, "sandboxes/status", ["patch"]),
        # Where the cluster checks who may block the deletion of an owner.
        _rule(core, "sandboxes/finalizers", ["update"]),
        _rule("", "pods services", [*_READ, "create", "patch", "delete"]),
        _rule("", "persistentvolumeclaims", [*_READ, "create", "patch"]),
        _rule("", "events", ["create"]),
    ]


def _extension_rules() -> list[Object]:
    extensions = resources.EXTENSIONS_GROUP
    owners = "sandboxclaims/finalizers sandboxtemplates/finalizers sandboxwarmpools/finalizers"
    return [
        _rule(resources.CORE_GROUP, "sandboxes", ["create"]),
        _rule(extensions, "sandboxclaims", [*_READ, "patch", "delete"]),
        _rule(extensions, "sandboxtemplates", [*_READ, "patch"]),
        _rule(extensions, "sandboxwarmpools", _READ),
        _rule(extensions, "sandboxclaims/status sandboxwarmpools/status", ["patch"]),
        _rule(extensions, owners, ["update"]),
        _rule("networking.k8s.io", "networkpolicies", [*_READ, "create", "patch", "delete"]),
    ]


def _legacy_rules() -> list[Object]:
    core, extensions = resources.CORE_GROUP, resources.EXTENSIONS_GROUP
    kinds = "sandboxtemplates sandboxclaims sandboxwarmpools"
    owners = " ".join(f"{kind}/finalizers" for kind in kinds.split())
    return [
        _rule(core, kinds, _READ),
        _rule(core, "sandboxclaims/status sandboxwarmpools/status", ["patch"]),
        _rule(core, owners, ["update"]),
        _rule(extensions, kinds, ["create", "patch"]),
    ]


def _roles() -> list[Object]:
    rbac = "rbac.authorization.k8s.io"
    own = [
        _rule("coordination.k8s.io", "leases", ["get", "create", "update"]),
        {**_rule("", "configmaps", ["get"]), "resourceNames": [resources.CONFIG_MAP]},
    ]
    role = {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": _metadata(_NAME), "rules": own}
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(_NAME),
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": _NAME},
        "subjects": [_subject()],
    }
    return [_cluster_role(_NAME, _core_rules()), _cluster_binding(_NAME), role, binding]


def _subject() -> Object:
    return {"kind": "ServiceAccount", "name": _NAME, "namespace": _NAMESPACE}


def _cluster_role(name: str, rules: list[Object]) -> Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name, "labels": _LABELS},
        "rules": rules,
    }


def _cluster_binding(name: str) -> Object:
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name, "labels": _LABELS},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
        "subjects": [_subject()],
    }


def _probe(path: str) -> Object:
    return {"httpGet": {"path": path, "port": "probes"}, "periodSeconds": 10, "timeoutSeconds": 5}


def _deployment(image: str, *flags: str) -> Object:
    container: dict[str, Any] = {
        "name": _NAME,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["k8e", "controller"],
        "args": ["--leader-elect=true", *flags],
        "ports": [
            {"name": "metrics", "containerPort": 8080},
            {"name": "probes", "containerPort": 8081},
        ],
        "livenessProbe": _probe("/healthz"),
        "readinessProbe": _probe("/readyz"),
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"memory": "1Gi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    pod = {
        "serviceAccountName": _NAME,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(_NAME),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _LABELS},
            "template": {"metadata": {"labels": _LABELS}, "spec": pod},
        },
    }
