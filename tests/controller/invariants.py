"""What holds of claims and sandboxes whatever happened, by the cluster and its audit log."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

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
    pods = [one["metadata"]["name"] for one in cluster.list("pods")]
    assert len(pods) == len(set(pods))
    bound = _bindings(cluster)
    assert {name: bound[name] for name in names} == {name: {given[name]} for name in names}


def _owned(cluster: SandboxCluster) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for one in cluster.list("sandbox"):
        for owner in entries(one["metadata"], "ownerReferences"):
            if owner["kind"] == "SandboxClaim" and "deletionTimestamp" not in one["metadata"]:
                found[owner["name"]].append(one["metadata"]["name"])
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
