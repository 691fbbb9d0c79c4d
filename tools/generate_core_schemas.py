"""Structural schemas of pods, volume claims and network rules, for the CRDs of agent-sandbox.

Made from the OpenAPI document of a Kubernetes release (``api/openapi-spec/v3`` of its source, or
``kubectl get --raw /openapi/v3/api/v1``):

    python tools/generate_core_schemas.py API_V1_JSON NETWORKING_V1_JSON
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
OUTPUT = Path(__file__).parent.parent / "src/k8e/controller/core_schemas.json"
_ROOTS = {
    "podSpec": "io.k8s.api.core.v1.PodSpec",
    "volumeClaimSpec": "io.k8s.api.core.v1.PersistentVolumeClaimSpec",
    "ingressRule": "io.k8s.api.networking.v1.NetworkPolicyIngressRule",
    "egressRule": "io.k8s.api.networking.v1.NetworkPolicyEgressRule",
}
_QUANTITY = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|"
    r"([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
_KEPT = (
    *("type", "format", "enum", "required", "nullable", "minimum", "maximum", "pattern"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"),
)
_LONGEST = 110
_EMBEDDED: Schema = {
    "type": "object",
    "properties": {
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def main(*paths: str) -> None:
    """Write the schemas."""
    known: dict[str, Schema] = {}
    for path in paths:
        known |= json.loads(Path(path).read_bytes())["components"]["schemas"]
    made = {name: structural(known, {"$ref": f"#/{root}"}) for name, root in _ROOTS.items()}
    text = json.dumps(made, indent=1, sort_keys=True) + "\n"
    OUTPUT.write_text(re.sub(r"\n +(?=[\]\"])", lambda found: found[0], text), "utf-8")


def structural(known: dict[str, Schema], schema: Schema) -> Schema:
    """A schema with no references, as a CustomResourceDefinition wants it."""
    described = schema.get("description")
    if "allOf" in schema:
        schema = {**schema, **schema["allOf"][0]}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if (special := _special(name)) is not None:
            return _described(special, described)
        made = structural(known, known[name])
        default = schema.get("default")
        if default not in (None, {}):
            made["default"] = default
        return _described(made, described)
    made: Schema = {key: schema[key] for key in _KEPT if key in schema}
    if schema.get("default") not in (None, {}, ""):
        made["default"] = schema["default"]
    if "properties" in schema:
        made["properties"] = {
            key: structural(known, one) for key, one in schema["properties"].items()
        }
    if "items" in schema:
        made["items"] = structural(known, schema["items"])
    if "additionalProperties" in schema:
        made["additionalProperties"] = structural(known, schema["additionalProperties"])
    _give_keys_defaults(made)
    return _described(made, described)


def _give_keys_defaults(made: Schema) -> None:
    """Keys of a list of maps must always be there: by default, or because they are required."""
    for key in made.get("x-kubernetes-list-map-keys", ()):
        item = made["items"]
        if key not in item.get("required", ()) and "default" not in item["properties"][key]:
            if key == "protocol":
                item["properties"][key]["default"] = "TCP"
            else:
                made.pop("x-kubernetes-list-map-keys", None)
                made.pop("x-kubernetes-list-type", None)
                return


def _described(made: Schema, text: str | None) -> Schema:
    """With the first sentence of a description: an object has to fit into an annotation."""
    if text:
        first = re.split(r"(?<=[.!])\s|\n", text.strip(), maxsplit=1)[0]
        if len(first) > _LONGEST:
            first = first[:_LONGEST].rsplit(" ", 1)[0] + " …"
        made = {**made, "description": first}
    return made


def _special(name: str) -> Schema | None:
    if name.endswith("api.resource.Quantity"):
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": _QUANTITY,
            "x-kubernetes-int-or-string": True,
        }
    if name.endswith("util.intstr.IntOrString"):
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
        }
    if name.endswith("meta.v1.ObjectMeta"):
        return json.loads(json.dumps(_EMBEDDED))
    if name.endswith("meta.v1.Time"):
        return {"type": "string", "format": "date-time"}
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
