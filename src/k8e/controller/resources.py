"""Names of agent-sandbox: groups, kinds, labels, annotations, and how objects refer to each other.

Upstream's names, which may not differ: clients, network policies and people select by them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

from k8e.kubernetes.api import entries, section

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name."""

CORE_GROUP, EXTENSIONS_GROUP = "agents.x-k8s.io", "extensions.agents.x-k8s.io"
VERSION = "v1beta1"
CORE_VERSION, EXTENSIONS_VERSION = f"{CORE_GROUP}/{VERSION}", f"{EXTENSIONS_GROUP}/{VERSION}"
SYSTEM_NAMESPACE = "agent-sandbox-system"
CONTROLLER = "agent-sandbox-controller"
ROUTER_LABEL = ("app", "sandbox-router")
CONFIG_MAP, CONFIG_LABELS = "agent-sandbox-config", "allowed-label-domains"

SANDBOX, CLAIM = "Sandbox", "SandboxClaim"
TEMPLATE, POOL = "SandboxTemplate", "SandboxWarmPool"
LEGACY_VERSION = f"{CORE_GROUP}/v1alpha1"
LEGACY_TEMPLATE, LEGACY_CLAIM = "LegacySandboxTemplate", "LegacySandboxClaim"
LEGACY_POOL = "LegacySandboxWarmPool"
LEGACY_KINDS = {LEGACY_TEMPLATE: TEMPLATE, LEGACY_CLAIM: CLAIM, LEGACY_POOL: POOL}
"""Kinds of early write-ups, in another group, by the names that they have here."""
API_VERSIONS = {
    LEGACY_TEMPLATE: LEGACY_VERSION,
    LEGACY_CLAIM: LEGACY_VERSION,
    LEGACY_POOL: LEGACY_VERSION,
    SANDBOX: CORE_VERSION,
    CLAIM: EXTENSIONS_VERSION,
    TEMPLATE: EXTENSIONS_VERSION,
    POOL: EXTENSIONS_VERSION,
    "Pod": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
PLURALS = {
    LEGACY_TEMPLATE: "sandboxtemplates",
    LEGACY_CLAIM: "sandboxclaims",
    LEGACY_POOL: "sandboxwarmpools",
    SANDBOX: "sandboxes",
    CLAIM: "sandboxclaims",
    TEMPLATE: "sandboxtemplates",
    POOL: "sandboxwarmpools",
    "Pod": "pods",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Service": "services",
    "NetworkPolicy": "networkpolicies",
}

# Labels.
NAME_HASH = f"{CORE_GROUP}/sandbox-name-hash"
POOL_HASH = f"{CORE_GROUP}/warm-pool-sandbox"
TEMPLATE_REF_HASH = f"{CORE_GROUP}/sandbox-template-ref-hash"
BLUEPRINT_HASH = f"{CORE_GROUP}/sandbox-template-hash"
POD_TEMPLATE_HASH = f"{CORE_GROUP}/sandbox-pod-template-hash"
LAUNCH_TYPE = f"{CORE_GROUP}/launch-type"
CREATED_BY = f"{CORE_GROUP}/created-by"
CLAIM_UID = f"{CORE_GROUP}/claim-uid"
ADOPTABLE = f"{CORE_GROUP}/adoptable"
WARM, COLD = "warm", "cold"
CREATORS = ("python-client", "go-client", "controller")

# Annotations.
ASSIGNED = f"{CORE_GROUP}/sandbox-name"
POD_NAME = f"{CORE_GROUP}/pod-name"
TEMPLATE_REF = f"{CORE_GROUP}/sandbox-template-ref"
PROPAGATED_LABELS = f"{CORE_GROUP}/propagated-labels"
PROPAGATED_ANNOTATIONS = f"{CORE_GROUP}/propagated-annotations"
CLIENT_REQUESTED = f"{CORE_GROUP}/client-first-requested-at"
WEBHOOK_OBSERVED = f"{CORE_GROUP}/webhook-first-observed-at"
CONTROLLER_OBSERVED = f"{CORE_GROUP}/controller-first-observed-at"
FIRST_READY = f"{CORE_GROUP}/claim-first-ready-at"
TRACE = "opentelemetry.io/trace-context"
EVICTABLE = "cluster-autoscaler.kubernetes.io/safe-to-evict"


def is_own_key(key: str) -> bool:
    """Whether a label or annotation is one that only the controller sets."""
    return key.startswith((f"{CORE_GROUP}/", f"{EXTENSIONS_GROUP}/"))


@functools.lru_cache(4096)
def name_hash(name: str) -> str:
    """FNV-1a with 32 bits, as eight hexadecimal digits: a name that fits in a label."""
    found = 0x811C9DC5
    for byte in name.encode():
        found = (found ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{found:08x}"


def content_hash(value: Any) -> str:
    """A label value that says whether two values are the same."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Parts of objects.


def key_of(item: Object) -> Key:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def uid_of(item: Object) -> str:
    return item["metadata"]["uid"]


def labels_of(item: Object) -> dict[str, str]:
    return section(item["metadata"], "labels")


def annotations_of(item: Object) -> dict[str, str]:
    return section(item["metadata"], "annotations")


def is_going(item: Object) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in item["metadata"]


def controller_of(item: Object) -> Object | None:
    """The owner reference of the controller of an object."""
    for owner in entries(item["metadata"], "ownerReferences"):
        if owner.get("controller"):
            return owner
    return None


def is_controlled_by(item: Object, owner: Object) -> bool:
    found = controller_of(item)
    return found is not None and found["uid"] == uid_of(owner)


def owner_uid(item: Object, kind: str) -> str:
    """The uid of the controller if it is of this kind, else empty."""
    found = controller_of(item)
    return found["uid"] if found is not None and found["kind"] == kind else ""


def kind_of(name: str) -> str:
    """What the API calls a kind that has a name of its own here."""
    return LEGACY_KINDS.get(name, name)


def owner_reference(owner: Object, kind: str) -> Object:
    metadata = owner["metadata"]
    return {
        "apiVersion": API_VERSIONS[kind],
        "kind": kind_of(kind),
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def collection(kind: str, namespace: str = "") -> str:
    """The path of all objects of a kind, in one namespace or in all."""
    version = API_VERSIONS[kind]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return (
        f"{base}/namespaces/{namespace}/{PLURALS[kind]}"
        if namespace
        else base + "/" + PLURALS[kind]
    )


def path_of(kind: str, key: Key) -> str:
    return f"{collection(kind, key[0])}/{key[1]}"


def condition_of(item: Object, kind: str) -> Object | None:
    """A condition of an object's status."""
    for condition in entries(section(item, "status"), "conditions"):
        if condition["type"] == kind:
            return condition
    return None


def is_true(item: Object, kind: str) -> bool:
    found = condition_of(item, kind)
    return found is not None and found["status"] == "True"


Now = Callable[[], float]
"""A clock: seconds since the epoch."""
