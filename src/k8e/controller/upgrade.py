"""Old manifests of agent-sandbox in today's form. Pure: objects in, objects and notes out.

Upstream's own ``v1alpha1``, and the shapes of early write-ups that put all four kinds into
``agents.x-k8s.io/v1alpha1``.
"""

from __future__ import annotations

import copy
from typing import Any

from k8e.controller import resources
from k8e.controller.resources import Object
from k8e.kubernetes.api import section

_OLD = "v1alpha1"
_SHADOW = "shadow-pool-"


def upgrade(items: list[Object]) -> tuple[list[Object], list[str]]:
    """Objects in today's form, and what a person should know about the change."""
    made: list[Object] = []
    notes: list[str] = []
    pools = {_name(item) for item in items if item.get("kind") == resources.POOL}
    for item in items:
        group, _, version = str(item.get("apiVersion", "")).rpartition("/")
        known = group in (resources.CORE_GROUP, resources.EXTENSIONS_GROUP) and version == _OLD
        convert = _CONVERSIONS.get(str(item.get("kind"))) if known else None
        if convert is None:
            made.append(item)
            continue
        item = copy.deepcopy(item)
        item["apiVersion"] = resources.API_VERSIONS[item["kind"]]
        item.pop("status", None)
        item.setdefault("spec", {})
        for more in convert(item, notes):
            if more["kind"] == resources.POOL and _name(more) in pools and more is not item:
                continue
            if more["kind"] == resources.POOL:
                pools.add(_name(more))
            made.append(more)
    return made, notes


def is_shadow(pool: str) -> bool:
    """Whether a pool only stands for a template that claims name, without idle sandboxes."""
    return pool.startswith(_SHADOW)


def _name(item: Object) -> str:
    return str(section(item, "metadata").get("name", ""))


def _sandbox(item: Object, notes: list[str]) -> list[Object]:
    spec = item["spec"]
    if "replicas" in spec:
        suspended = spec.pop("replicas") == 0
        spec["operatingMode"] = "Suspended" if suspended else "Running"
        notes.append(
            f"Sandbox {_name(item)}: replicas became operatingMode: {spec['operatingMode']}"
        )
    _pod_template(item)
    return [item]


def _pod_template(item: Object) -> None:
    """Early write-ups have the pod in ``spec.template``."""
    spec = item["spec"]
    if "podTemplate" not in spec and isinstance(spec.get("template"), dict):
        spec["podTemplate"] = spec.pop("template")


def _template(item: Object, notes: list[str]) -> list[Object]:
    if "podTemplate" not in item["spec"]:
        notes.append(f"SandboxTemplate {_name(item)}: template became podTemplate")
    _pod_template(item)
    return [item]


def _pool(item: Object, notes: list[str]) -> list[Object]:
    spec = item["spec"]
    if "size" in spec:
        spec["replicas"] = spec.pop("size")
        notes.append(f"SandboxWarmPool {_name(item)}: size became replicas")
    if isinstance(spec.get("template"), str):
        spec["sandboxTemplateRef"] = {"name": spec.pop("template")}
        notes.append(f"SandboxWarmPool {_name(item)}: template became sandboxTemplateRef")
    return [item]


def _claim(item: Object, notes: list[str]) -> list[Object]:
    spec: dict[str, Any] = item["spec"]
    template = spec.pop("template", None) or section(spec, "sandboxTemplateRef").get("name")
    spec.pop("sandboxTemplateRef", None)
    wanted = spec.pop("warmpool", "default")
    if "warmPoolRef" in spec or template is None:
        return [item]
    if wanted not in ("none", "default", ""):
        spec["warmPoolRef"] = {"name": wanted}
        notes.append(f"SandboxClaim {_name(item)}: warmpool became warmPoolRef: {wanted}")
        return [item]
    name = f"{_SHADOW}{template}"
    spec["warmPoolRef"] = {"name": name}
    notes.append(
        f"SandboxClaim {_name(item)}: claims name a pool, not a template; the pool {name} was "
        "added, which holds no idle sandboxes (raise its replicas for warm ones)"
    )
    metadata: Object = {"name": name}
    if namespace := section(item, "metadata").get("namespace"):
        metadata["namespace"] = namespace
    pool: Object = {
        "apiVersion": resources.EXTENSIONS_VERSION,
        "kind": resources.POOL,
        "metadata": metadata,
        "spec": {"replicas": 0, "sandboxTemplateRef": {"name": template}},
    }
    return [pool, item]


_CONVERSIONS = {
    resources.SANDBOX: _sandbox,
    resources.TEMPLATE: _template,
    resources.POOL: _pool,
    resources.CLAIM: _claim,
}
