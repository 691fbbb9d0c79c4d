"""What a Sandbox should have: its pod, its volumes, its service. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from k8e.controller import resources
from k8e.controller.resources import Object
from k8e.kubernetes.api import entries, section

EVICTABLE_VALUE = "true"
_OWN_LABELS = (
    resources.POOL_HASH,
    resources.TEMPLATE_REF_HASH,
    resources.CLAIM_UID,
    resources.CREATED_BY,
)
"""Labels of a Sandbox that its pod carries too: policies and people select pods by them."""


def is_suspended(sandbox: Object) -> bool:
    """Whether a sandbox should have no pod; ``replicas`` is v1alpha1's word for the same."""
    spec = sandbox["spec"]
    return spec.get("operatingMode") == "Suspended" or spec.get("replicas") == 0


def pod_metadata(sandbox: Object) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations that the pod of a sandbox should have from us."""
    template = section(sandbox["spec"]["podTemplate"], "metadata")
    labels, annotations = _users(template.get("labels")), _users(template.get("annotations"))
    own: dict[str, str] = {resources.NAME_HASH: resources.name_hash(sandbox["metadata"]["name"])}
    owner = resources.controller_of(sandbox)
    if owner is not None and owner["kind"] in (resources.POOL, resources.CLAIM):
        # Whoever makes a Sandbox by hand does not choose whose network policy is in force.
        own |= {
            name: value
            for name, value in resources.labels_of(sandbox).items()
            if name in _OWN_LABELS
        }
        if owner["kind"] == resources.POOL:
            annotations.setdefault(resources.EVICTABLE, EVICTABLE_VALUE)
    told = {
        resources.PROPAGATED_LABELS: ",".join(sorted(labels)),
        resources.PROPAGATED_ANNOTATIONS: ",".join(sorted(annotations)),
    }
    return labels | own, annotations | {name: value for name, value in told.items() if value}


def _users(found: dict[str, str] | None) -> dict[str, str]:
    return {k: v for k, v in (found or {}).items() if not resources.is_own_key(k)}


def metadata_patch(sandbox: Object, pod: Object) -> Object:
    """What to change of a pod's metadata; empty if nothing.

    What was propagated once and is not in the template any more is removed, and nothing else.
    """
    labels, annotations = pod_metadata(sandbox)
    has_labels, has_annotations = resources.labels_of(pod), resources.annotations_of(pod)
    old = {
        part: set(filter(None, has_annotations.get(part, "").split(",")))
        for part in (resources.PROPAGATED_LABELS, resources.PROPAGATED_ANNOTATIONS)
    }
    patch: Object = {}
    for part, wanted, has, before in (
        ("labels", labels, has_labels, old[resources.PROPAGATED_LABELS] | set(_OWN_LABELS)),
        (
            "annotations",
            annotations,
            has_annotations,
            old[resources.PROPAGATED_ANNOTATIONS] | set(old),
        ),
    ):
        change: dict[str, str | None] = {k: v for k, v in wanted.items() if has.get(k) != v}
        change |= dict.fromkeys(k for k in before if k in has and k not in wanted)
        if change:
            patch[part] = change
    return {"metadata": patch} if patch else {}


def claim_name(template: Object, sandbox: Object) -> str:
    """The name of the volume claim of a template in a sandbox."""
    return f"{template['metadata']['name']}-{sandbox['metadata']['name']}"


def pod(sandbox: Object) -> Object:
    """The pod of a sandbox: its template, and the volumes that it claims."""
    spec: Object = dict(sandbox["spec"]["podTemplate"]["spec"])
    templates = entries(sandbox["spec"], "volumeClaimTemplates")
    if templates:
        claimed = {item["metadata"]["name"]: claim_name(item, sandbox) for item in templates}
        kept = [item for item in entries(spec, "volumes") if item["name"] not in claimed]
        spec["volumes"] = kept + [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for name, claim in claimed.items()
        ]
    labels, annotations = pod_metadata(sandbox)
    metadata = _metadata(sandbox, sandbox["metadata"]["name"], labels)
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _metadata(sandbox: Object, name: str, labels: dict[str, str]) -> Object:
    return {
        "name": name,
        "namespace": sandbox["metadata"]["namespace"],
        "labels": labels,
        "ownerReferences": [resources.owner_reference(sandbox, resources.SANDBOX)],
    }


def volume_claims(sandbox: Object) -> Iterator[Object]:
    """The volume claims of a sandbox, which stay as long as it does."""
    own = {resources.NAME_HASH: resources.name_hash(sandbox["metadata"]["name"])}
    for template in entries(sandbox["spec"], "volumeClaimTemplates"):
        given = template["metadata"]
        metadata = _metadata(
            sandbox, claim_name(template, sandbox), _users(given.get("labels")) | own
        )
        if annotations := _users(given.get("annotations")):
            metadata["annotations"] = annotations
        yield {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata,
            "spec": template["spec"],
        }


def service(sandbox: Object) -> Object:
    """The headless service that gives a sandbox a name in the cluster's DNS."""
    name = sandbox["metadata"]["name"]
    own = {resources.NAME_HASH: resources.name_hash(name)}
    spec: Object = {"clusterIP": "None", "selector": dict(own)}
    if ports := _ports(sandbox["spec"]["podTemplate"]["spec"]):
        spec["ports"] = ports
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(sandbox, name, own),
        "spec": spec,
    }


def _ports(spec: Object) -> list[Object]:
    containers: list[Object] = list(entries(spec, "containers"))
    containers += [
        item for item in entries(spec, "initContainers") if item.get("restartPolicy") == "Always"
    ]
    found: dict[tuple[int, str], Object] = {}
    names: set[str] = set()
    for container in containers:
        for port in entries(container, "ports"):
            number, protocol = int(port["containerPort"]), port.get("protocol") or "TCP"
            if (number, protocol) in found:
                continue
            name = port.get("name") or ""
            if not name or name in names:
                name = f"p-{number}-{protocol.lower()}"
            names.add(name)
            found[number, protocol] = {
                "name": name,
                "port": number,
                "protocol": protocol,
                "targetPort": number,
            }
    return list(found.values())


def service_patch(sandbox: Object, found: Object) -> Object:
    """What to change of a service that has drifted; empty if nothing."""
    wanted, has = service(sandbox)["spec"], section(found, "spec")
    patch: Object = {}
    if section(has, "selector") != wanted["selector"]:
        gone = dict.fromkeys(set(section(has, "selector")) - set(wanted["selector"]))
        patch["selector"] = wanted["selector"] | gone
    if _comparable(has.get("ports")) != _comparable(wanted.get("ports")):
        patch["ports"] = wanted.get("ports")
    return {"spec": patch} if patch else {}


def _comparable(ports: Any) -> list[tuple[Any, ...]]:
    names = ("name", "port", "protocol", "targetPort")
    return sorted(
        tuple(port.get(name) for name in names) for port in entries({"ports": ports}, "ports")
    )


def full_name(sandbox: Object, domain: str) -> str:
    """The name of a sandbox's service in DNS."""
    metadata = sandbox["metadata"]
    return f"{metadata['name']}.{metadata['namespace']}.svc.{domain}"
