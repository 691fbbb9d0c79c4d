"""What a SandboxTemplate makes: sandboxes of pools and claims, and a network policy. Pure."""

from __future__ import annotations

import functools
import json
from typing import Any

from k8e.controller import additions, environment, policies, resources
from k8e.controller.resources import Object
from k8e.kubernetes.api import entries, section

DNS_SERVERS = ("8.8.8.8", "1.1.1.1")
"""Of sandboxes under the default policy, which keeps them from the cluster's own DNS."""
_PRIVATE = {
    "0.0.0.0/0": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"],
    "::/0": ["fc00::/7", "fe80::/10"],
}
MANAGED, UNMANAGED = "Managed", "Unmanaged"


def _has_default_policy(template: Object) -> bool:
    spec = template["spec"]
    managed = spec.get("networkPolicyManagement", MANAGED) == MANAGED
    return managed and spec.get("networkPolicy") is None


def pod_spec(template: Object) -> Object:
    """The pod spec of a template, with what is safe where the template says nothing."""
    spec: Object = dict(template["spec"]["podTemplate"]["spec"])
    spec.setdefault("automountServiceAccountToken", False)
    if _has_default_policy(template) and "dnsPolicy" not in spec:
        spec["dnsPolicy"] = "None"
        spec.setdefault("dnsConfig", {"nameservers": list(DNS_SERVERS)})
    return environment.with_file(spec) if environment.is_late(template) else spec


def _users(metadata: Object | None) -> Object:
    """Labels and annotations without those that only the controller sets."""
    made: Object = {}
    for part in ("labels", "annotations"):
        found = section(metadata or {}, part)
        if kept := {k: v for k, v in found.items() if not resources.is_own_key(k)}:
            made[part] = kept
    return made


def blueprint(template: Object) -> Object:
    """The part of a Sandbox's spec that its template decides."""
    spec = template["spec"]
    pod: Object = {"spec": pod_spec(template)}
    if metadata := _users(spec["podTemplate"].get("metadata")):
        pod["metadata"] = metadata
    made: Object = {"podTemplate": pod}
    if spec.get("volumeClaimTemplates"):
        made["volumeClaimTemplates"] = spec["volumeClaimTemplates"]
    if "service" in spec:
        made["service"] = spec["service"]
    return made


def blueprint_hash(template: Object) -> str:
    """Says whether two templates make the same sandboxes: metadata and policies do not count."""
    return _hash_of(json.dumps(_decisive(template), sort_keys=True))


def _decisive(template: Object) -> list[Any]:
    spec = template["spec"]
    decisive = [
        template["metadata"]["name"],
        spec["podTemplate"]["spec"],
        entries(spec, "volumeClaimTemplates"),
        spec.get("service"),
    ]
    return [*decisive, environment.LATE_ENV] if environment.is_late(template) else decisive


@functools.lru_cache(256)
def _hash_of(text: str) -> str:
    return resources.content_hash(text)


def is_fresh(sandbox: Object, template: Object) -> bool:
    """Whether a member of a pool is what its template makes today."""
    labels = resources.labels_of(sandbox)
    name = template["metadata"]["name"]
    if labels.get(resources.TEMPLATE_REF_HASH) != resources.name_hash(name):
        return False
    if labels.get(resources.BLUEPRINT_HASH) == blueprint_hash(template):
        return True
    return is_made_of(sandbox, template)  # another controller's hash says nothing


def is_made_of(sandbox: Object, template: Object) -> bool:
    """Whether a sandbox is what a template makes today, by what is in it and not by its labels."""
    wanted, has = blueprint(template), sandbox["spec"]
    parts = ("volumeClaimTemplates", "service")
    same = all((wanted.get(part) or None) == (has.get(part) or None) for part in parts)
    return same and _without_dns(wanted, template) == _without_dns(has, template)


def _without_dns(spec: Object, template: Object) -> Object:
    """A pod spec without what follows from the template's network policy, which may be edited."""
    found: Object = dict(spec["podTemplate"]["spec"])
    for name in ("dnsPolicy", "dnsConfig"):
        if name not in template["spec"]["podTemplate"]["spec"]:
            found.pop(name, None)
    return found


# Sandboxes.


def member(pool: Object, template: Object, name: str) -> Object:
    """A new sandbox of a warm pool."""
    pool_name, namespace = pool["metadata"]["name"], pool["metadata"]["namespace"]
    labels = {
        resources.POOL_HASH: resources.name_hash(pool_name),
        resources.TEMPLATE_REF_HASH: resources.name_hash(template["metadata"]["name"]),
        resources.BLUEPRINT_HASH: blueprint_hash(template),
        resources.POD_TEMPLATE_HASH: resources.content_hash(
            template["spec"]["podTemplate"]["spec"]
        ),
        resources.CREATED_BY: "controller",
    }
    metadata: Object = {
        "name": name,
        "generateName": f"{pool_name}-",
        "namespace": namespace,
        "labels": labels,
        "annotations": {
            resources.TEMPLATE_REF: template["metadata"]["name"],
            **additions.inherited(template),
        },
        "ownerReferences": [resources.owner_reference(pool, resources.POOL)],
    }
    return _sandbox(metadata, blueprint(template))


def _sandbox(metadata: Object, spec: Object) -> Object:
    return {
        "apiVersion": resources.CORE_VERSION,
        "kind": resources.SANDBOX,
        "metadata": metadata,
        "spec": spec,
    }


def cold_sandbox(claim: Object, template: Object) -> Object:
    """A new sandbox of a claim that no member of a pool serves; Rejected if it may not be."""
    spec, name = blueprint(template), template["metadata"]["name"]
    policy = template["spec"]
    pod = spec["podTemplate"]
    policies.check_against(claim, section(pod, "metadata"))
    pod["spec"] = policies.inject_env(
        pod["spec"], claim, policy.get("envVarsInjectionPolicy", "Disallowed")
    )
    volumes = policies.merge_volumes(
        entries(spec, "volumeClaimTemplates"),
        claim,
        policy.get("volumeClaimTemplatesPolicy", "Disallowed"),
    )
    if volumes:
        spec["volumeClaimTemplates"] = volumes
    metadata = _merged(section(pod, "metadata"), claim)
    if text := environment.text_of(claim, template):
        metadata["annotations"] = section(metadata, "annotations") | {environment.ENV: text}
    if metadata:
        pod["metadata"] = metadata
    labels = {
        resources.TEMPLATE_REF_HASH: resources.name_hash(name),
        resources.LAUNCH_TYPE: resources.COLD,
        resources.CLAIM_UID: resources.uid_of(claim),
        resources.CREATED_BY: policies.creator(resources.labels_of(claim)),
    }
    made: Object = {
        "name": claim["metadata"]["name"],
        "namespace": claim["metadata"]["namespace"],
        "labels": labels,
        "annotations": {
            resources.TEMPLATE_REF: name,
            **additions.inherited(template, claim),
            **_trace(claim),
        },
        "ownerReferences": [resources.owner_reference(claim, resources.CLAIM)],
    }
    return _sandbox(made, spec)


def _merged(metadata: Object, claim: Object) -> Object:
    wanted = section(claim["spec"], "additionalPodMetadata")
    made: Object = {}
    for part in ("labels", "annotations"):
        if found := {**section(metadata, part), **section(wanted, part)}:
            made[part] = found
    return made


def _trace(claim: Object) -> dict[str, str]:
    found = resources.annotations_of(claim).get(resources.TRACE)
    return {resources.TRACE: found} if found else {}


def check_late_env(claim: Object, template: Object) -> None:
    """Whether a template lets a claim have its variables; Rejected if not."""
    spec, policy = template["spec"], template["spec"].get("envVarsInjectionPolicy", "Disallowed")
    policies.inject_env(spec["podTemplate"]["spec"], claim, policy)


def adoption(claim: Object, sandbox: Object, now: float, *, env: str = "") -> Object:
    """The one patch by which a member of a pool becomes a claim's; Rejected if it may not.

    It names the version that it was decided on, so of two claims at most one gets it. ``env`` is
    the text of the file with the claim's variables.
    """
    template = section(sandbox["spec"]["podTemplate"], "metadata")
    policies.check_against(claim, template)
    metadata: Object = {
        "resourceVersion": sandbox["metadata"]["resourceVersion"],
        "ownerReferences": [resources.owner_reference(claim, resources.CLAIM)],
        "labels": {
            resources.POOL_HASH: None,
            resources.BLUEPRINT_HASH: None,
            resources.POD_TEMPLATE_HASH: None,
            resources.LAUNCH_TYPE: resources.WARM,
            resources.CLAIM_UID: resources.uid_of(claim),
            resources.CREATED_BY: policies.creator(resources.labels_of(claim)),
        },
        "annotations": {resources.POD_NAME: sandbox["metadata"]["name"], **_trace(claim)},
    }
    own = additions.inherited(sandbox, claim)
    metadata["annotations"] |= own
    if additions.IDLE_SECONDS in own:  # it was ready for long, in its pool
        metadata["annotations"] |= additions.activity(now)["metadata"]["annotations"]
    patch: Object = {"metadata": metadata}
    pod: Object = {}
    for part, values in section(claim["spec"], "additionalPodMetadata").items():
        if values:
            pod[part] = dict(values)
    if env:
        pod.setdefault("annotations", {})[environment.ENV] = env
    if resources.EVICTABLE in section(template, "annotations"):
        pod.setdefault("annotations", {}).setdefault(resources.EVICTABLE, None)
    if pod:
        patch["spec"] = {"podTemplate": {"metadata": pod}}
    return patch


# Network policies.


def network_policy(template: Object) -> Object | None:
    """The network policy of all sandboxes of a template; None where somebody else manages it."""
    spec, name = template["spec"], template["metadata"]["name"]
    if spec.get("networkPolicyManagement", MANAGED) != MANAGED:
        return None
    custom = spec.get("networkPolicy")
    rules = _default_rules() if custom is None else _custom_rules(custom)
    selector = {resources.TEMPLATE_REF_HASH: resources.name_hash(name)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"{name}-network-policy",
            "namespace": template["metadata"]["namespace"],
            "ownerReferences": [resources.owner_reference(template, resources.TEMPLATE)],
        },
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress", "Egress"],
            **rules,
        },
    }


def _custom_rules(custom: Object) -> Object:
    """A template's own rules; what it does not mention is denied."""
    return {part: custom[part] for part in ("ingress", "egress") if custom.get(part)}


def _default_rules() -> Object:
    namespace = {"kubernetes.io/metadata.name": resources.SYSTEM_NAMESPACE}
    router = {
        "podSelector": {"matchLabels": dict([resources.ROUTER_LABEL])},
        "namespaceSelector": {"matchLabels": namespace},
    }
    public = [{"ipBlock": {"cidr": cidr, "except": list(no)}} for cidr, no in _PRIVATE.items()]
    return {"ingress": [{"from": [router]}], "egress": [{"to": public}]}
