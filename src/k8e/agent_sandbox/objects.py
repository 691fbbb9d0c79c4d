"""Claims and sandboxes as Kubernetes objects, made from sessions. Pure functions and data.

A claim is a session: its session's labels have all that the claim was asked for with, so a gateway
that was restarted still knows every claim whose sandbox lives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

from k8e.agent_sandbox import status
from k8e.client.results import SessionInfo

CLAIM_GROUP, SANDBOX_GROUP = "extensions.agents.x-k8s.io", "agents.x-k8s.io"
VERSION = "v1beta1"
DELETE_POLICIES = ("Delete", "DeleteForeground")
POLICIES = (*DELETE_POLICIES, "Retain")
NAME_LABEL = "agents.x-k8s.io/claim-name"
UID_LABEL = "agents.x-k8s.io/claim-uid"
CLAIM_LABEL = "agents.x-k8s.io/claim"
"""Of a session: its claim's labels, annotations and specification, as JSON."""
HASH_LABEL = "agents.x-k8s.io/sandbox-name-hash"
MAX_KEPT = 12 << 10
"""Bytes of a claim's own metadata and specification; a session's labels have 16 KiB."""
READY_MESSAGE = "Pod is Ready"
SUSPENDED_MESSAGE = "Sandbox is suspended"
_SUBDOMAIN = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_OFFSET, _PRIME = 0x811C9DC5, 0x01000193  # of FNV-1a with 32 bits

Object = dict[str, Any]


class Condition(NamedTuple):
    """Whether something is the case, and why."""

    type: str
    true: bool
    reason: str
    message: str

    def to_json(self, at: float) -> Object:
        return {
            "type": self.type,
            "status": "True" if self.true else "False",
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": time_text(at),
            "observedGeneration": 1,
        }


READY = Condition("Ready", True, "DependenciesReady", READY_MESSAGE)
SUSPENDED = Condition("Ready", False, "SandboxSuspended", SUSPENDED_MESSAGE)


@dataclass(frozen=True)
class ClaimRequest:
    """What a client asks for, checked."""

    name: str
    pool: str
    labels: dict[str, str] = field(default_factory=dict[str, str])
    annotations: dict[str, str] = field(default_factory=dict[str, str])
    spec: Object = field(default_factory=dict[str, Any])
    env: dict[str, str] = field(default_factory=dict[str, str])
    shutdown_at: float = 0
    """Unix time; 0 means that the claim names none."""
    policy: str = "Retain"
    ttl: float | None = None
    """Seconds for which the claim is kept when its sandbox has ended; None means no limit."""

    def kept(self) -> str:
        """What a session's label keeps of it."""
        parts = {"labels": self.labels, "annotations": self.annotations, "spec": self.spec}
        return json.dumps(parts, separators=(",", ":"), ensure_ascii=False)


@dataclass
class Claim:
    """One claim, and what became of it."""

    namespace: str
    request: ClaimRequest
    uid: str
    created_at: float
    version: int = 0
    session_id: str = ""
    ready: Condition | None = None
    changed_at: float = 0
    """When ``ready`` became what it is."""
    expires_at: float = 0
    over: bool = False
    """Whether nothing will come of it any more: it failed, or its sandbox has ended."""

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.request.name

    def to_json(self) -> Object:
        request = self.request
        conditions = [self.ready.to_json(self.changed_at)] if self.ready is not None else []
        found: Object = {"conditions": conditions} if conditions else {}
        if self.session_id:
            found["sandbox"] = {"name": self.session_id, "podIPs": []}
        metadata = {
            **_metadata(self.namespace, request.name, self.uid, self.created_at, self.version),
            "labels": request.labels,
            "annotations": request.annotations,
        }
        return {
            "apiVersion": f"{CLAIM_GROUP}/{VERSION}",
            "kind": "SandboxClaim",
            "metadata": metadata,
            "spec": request.spec,
            "status": found,
        }


def claim_of(session: SessionInfo) -> Claim | None:
    """The claim of a session, as its labels have it; None if it was made in another way."""
    kept = session.labels.get(CLAIM_LABEL)
    if kept is None:
        return None
    try:
        told = json.loads(kept)
        body = {
            "metadata": {
                "name": session.labels[NAME_LABEL],
                "labels": told["labels"],
                "annotations": told["annotations"],
            },
            "spec": told["spec"],
        }
        request = parse_claim(body)
    except (ValueError, KeyError, TypeError, RecursionError, status.ApiError):
        return None  # labels are the client's own, and anybody may write such ones
    return Claim(
        session.tenant_id,
        request,
        session.labels.get(UID_LABEL, ""),
        session.created_at,
        session_id=session.session_id,
        ready=SUSPENDED if session.phase == "paused" else READY,
        changed_at=session.created_at,
        expires_at=session.expires_at,
    )


def sandbox_of(session: SessionInfo, version: int) -> Object:
    """A session as the object Sandbox."""
    name, paused = session.session_id, session.phase == "paused"
    selector = f"{HASH_LABEL}={name_hash(name)}"
    metadata = {
        **_metadata(session.tenant_id, name, name, session.created_at, version),
        "labels": {HASH_LABEL: name_hash(name)},
        "annotations": {"agents.x-k8s.io/pod-name": name},
    }
    if claim := session.labels.get(NAME_LABEL):
        metadata["ownerReferences"] = [
            {
                "apiVersion": f"{CLAIM_GROUP}/{VERSION}",
                "kind": "SandboxClaim",
                "name": claim,
                "uid": session.labels.get(UID_LABEL, ""),
                "controller": True,
            }
        ]
    suspended = Condition(
        "Suspended", paused, "PodTerminated" if paused else "NotSuspended", SUSPENDED_MESSAGE
    )
    ready = SUSPENDED if paused else READY
    conditions = [item.to_json(session.created_at) for item in (ready, suspended)]
    spec: Object = {"operatingMode": "Suspended" if paused else "Running"}
    if session.expires_at:
        spec["shutdownTime"] = time_text(session.expires_at)
    return {
        "apiVersion": f"{SANDBOX_GROUP}/{VERSION}",
        "kind": "Sandbox",
        "metadata": metadata,
        "spec": spec,
        "status": {"conditions": conditions, "selector": selector, "podIPs": []},
    }


def _metadata(namespace: str, name: str, uid: str, created_at: float, version: int) -> Object:
    return {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "resourceVersion": str(version),
        "generation": 1,
        "creationTimestamp": time_text(created_at),
    }


def time_text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_hash(name: str) -> str:
    """The hash of a sandbox's name that upstream's labels have."""
    found = _OFFSET
    for byte in name.encode():
        found = (found ^ byte) * _PRIME & 0xFFFFFFFF
    return f"{found:08x}"


# What clients send; everything is checked here.


def check_namespace(name: str) -> str:
    """``name`` if it can be a namespace, and so a tenant."""
    if _LABEL.fullmatch(name) is None:
        raise status.invalid(f"namespace {name[:80]!r} is not a valid name")
    return name


def parse_claim(body: Any) -> ClaimRequest:
    """A SandboxClaim as a client sends it."""
    metadata, spec = _mapping(_mapping(body, "the claim"), "metadata"), _mapping(body, "spec")
    name = metadata.get("name")
    if not isinstance(name, str) or len(name) > 253 or _SUBDOMAIN.fullmatch(name) is None:
        raise status.invalid(f"metadata.name {str(name)[:80]!r} is not a valid name")
    pool = _mapping(spec, "warmPoolRef").get("name")
    if not isinstance(pool, str) or not pool:
        raise status.invalid("spec.warmPoolRef.name is missing")
    lifecycle = _mapping(spec, "lifecycle")
    policy = lifecycle.get("shutdownPolicy") or "Retain"
    if policy not in POLICIES:
        raise status.invalid(f"spec.lifecycle.shutdownPolicy is none of {', '.join(POLICIES)}")
    request = ClaimRequest(
        name,
        pool,
        _texts(metadata, "labels"),
        _texts(metadata, "annotations"),
        spec,
        _env(spec.get("env")),
        _time(lifecycle.get("shutdownTime")),
        policy,
        _ttl(lifecycle.get("ttlSecondsAfterFinished")),
    )
    if len(request.kept().encode("utf-8", "surrogatepass")) > MAX_KEPT:
        raise status.ApiError(413, f"the claim has more than {MAX_KEPT} bytes")
    return request


def _mapping(value: Any, key: str) -> Object:
    found: Any = value
    if isinstance(value, dict) and key != "the claim":
        found = cast("Object", value).get(key)
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise status.invalid(f"{key} must be an object")
    return cast("Object", found)


def _texts(value: Mapping[str, Any], key: str) -> dict[str, str]:
    found = _mapping(value, key)
    if not all(isinstance(text, str) for text in found.values()):
        raise status.invalid(f"metadata.{key} must map names to text")
    return found


def _env(value: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    items: list[Any] = [] if value is None else value
    if not isinstance(items, list):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise status.invalid("spec.env must be a list")
    for item in items:
        entry = _mapping({"item": item}, "item")
        name, text = entry.get("name"), entry.get("value", "")
        if not isinstance(name, str) or not name or not isinstance(text, str):
            raise status.invalid("each entry of spec.env needs a name and a text as its value")
        found[name] = text
    return found


def _time(value: Any) -> float:
    if value is None:
        return 0
    try:
        found = datetime.fromisoformat(value)
        return found.replace(tzinfo=found.tzinfo or UTC).timestamp()
    except (TypeError, ValueError, OverflowError):
        raise status.invalid("spec.lifecycle.shutdownTime is not a date and time") from None


def _ttl(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise status.invalid("spec.lifecycle.ttlSecondsAfterFinished must be a number from 0 up")
    return float(value)


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; the forms ``a=b``, ``a==b``, ``a!=b``, ``a`` and ``!a``."""
    for term in filter(None, (part.strip() for part in selector.split(","))):
        name, operator, value = _term(term)
        has = name in labels
        match operator:
            case "=":
                fits = has and labels[name] == value
            case "!=":
                fits = not has or labels[name] != value
            case "!":
                fits = not has
            case _:
                fits = has
        if not fits:
            return False
    return True


def _term(term: str) -> tuple[str, str, str]:
    if "(" in term or " " in term:
        raise status.ApiError(400, f"the label selector {term[:80]!r} is not served here")
    if "!=" in term:
        name, _, value = term.partition("!=")
        return name, "!=", value
    if "=" in term:
        name, _, value = term.partition("=")
        return name, "=", value.removeprefix("=")
    return (term[1:], "!", "") if term.startswith("!") else (term, "", "")
