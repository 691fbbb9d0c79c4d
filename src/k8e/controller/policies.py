"""What a claim may ask for, by its template and by the cluster's rules. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

from k8e.controller import additions, resources
from k8e.controller.resources import Object
from k8e.kubernetes.api import entries, section

INVALID_METADATA = "InvalidMetadata"
ENV_REJECTED = "EnvVarsInjectionRejected"
VOLUMES_REJECTED = "VolumeClaimTemplatesError"
DEFAULT_LABEL_DOMAINS = ("sandbox.users.io",)
_RESERVED = ("kubernetes.io", "k8s.io", resources.CORE_GROUP, additions.GROUP)
_DISALLOWED, _OVERRIDES = "Disallowed", "Overrides"
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_LONGEST = 63


class Rejected(Exception):
    """A claim that asks for what it may not have. Trying again does not help."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


def _domain(key: str) -> str:
    return key.rpartition("/")[0].lower()


def _within(domain: str, domains: Sequence[str]) -> bool:
    return any(domain == one or domain.endswith(f".{one}") for one in domains)


def check_metadata(claim: Object, label_domains: Sequence[str]) -> None:
    """Whether the labels and annotations that a claim asks for are its to set."""
    wanted = section(claim["spec"], "additionalPodMetadata")
    for key, value in section(wanted, "labels").items():
        if (key, value) == resources.ROUTER_LABEL:
            raise Rejected(INVALID_METADATA, f"the label {key}={value} is the router's own")
        if not _within(_domain(key), label_domains):
            raise Rejected(
                INVALID_METADATA,
                f"the label {key} is in no allowed domain: {', '.join(label_domains)}",
            )
        name = key.rpartition("/")[2]
        if len(name) > _LONGEST or not _NAME.fullmatch(name):
            raise Rejected(INVALID_METADATA, f"the label {key} has no valid name")
        if len(value) > _LONGEST or not _VALUE.fullmatch(value):
            raise Rejected(INVALID_METADATA, f"the value of the label {key} is no label value")
    for key in section(wanted, "annotations"):
        if key != resources.EVICTABLE and _within(_domain(key), _RESERVED):
            raise Rejected(INVALID_METADATA, f"the annotation {key} is in a reserved domain")


def check_against(claim: Object, metadata: Object) -> None:
    """Whether a claim leaves alone what the pods of its template have already."""
    wanted = section(claim["spec"], "additionalPodMetadata")
    for part in ("labels", "annotations"):
        has: dict[str, str] = section(metadata, part)
        for key, value in section(wanted, part).items():
            if key in has and has[key] != value:
                raise Rejected(
                    INVALID_METADATA, f"the template sets {part[:-1]} {key}, which stays as it is"
                )


def is_cold_only(claim: Object, *, late_env: bool = False) -> bool:
    """Whether a claim asks for what no running sandbox can be given.

    ``late_env``: its variables can be (:mod:`k8e.controller.environment`).
    """
    env = claim["spec"].get("env") and not late_env
    return bool(env or claim["spec"].get("volumeClaimTemplates"))


def inject_env(spec: Object, claim: Object, policy: str) -> Object:
    """A pod spec with the environment variables of a claim."""
    wanted: list[Object] = entries(claim["spec"], "env")
    if not wanted:
        return spec
    if policy == _DISALLOWED:
        raise Rejected(
            ENV_REJECTED,
            "the template allows no environment variables: its envVarsInjectionPolicy is "
            + _DISALLOWED,
        )
    spec = copy.deepcopy(spec)
    containers: list[Object] = entries(spec, "containers")
    for one in wanted:
        _inject(_container(containers, one), one, replaces=policy == _OVERRIDES)
    return spec


def _container(containers: list[Object], wanted: Object) -> Object:
    name = wanted.get("containerName")
    for container in containers:
        if not name or container["name"] == name:
            return container
    raise Rejected(ENV_REJECTED, f"the template has no container {name}")


def _inject(container: Object, wanted: Object, *, replaces: bool) -> None:
    name, value = wanted["name"], wanted.get("value", "")
    if not replaces and container.get("envFrom"):
        raise Rejected(
            ENV_REJECTED,
            f"the container {container['name']} has envFrom, whose variables might be replaced",
        )
    variables: list[Object] = container.setdefault("env", [])
    for at, has in enumerate(variables):
        if has["name"] == name:
            if not replaces:
                raise Rejected(ENV_REJECTED, f"the template sets the variable {name} already")
            variables[at] = {"name": name, "value": value}
            return
    variables.append({"name": name, "value": value})


def merge_volumes(has: list[Object], claim: Object, policy: str) -> list[Object]:
    """The volume claim templates of a template, with those of a claim."""
    wanted: list[Object] = entries(claim["spec"], "volumeClaimTemplates")
    if not wanted:
        return has
    if policy == _DISALLOWED:
        raise Rejected(
            VOLUMES_REJECTED,
            "the template allows no volumeClaimTemplates: its volumeClaimTemplatesPolicy is "
            + _DISALLOWED,
        )
    names = [str(section(item, "metadata").get("name") or "") for item in wanted]
    if not all(names) or len(set(names)) != len(names):
        raise Rejected(VOLUMES_REJECTED, "each of volumeClaimTemplates needs a name of its own")
    merged = {item["metadata"]["name"]: item for item in has}
    for name, item in zip(names, wanted, strict=True):
        if name in merged and policy != _OVERRIDES:
            raise Rejected(VOLUMES_REJECTED, f"the template has a volume claim {name} already")
        merged[name] = item
    return list(merged.values())


def creator(labels: dict[str, str]) -> str:
    """Who made a claim, as one of a few words."""
    found = labels.get(resources.CREATED_BY, "")
    return found if found in resources.CREATORS else "unknown"


def allowed_domains(config: Object | None) -> tuple[str, ...]:
    """The domains that a config map allows for labels: words between commas and white space."""
    data = section(config or {}, "data")
    text = data.get(resources.CONFIG_LABELS)
    if text is None:
        return DEFAULT_LABEL_DOMAINS
    return tuple(word.lower() for word in re.split(r"[\s,]+", str(text)) if word)
