"""What holds of claims and sandboxes whatever happened, by the cluster and its audit log."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from k8e.controller.resources import CLAIM_UID
from k8e.kubernetes.api import entries, section
from tests.controller.clusters import SandboxCluster, eventually


def check_bindings(cluster: SandboxCluster, names: list[str], *, replicas: int = 4) -> None:
    """Every claim has one sandbox, no sandbox has two claims, and none was ever bound anew."""
    given = {
        name: cluster.wait_ready("sandboxclaim", name)["status"]["sandbox"]["name"]
        for name in names
    }
    assert len(set(given.values())) == len(names)

    def settled() -> bool:
        owned = _owned(cluster)
        return all(owned[name] == [given[name]] for name in names)

    eventually("each claim owns its sandbox and no other", settled)
    cluster.wait_pool("pool", replicas)
    eventually("every pod has its sandbox", lambda: not _orphans(cluster))
    given_to = _adoptions(cluster)
    assert all(len(claims) == 1 for claims in given_to.values()), given_to
    bound = _bindings(cluster)
    assert {name: bound[name] for name in names} == {name: {given[name]} for name in names}


def _owned(cluster: SandboxCluster) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for one in cluster.list("sandbox"):
        for owner in entries(one["metadata"], "ownerReferences"):
            if owner["kind"] == "SandboxClaim" and "deletionTimestamp" not in one["metadata"]:
                found[owner["name"]].append(one["metadata"]["name"])
    return found


def _orphans(cluster: SandboxCluster) -> list[str]:
    """Pods whose sandbox is not there any more."""
    known = {one["metadata"]["uid"] for one in cluster.list("sandbox")}
    return [
        pod["metadata"]["name"]
        for pod in cluster.list("pods")
        if not any(o["uid"] in known for o in entries(pod["metadata"], "ownerReferences"))
    ]


def _adoptions(cluster: SandboxCluster) -> dict[str, set[str]]:
    """The claims to which each sandbox was ever given, by what the API server wrote down."""
    found: dict[str, set[str]] = defaultdict(set)
    for entry in cluster.plane.audit():
        target: dict[str, Any] = section(entry, "objectRef")
        if target.get("namespace") != cluster.namespace or target["resource"] != "sandboxes":
            continue
        if entry["verb"] != "patch" or entry["responseStatus"]["code"] >= 300:
            continue
        labels = section(entry, "requestObject", "metadata", "labels")
        if claim := labels.get(CLAIM_UID):
            found[target["name"]].add(claim)
    return found


def _bindings(cluster: SandboxCluster) -> dict[str, set[str]]:
    """The sandboxes that claims were ever told, by what the API server wrote down."""
    found: dict[str, set[str]] = defaultdict(set)
    for entry in cluster.plane.audit():
        target: dict[str, Any] = section(entry, "objectRef")
        mine = target.get("namespace") == cluster.namespace
        if mine and target["resource"] == "sandboxclaims" and target.get("subresource") == "status":
            told = section(section(section(entry, "requestObject"), "status"), "sandbox")
            if told.get("name") and entry["responseStatus"]["code"] < 300:
                found[target["name"]].add(told["name"])
    return found
