"""Manifests of ``k8e router``: ``router.yaml``.

The router may read Sandbox objects, and change two annotations and one word of them: those that a
sandbox has which sleeps and wakes. Roles know whole objects alone, so a policy of admission holds
the rest; without it the right to patch sandboxes would be one to run any pod.
"""

from __future__ import annotations

from typing import Any

import yaml

from k8e.controller import additions, resources
from k8e.controller.deployment import IMAGE
from k8e.controller.resources import Object

PART = "router"
NAME, SERVICE, SECRET = "sandbox-router", "sandbox-router-svc", "sandbox-router-access"
_NAMESPACE = resources.SYSTEM_NAMESPACE
_LABELS = dict([resources.ROUTER_LABEL])
_ACCESS = "/etc/k8e-router"
_REPLICAS = 2


def render(image: str = IMAGE) -> str:
    return yaml.safe_dump_all(objects(image), sort_keys=False, width=100)


def objects(image: str = IMAGE) -> list[Object]:
    """What is applied to have the router, beside the Secret with its access file."""
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata()},
        *_rights(),
        *_policy(),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**_metadata(), "name": SERVICE},
            "spec": {
                "selector": _LABELS,
                "ports": [{"name": "http", "port": 8080, "targetPort": "http"}],
            },
        },
        _deployment(image),
    ]


def _metadata() -> Object:
    return {"name": NAME, "namespace": _NAMESPACE, "labels": _LABELS}


def _rights() -> list[Object]:
    group = "rbac.authorization.k8s.io"
    rule = {
        "apiGroups": [resources.CORE_GROUP],
        "resources": ["sandboxes"],
        "verbs": ["list", "watch", "patch"],
    }
    named = {"name": NAME, "labels": _LABELS}
    return [
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": named, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": named,
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": _NAMESPACE}],
        },
    ]


def _policy() -> list[Object]:
    """What the router's account may change of a Sandbox."""
    group = "admissionregistration.k8s.io"
    account = f"system:serviceaccount:{_NAMESPACE}:{NAME}"
    rules = {
        "the router may only resume a sandbox that was suspended for being idle": (
            "object.spec.?operatingMode == oldObject.spec.?operatingMode || "
            "(object.spec.?operatingMode == optional.of('Running') && oldObject.metadata"
            f".?annotations[?'{additions.SUSPENDED_BY}'] == optional.of('idle'))"
        ),
        "the router may change no other field of a sandbox": (
            "oldObject.spec.all(k, k == 'operatingMode' || "
            "(k in object.spec && object.spec[k] == oldObject.spec[k])) && "
            "object.spec.all(k, k == 'operatingMode' || k in oldObject.spec)"
        ),
        "the router may only mark the use of a sandbox in its annotations": _marks(),
        "the router may not change labels, owners and finalizers": (
            "object.metadata.?labels == oldObject.metadata.?labels && "
            "object.metadata.?ownerReferences == oldObject.metadata.?ownerReferences && "
            "object.metadata.?finalizers == oldObject.metadata.?finalizers"
        ),
    }
    spec: Object = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [resources.CORE_GROUP],
                    "apiVersions": ["*"],
                    "operations": ["CREATE", "UPDATE", "DELETE", "CONNECT"],
                    "resources": ["sandboxes", "sandboxes/*"],
                }
            ]
        },
        "matchConditions": [
            {"name": "by-the-router", "expression": f"request.userInfo.username == '{account}'"}
        ],
        "validations": [
            {"expression": "request.operation == 'UPDATE'", "message": "the router only patches"},
            {
                # In another version a field may be missing, and is lost by the write.
                "expression": f"request.resource.version == '{resources.VERSION}'",
                "message": f"the router only uses {resources.VERSION}",
            },
            *({"expression": rule, "message": text} for text, rule in rules.items()),
        ],
    }
    named = {"name": NAME, "labels": _LABELS}
    return [
        {
            "apiVersion": f"{group}/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": named,
            "spec": spec,
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": named,
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        },
    ]


def _marks() -> str:
    """When a sandbox was used may be set; who suspended it may only be taken away.

    Whoever could set that could wake what a person has suspended.
    """
    now, before = (f"{one}.metadata.?annotations.orValue({{}})" for one in ("object", "oldObject"))
    used, by = f"'{additions.LAST_ACTIVE}'", f"'{additions.SUSPENDED_BY}'"
    return (
        f"{now}.all(k, k == {used} || (k in {before} && {now}[k] == {before}[k])) && "
        f"{before}.all(k, k in [{used}, {by}] || k in {now})"
    )


def _probe(path: str) -> Object:
    return {"httpGet": {"path": path, "port": "probes"}, "periodSeconds": 10, "timeoutSeconds": 5}


def _deployment(image: str) -> Object:
    container: dict[str, Any] = {
        "name": NAME,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["k8e", "router"],
        "args": [f"--access={_ACCESS}/access.yaml"],
        "ports": [
            {"name": "http", "containerPort": 8080},
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
        "volumeMounts": [{"name": "access", "mountPath": _ACCESS, "readOnly": True}],
    }
    pod = {
        "serviceAccountName": NAME,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "access", "secret": {"secretName": SECRET, "defaultMode": 0o440}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(),
        "spec": {
            "replicas": _REPLICAS,
            "selector": {"matchLabels": _LABELS},
            "template": {"metadata": {"labels": _LABELS}, "spec": pod},
        },
    }
