"""What the cluster is told of sandboxes: templates, pools, claims, policies. Pure.

A sandbox is a SandboxClaim. All that pods of one kind share stands in a SandboxTemplate whose name
is a hash of it, so that one that is in use is never changed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from k8e.guest.copy import EMPTY
from k8e.guest.pod import POD_PORT, POD_TOKEN, SILENCED
from k8e.kubernetes.api import Object, entries, section
from k8e.model import MIB, Limits
from k8e.runtimes import bundle
from k8e.runtimes.guest_package import PLACE
from k8e.runtimes.kubernetes.identity import AUDIENCE

AGENTS = "agents.x-k8s.io"
EXTENSIONS = f"extensions.{AGENTS}"
EXTENSIONS_VERSION = f"{EXTENSIONS}/v1beta1"
CLAIM_UID = f"{AGENTS}/claim-uid"
"""The label by which the controller says whose a pod is."""
AUTHORITY = "k8e.dev/authority"
"""The label that pods, claims and templates have of the gateways that made them."""
SANDBOX = "k8e.dev/sandbox"
"""The label by which policies select all pods with code in them; they are born with it."""
GATEWAY = {"app.kubernetes.io/name": "k8e-gateway"}
"""The labels of pods that may dial sandboxes."""
ACCOUNT = "k8e-sandbox"
CONTAINER = "sandbox"
GUEST_FOLDER = "/run/k8e/guest"
GUEST_FILE = "guest-pod.pyc"
GUEST_VOLUME = "/k8e"
POLICY = "k8e-sandboxes"
TOKEN_SECONDS = 600  # the least that an API server grants
GUEST_MEMORY = 64 * MIB
"""What the guest itself takes beyond its session's memory."""
_LIBRARIES = f"{PLACE}/so"
PYTHON = [
    *(f"{_LIBRARIES}/loader", "--inhibit-cache", "--library-path", _LIBRARIES),
    *(f"{PLACE}/bin/python3", "-X", "utf8", "-I", "-S", "-B"),
]
"""Starts the guest's own Python, in its image and in every pod."""


@dataclass(frozen=True)
class Recipe:
    """What the pods of one kind have in common."""

    namespace: str
    image: str
    guest_image: str
    runtime_class: str
    limits: Limits
    authority: str
    """The certificate by which its pods know gateways."""
    fingerprint: str
    """The short name of that authority."""


def _labels(fingerprint: str) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "k8e", AUTHORITY: fingerprint}


def selector(fingerprint: str) -> str:
    """What selects everything that the gateways of an authority have made."""
    return f"{AUTHORITY}={fingerprint}"


def name_of(recipe: Recipe) -> str:
    """The name of a template, and of its pool."""
    text = json.dumps([pod_spec(recipe), _labels(recipe.fingerprint)], sort_keys=True)
    return f"k8e-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


# Pods.


def _rights(capabilities: list[str]) -> Object:
    held: Object = {"drop": ["ALL"]}
    if capabilities:
        held["add"] = [name.removeprefix("CAP_") for name in capabilities]
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": held,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        # Of all containers: so the kubelet makes the token root's own, and nobody else's to read.
        "runAsUser": 0,
        "runAsGroup": 0,
    }


def _in_memory(name: str, size: int) -> Object:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}


def _folders(limits: Limits) -> list[tuple[str, str, int]]:
    """Name, path and size of the folders in memory; the cluster's runtime makes ``/dev/shm``."""
    return [
        (item.path.strip("/").replace("/", "-"), item.path, item.size)
        for item in bundle.memory_folders(limits)
        if not item.path.startswith("/dev")
    ]


def pod_spec(recipe: Recipe) -> Object:
    """A pod in which the guest is the first process, whatever its image is."""
    limits = recipe.limits
    token: Object = {"audience": AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": "token"}
    identity: Object = {"sources": [{"serviceAccountToken": token}], "defaultMode": 0o400}
    return {
        "runtimeClassName": recipe.runtime_class,
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "hostname": "sandbox",
        # Nothing answers there, so names fail at once and not after seconds.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [_copier(recipe)],
        "containers": [_container(recipe)],
        "volumes": [
            {"name": "guest", "emptyDir": {"sizeLimit": str(256 * MIB)}},
            {"name": "identity", "projected": identity},
            {"name": "workspace", "emptyDir": {"sizeLimit": str(limits.disk)}},
            *(_in_memory(name, size) for name, _, size in _folders(limits)),
        ],
    }


def _copier(recipe: Recipe) -> Object:
    return {
        "name": "guest",
        "image": recipe.guest_image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*PYTHON, f"{GUEST_FOLDER}/copy.py", "/run/k8e", GUEST_VOLUME],
        "securityContext": _rights([]),
        # All containers have both limits: a pod has none of what one of them has none.
        "resources": _resources(recipe.limits),
        "volumeMounts": [{"name": "guest", "mountPath": GUEST_VOLUME}],
    }


def _resources(limits: Limits) -> Object:
    return {
        # Sandboxes are idle most of the time; the limits are what holds them.
        "requests": {"cpu": "20m", "memory": str(GUEST_MEMORY)},
        "limits": {
            "cpu": f"{round(limits.cpus * 1000)}m",
            "memory": str(limits.memory + GUEST_MEMORY),
        },
    }


def _container(recipe: Recipe) -> Object:
    limits = recipe.limits
    own = {"fieldRef": {"fieldPath": "status.podIP"}}
    # In an image's root the guest's own libraries open no file of another libc's.
    fixed = dict(item.split("=", 1) for item in (*bundle.IMAGE_LOCALE, *bundle.GUEST_MALLOC))
    fixed |= {"K8E_LINK_AUTHORITY": recipe.authority, **SILENCED}

    def mount(name: str, path: str, **more: Any) -> Object:
        return {"name": name, "mountPath": path, **more}

    return {
        "name": CONTAINER,
        "image": recipe.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*PYTHON, f"{GUEST_FOLDER}/{GUEST_FILE}"],
        "workingDir": "/",
        "env": [
            {"name": "K8E_LINK_ADDRESS", "valueFrom": own},
            *({"name": name, "value": value} for name, value in sorted(fixed.items())),
        ],
        "ports": [{"name": "link", "containerPort": POD_PORT}],
        "securityContext": _rights(bundle.GUEST_CAPABILITIES),
        "resources": _resources(limits),
        "volumeMounts": [
            mount("guest", PLACE, subPath="python", readOnly=True),
            mount("guest", GUEST_FOLDER, subPath="guest", readOnly=True),
            # An image's own would bring libraries of it into the guest: its loader reads it.
            mount("guest", "/etc/ld.so.preload", subPath=EMPTY, readOnly=True),
            mount("identity", POD_TOKEN.rpartition("/")[0], readOnly=True),
            mount("workspace", "/workspace"),
            *(mount(name, path) for name, path, _ in _folders(limits)),
        ],
    }


# Objects of ours.


def template(recipe: Recipe) -> Object:
    labels = _labels(recipe.fingerprint)
    return {
        "apiVersion": EXTENSIONS_VERSION,
        "kind": "SandboxTemplate",
        "metadata": {
            "name": name_of(recipe),
            "namespace": recipe.namespace,
            "labels": labels,
        },
        "spec": {
            # Ours is there before the first pod, and selects all pods of ours.
            "networkPolicyManagement": "Unmanaged",
            "podTemplate": {
                "metadata": {"labels": {**labels, SANDBOX: "true"}},
                "spec": pod_spec(recipe),
            },
        },
    }


def pool(recipe: Recipe) -> Object:
    """A pool without members: the gateway keeps sandboxes ready itself, guests and all."""
    name = name_of(recipe)
    return {
        "apiVersion": EXTENSIONS_VERSION,
        "kind": "SandboxWarmPool",
        "metadata": {
            "name": name,
            "namespace": recipe.namespace,
            "labels": _labels(recipe.fingerprint),
        },
        "spec": {"replicas": 0, "sandboxTemplateRef": {"name": name}},
    }


def claim(recipe: Recipe, name: str) -> Object:
    return {
        "apiVersion": EXTENSIONS_VERSION,
        "kind": "SandboxClaim",
        "metadata": {
            "name": name,
            "namespace": recipe.namespace,
            "labels": _labels(recipe.fingerprint),
        },
        "spec": {"warmPoolRef": {"name": name_of(recipe)}},
    }


def foundation(namespace: str) -> list[Object]:
    """What is there before the first pod."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": ACCOUNT, "namespace": namespace},
            "automountServiceAccountToken": False,
        },
        network_policy(namespace),
    ]


def new_namespace(name: str) -> Object:
    """The namespace of sandboxes; pods that could do more than ours are refused there."""
    enforced = {"pod-security.kubernetes.io/enforce": "baseline"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": enforced}}


def network_policy(namespace: str) -> Object:
    """Nobody talks with a pod but gateways, and a pod talks with nobody."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY, "namespace": namespace},
        "spec": {
            "podSelector": {"matchLabels": {SANDBOX: "true"}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": dict(GATEWAY)}}],
                    "ports": [{"port": POD_PORT, "protocol": "TCP"}],
                }
            ],
        },
    }


# What the cluster says of a pod.


def address_of(pod: Object) -> str:
    """Where the guest of a pod listens; empty as long as it has not started."""
    started = any(
        "running" in section(item, "state") for item in entries(pod, "status", "containerStatuses")
    )
    return str(section(pod, "status").get("podIP") or "") if started else ""


def end_of(pod: Object) -> str:
    """Why a pod has ended, or is ending; empty for one that lives."""
    status = section(pod, "status")
    phase = status.get("phase")
    if "deletionTimestamp" not in pod["metadata"] and phase not in ("Succeeded", "Failed"):
        return ""
    for item in entries(status, "conditions"):
        if item.get("type") == "DisruptionTarget" and item.get("status") == "True":
            return f"the cluster ended its pod ({item.get('reason')}): {item.get('message')}"
    if status.get("reason"):
        return f"its pod ended ({status['reason']}): {status.get('message') or 'no reason given'}"
    for item in entries(status, "containerStatuses"):
        ended = section(item, "state", "terminated")
        if ended.get("reason") == "OOMKilled":
            return (
                "the sandbox ran out of memory (--memory and limits={'memory': …} give a new "
                "session more)"
            )
        if ended and "deletionTimestamp" not in pod["metadata"]:
            return f"the sandbox ended with exit code {ended.get('exitCode')}"
    return "its pod was deleted"


_HOPELESS = (
    "ErrImageNeverPull CreateContainerConfigError InvalidImageName RunContainerError "
    "CreateContainerError ErrImagePull ImagePullBackOff"
).split()


def fault_of(pod: Object) -> str:
    """Why a pod will not start without somebody's help; empty if it may."""
    waiting = (
        section(item, "state", "waiting")
        for part in ("initContainerStatuses", "containerStatuses")
        for item in entries(pod, "status", part)
    )
    for found in waiting:
        if found.get("reason") in _HOPELESS:
            return f"{found['reason']}: {found.get('message') or 'no reason given'}"
    for item in entries(pod, "status", "initContainerStatuses"):
        if section(item, "state", "terminated").get("exitCode"):
            return "the guest could not be copied into the pod"
    return ""


def progress_of(pod: Object) -> str:
    """What a pod that does not run yet waits for."""
    for item in entries(pod, "status", "conditions"):
        if item.get("type") == "PodScheduled" and item.get("status") == "False":
            return f"{item.get('reason')}: {item.get('message')}"
    return f"its pod is {section(pod, 'status').get('phase') or 'new'}"
