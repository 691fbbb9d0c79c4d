"""Environment variables that reach a sandbox that runs already, as a file. Pure.

Nothing changes the environment of a process that has started, so upstream starts a new sandbox for
a claim with ``env``. Where a template asks for it, its pods have a file instead, which the kubelet
writes from an annotation of the pod when a claim takes the sandbox: whatever the sandbox then runs
reads it (``. /run/sandbox/claim/env``).
"""

from __future__ import annotations

import re
import shlex

from k8e.controller import resources
from k8e.controller.additions import GROUP
from k8e.controller.resources import Object
from k8e.kubernetes.api import entries

LATE_ENV = f"{GROUP}/late-env"
"""On a SandboxTemplate, ``"true"``: its pods have the file, and claims with ``env`` stay warm."""
ENV = f"{GROUP}/env"
"""On a pod: the text of the file."""
FOLDER, FILE = "/run/sandbox/claim", "env"
_VOLUME = "claim-env"
_LONGEST = 64 << 10
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_late(template: Object) -> bool:
    """Whether pods of a template have the file."""
    return resources.annotations_of(template).get(LATE_ENV) == "true"


def with_file(spec: Object) -> Object:
    """A pod spec whose first container has the file."""
    first, *others = entries(spec, "containers")
    mount = {"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}
    reference = {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{ENV}']"}
    item = {"path": FILE, "fieldRef": reference}
    volume = {"name": _VOLUME, "downwardAPI": {"items": [item]}}
    first = {**first, "volumeMounts": [*entries(first, "volumeMounts"), mount]}
    volumes = [*entries(spec, "volumes"), volume]
    return {**spec, "containers": [first, *others], "volumes": volumes}


def has_file(sandbox: Object) -> bool:
    """Whether the pod of a sandbox was made with the file."""
    volumes = entries(sandbox["spec"]["podTemplate"]["spec"], "volumes")
    return any(one["name"] == _VOLUME and "downwardAPI" in one for one in volumes)


def text_of(claim: Object, template: Object) -> str | None:
    """The file with a claim's variables; None if they need a sandbox that is newly started.

    Those of another container than the first do, and names that a shell does not take.
    """
    if not is_late(template):
        return None
    [first, *_] = entries(template["spec"]["podTemplate"]["spec"], "containers")
    lines: list[str] = []
    for variable in entries(claim["spec"], "env"):
        mine = variable.get("containerName") in (None, "", first["name"])
        if not mine or not _NAME.fullmatch(variable["name"]):
            return None
        lines.append(f"export {variable['name']}={shlex.quote(variable.get('value', ''))}\n")
    text = "".join(lines)
    return text if len(text.encode()) <= _LONGEST else None
