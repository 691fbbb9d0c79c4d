"""CustomResourceDefinitions of agent-sandbox: upstream's fields, defaults, rules and columns.

The schemas of pods, volume claims and network rules are Kubernetes' own, in ``core_schemas.json``.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from k8e.controller import resources
from k8e.controller.resources import Object

_SCHEMAS = Path(__file__).with_name("core_schemas.json")
_STRING: Object = {"type": "string"}
_MAP: Object = {"type": "object", "additionalProperties": {"type": "string"}}
_NAME: Object = {"type": "string", "minLength": 1, "maxLength": 253}
_TIME: Object = {"type": "string", "format": "date-time"}


@functools.cache
def _core() -> Object:
    return json.loads(_SCHEMAS.read_bytes())


def _of_core(name: str, *, described: bool = True) -> Object:
    found = copy.deepcopy(_core()[name])
    return found if described else _without_descriptions(found)


def _without_descriptions(schema: Any) -> Any:
    """A schema without prose; ``description`` may also be the name of a property, a schema."""
    if isinstance(schema, list):
        return [_without_descriptions(one) for one in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_descriptions(value)
        for key, value in schema.items()  # pyright: ignore[reportUnknownVariableType]
        if key != "description" or isinstance(value, dict)
    }


def _object(required: tuple[str, ...] = (), told: str = "", **properties: Object) -> Object:
    made: Object = {"type": "object", "properties": properties}
    if required:
        made["required"] = list(required)
    return _told(made, told)


def _told(schema: Object, text: str) -> Object:
    return {**schema, "description": text} if text else schema


def _words(default: str, *others: str, told: str) -> Object:
    return {"type": "string", "enum": [default, *others], "default": default, "description": told}


def _list(items: Object, told: str = "") -> Object:
    return _told({"type": "array", "x-kubernetes-list-type": "atomic", "items": items}, told)


def _metadata(*, named: bool = False) -> Object:
    made = _object(
        told="Labels and annotations; nothing else of metadata is used.",
        labels=_MAP,
        annotations=_MAP,
    )
    if named:
        made["properties"]["name"] = _STRING
    return made


def _volume_claims(*, described: bool) -> Object:
    return _list(
        _object(
            ("spec",),
            metadata=_metadata(named=True),
            spec=_of_core("volumeClaimSpec", described=described),
        ),
        "Volume claims that are made with the sandbox and deleted with it, each named "
        "TEMPLATE-SANDBOX; a pod's volume of the same name is replaced.",
    )


def _blueprint(*, described: bool = True) -> Object:
    return {
        "podTemplate": _object(
            ("spec",),
            "The pod of the sandbox.",
            metadata=_metadata(),
            spec=_of_core("podSpec", described=described),
        ),
        "volumeClaimTemplates": _volume_claims(described=described),
        "service": {
            "type": "boolean",
            "description": "Whether there is a headless Service of the sandbox's name. Not set: "
            "one that exists stays, and none is made.",
        },
    }


_CONDITIONS: Object = {
    "type": "array",
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
    "description": "What is known of the object's state.",
    "items": _object(
        ("lastTransitionTime", "message", "reason", "status", "type"),
        lastTransitionTime=_TIME,
        message={"type": "string", "maxLength": 32768},
        observedGeneration={"type": "integer", "format": "int64", "minimum": 0},
        reason={
            "type": "string",
            "minLength": 1,
            "maxLength": 1024,
            "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        },
        status={"type": "string", "enum": ["True", "False", "Unknown"]},
        type={"type": "string", "maxLength": 316},
    ),
}
_SHUTDOWN_TIME = _told(_TIME, "When it ends; not set: never.")
_IMMUTABLE: list[Object] = [
    {
        "rule": "has(self.volumeClaimTemplates) == has(oldSelf.volumeClaimTemplates) && "
        "(!has(self.volumeClaimTemplates) || self.volumeClaimTemplates == "
        "oldSelf.volumeClaimTemplates)",
        "message": "volumeClaimTemplates is immutable",
    }
]


def _sandbox_spec(*, legacy: bool) -> Object:
    mode: Object = {
        "operatingMode": _words(
            "Running",
            "Suspended",
            told="Whether the sandbox has a pod; suspended, it keeps its volumes and its Service.",
        )
    }
    replicas: Object = {"type": "integer", "format": "int32", "minimum": 0, "maximum": 1}
    if legacy:
        told = "1: the sandbox has a pod, 0: it is suspended."
        mode = {"replicas": {**replicas, "default": 1, "description": told}}
    else:
        told = "v1alpha1's word for operatingMode: 0 means Suspended. Do not set it."
        mode["replicas"] = {**replicas, "description": told}
    spec = _object(
        ("podTemplate",),
        "What the sandbox should be.",
        **_blueprint(described=not legacy),
        **mode,
        shutdownTime=_SHUTDOWN_TIME,
        shutdownPolicy=_words(
            "Retain",
            "Delete",
            told="Whether the Sandbox object goes at shutdownTime; pod and Service always do.",
        ),
    )
    return {**spec, "x-kubernetes-validations": _IMMUTABLE}


_SANDBOX_STATUS = _object(
    told="What the sandbox is.",
    conditions=_CONDITIONS,
    nodeName=_told(_STRING, "The node of its pod."),
    podIPs=_told({"type": "array", "items": _STRING}, "The addresses of its pod."),
    replicas={"type": "integer", "format": "int32"},
    selector=_told(_STRING, "Selects its pod."),
    service=_told(_STRING, "The name of its Service."),
    serviceFQDN=_told(_STRING, "The name of its Service in DNS."),
)


def _reference(told: str) -> Object:
    return _object(("name",), told, name=_NAME)


def _claim_spec() -> Object:
    variable = _object(
        ("name",),
        name={"type": "string", "minLength": 1},
        value=_STRING,
        containerName=_told(_STRING, "By default the first container."),
    )
    lifecycle = _object(
        told="When the claim ends; without it, never.",
        shutdownTime=_SHUTDOWN_TIME,
        ttlSecondsAfterFinished={
            "type": "integer",
            "format": "int32",
            "minimum": 0,
            "description": "How long after the end of its pod the claim ends.",
        },
        shutdownPolicy=_words(
            "Retain",
            "Delete",
            "DeleteForeground",
            told="What goes at the end: with Retain the sandbox, else the claim too.",
        ),
    )
    return _object(
        ("warmPoolRef",),
        "What is asked for.",
        warmPoolRef=_reference("The warm pool that gives the sandbox; in the same namespace."),
        lifecycle=lifecycle,
        additionalPodMetadata=_told(_metadata(), "Labels and annotations for the pod."),
        env=_list(variable, "Environment variables. They need a sandbox that is started anew."),
        volumeClaimTemplates=_volume_claims(described=False),
    )


_CLAIM_STATUS = _object(
    told="What was given.",
    conditions=_CONDITIONS,
    sandbox=_object(
        told="The sandbox of the claim.",
        name=_told(_STRING, "Its name."),
        podIPs=_told({"type": "array", "items": _STRING}, "The addresses of its pod."),
    ),
)


def _template_spec() -> Object:
    rules = _object(
        told="Rules for the pods; not set: ingress from the router, egress to public addresses.",
        ingress=_list(_of_core("ingressRule")),
        egress=_list(_of_core("egressRule")),
    )
    policies = ("Allowed", "Overrides")
    return _object(
        ("podTemplate",),
        "What sandboxes are made of.",
        **_blueprint(),
        networkPolicy=rules,
        networkPolicyManagement=_words(
            "Managed", "Unmanaged", told="Whether the controller keeps a NetworkPolicy."
        ),
        envVarsInjectionPolicy=_words(
            "Disallowed", *policies, told="Whether claims may add or replace variables."
        ),
        volumeClaimTemplatesPolicy=_words(
            "Disallowed", *policies, told="Whether claims may add or replace volume claims."
        ),
    )


def _pool_spec() -> Object:
    return _object(
        ("sandboxTemplateRef",),
        "What the pool should hold.",
        replicas={
            "type": "integer",
            "format": "int32",
            "minimum": 0,
            "default": 1,
            "description": "How many idle sandboxes it holds.",
        },
        sandboxTemplateRef=_reference("The template of its sandboxes; in the same namespace."),
        updateStrategy=_object(
            told="What becomes of idle sandboxes when the template changes.",
            type=_words(
                "OnReplenish",
                "Recreate",
                told="OnReplenish keeps them until they are claimed; Recreate replaces them.",
            ),
        ),
    )


_COUNT: Object = {"type": "integer", "format": "int32"}
_POOL_STATUS = _object(
    told="What the pool holds.",
    replicas=_told(_COUNT, "All its sandboxes."),
    readyReplicas=_told(_COUNT, "Those that are ready."),
    selector=_told(_STRING, "Selects them."),
    observedGeneration={"type": "integer", "format": "int64"},
)


# Definitions.


def _column(name: str, path: str, kind: str = "string") -> Object:
    return {"name": name, "type": kind, "jsonPath": path}


_READY = _column("Ready", '.status.conditions[?(@.type=="Ready")].status')
_REASON = _column("Reason", '.status.conditions[?(@.type=="Ready")].reason')
_AGE = _column("Age", ".metadata.creationTimestamp", "date")


def _version(name: str, told: str, spec: Object, status: Object | None, **more: Any) -> Object:
    schema = _object(
        told=told, apiVersion=_STRING, kind=_STRING, metadata={"type": "object"}, spec=spec
    )
    schema["required"] = ["spec"]
    made: Object = {"name": name, "served": True, "storage": True}
    if status is not None:
        schema["properties"]["status"] = status
        made["subresources"] = {"status": {}}
    made["schema"] = {"openAPIV3Schema": schema}
    subresources = {**made.pop("subresources", {}), **more.pop("subresources", {})}
    return {**made, **({"subresources": subresources} if subresources else {}), **more}


def _definition(kind: str, short: str, *versions: Object) -> Object:
    plural = resources.PLURALS[kind]
    group = resources.API_VERSIONS[kind].partition("/")[0]
    kind = resources.kind_of(kind)
    names: Object = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": kind.lower(),
        "shortNames": [short],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": names,
            "scope": "Namespaced",
            "conversion": {"strategy": "None"},
            "versions": list(versions),
        },
    }


def sandbox() -> Object:
    told = "One isolated environment: a pod with a stable name, its volumes and its Service."
    columns = [_READY, _REASON, _AGE]
    legacy = _version(
        "v1alpha1",
        told,
        _sandbox_spec(legacy=True),
        _without_descriptions(_SANDBOX_STATUS),
        storage=False,
        deprecated=True,
        deprecationWarning="agents.x-k8s.io/v1alpha1 Sandbox is deprecated; use v1beta1 "
        "(k8e manifests upgrade -f FILE)",
        additionalPrinterColumns=columns,
    )
    current = _version(
        resources.VERSION,
        told,
        _sandbox_spec(legacy=False),
        _SANDBOX_STATUS,
        additionalPrinterColumns=columns,
    )
    return _definition(resources.SANDBOX, "sandbox", current, legacy)


def claim() -> Object:
    columns = [_READY, _column("Sandbox", ".status.sandbox.name"), _REASON, _AGE]
    told = "A request for one sandbox of a warm pool."
    version = _version(
        resources.VERSION, told, _claim_spec(), _CLAIM_STATUS, additionalPrinterColumns=columns
    )
    return _definition(resources.CLAIM, "sandboxclaim", version)


def template() -> Object:
    told = "What sandboxes are made of, and what claims may change of it."
    version = _version(resources.VERSION, told, _template_spec(), None)
    return _definition(resources.TEMPLATE, "sandboxtemplate", version)


def warm_pool() -> Object:
    told = "Idle sandboxes of a template, ready for claims."
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        _column("Ready", ".status.readyReplicas", "integer"),
        _column("Desired", ".spec.replicas", "integer"),
        _AGE,
    ]
    version = _version(
        resources.VERSION,
        told,
        _pool_spec(),
        _POOL_STATUS,
        subresources={"scale": scale},
        additionalPrinterColumns=columns,
    )
    return _definition(resources.POOL, "swp", version)


def legacy() -> list[Object]:
    """The kinds of early write-ups, which the controller turns into today's where asked to."""
    spec = _template_spec()
    spec["properties"] |= {"template": _without_descriptions(spec["properties"]["podTemplate"])}
    del spec["required"]
    template = _without_descriptions(spec)
    claim = _without_descriptions(_claim_spec())
    claim["properties"] |= {
        "template": _told(_NAME, "The SandboxTemplate of the sandbox."),
        "sandboxTemplateRef": _reference("The same, as upstream's own v1alpha1 has it."),
        "warmpool": _told(_NAME, "A warm pool; by default one of the template."),
    }
    del claim["required"]
    pool = _without_descriptions(_pool_spec())
    pool["properties"] |= {
        "template": _told(_NAME, "The SandboxTemplate of its sandboxes."),
        "size": {"type": "integer", "format": "int32", "minimum": 0},
    }
    del pool["properties"]["replicas"]["default"]
    del pool["required"]
    return [
        _legacy(resources.LEGACY_TEMPLATE, "legacytemplate", template, None),
        _legacy(resources.LEGACY_CLAIM, "legacyclaim", claim, _CLAIM_STATUS),
        _legacy(resources.LEGACY_POOL, "legacyswp", pool, _POOL_STATUS),
    ]


def _legacy(kind: str, short: str, spec: Object, status: Object | None) -> Object:
    version = _version(
        "v1alpha1",
        "A kind of early write-ups, from which today's object of its name is made.",
        spec,
        _without_descriptions(status) if status is not None else None,
        deprecated=True,
        deprecationWarning=f"agents.x-k8s.io/v1alpha1 {resources.kind_of(kind)} is deprecated; "
        f"use {resources.EXTENSIONS_VERSION} (k8e manifests upgrade -f FILE)",
        additionalPrinterColumns=[_AGE],
    )
    return _definition(kind, short, version)


def core() -> list[Object]:
    """What the core needs: Sandbox."""
    return [sandbox()]


def extensions() -> list[Object]:
    """What the extensions need: templates, claims and warm pools."""
    return [claim(), template(), warm_pool()]
