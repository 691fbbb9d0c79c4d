"""Kinds of early write-ups, against a real API server with the switch on."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from typing import Any

import pytest

from k8e.controller import deployment
from tests.controller.clusters import POD, SandboxCluster, claim, condition, eventually

OLD = "agents.x-k8s.io"
CLAIMS, POOLS = f"sandboxclaims.v1alpha1.{OLD}", f"sandboxwarmpools.v1alpha1.{OLD}"
TEMPLATES = f"sandboxtemplates.v1alpha1.{OLD}"
NEW = "extensions.agents.x-k8s.io"


def old(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name}
    return {"apiVersion": f"{OLD}/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


@pytest.fixture
def legacy(cluster: SandboxCluster) -> Generator[SandboxCluster]:
    """A cluster that serves these kinds while a test runs: their names shadow today's."""
    objects = deployment.objects("extensions-legacy")
    cluster.plane.apply(*objects)
    [process] = cluster.controllers
    cluster.stop_controller(process)
    for kind in (TEMPLATES, CLAIMS, POOLS):
        eventually(
            f"{kind} are served",
            lambda kind=kind: "No resources" in cluster.kubectl("get", kind, check=False),
        )
    process = cluster.start_controller("--legacy")
    yield cluster
    cluster.stop_controller(process)
    names = [f"{kind}.{OLD}" for kind in ("sandboxclaims", "sandboxtemplates", "sandboxwarmpools")]
    cluster.plane.kubectl("delete", "crd", *names)

    def are_forgotten() -> bool:
        # kubectl remembers for minutes which kinds there are: these have the names of today's.
        shutil.rmtree(cluster.plane.folder / ".kube/cache", ignore_errors=True)
        return "have a resource type" in cluster.kubectl("get", CLAIMS, check=False)

    eventually("they are not served any more", are_forgotten)
    cluster.start_controller()


def test_manifests_of_early_write_ups_work_as_they_are_written(legacy: SandboxCluster) -> None:
    cluster = legacy
    cluster.apply(
        old("SandboxTemplate", "base", template={"spec": POD}),
        old("SandboxWarmPool", "warm", size=1, template="base"),
    )
    made = cluster.wait(
        f"sandboxwarmpools.{NEW}", "warm", lambda one: one["status"].get("readyReplicas") == 1
    )
    assert made["spec"]["sandboxTemplateRef"]["name"] == "base"
    assert made["spec"]["replicas"] == 1
    cluster.apply(old("SandboxClaim", "mine", template="base"))
    found = cluster.wait(CLAIMS, "mine", lambda one: condition(one, "Ready")["status"] == "True")
    name = found["status"]["sandbox"]["name"]
    assert name.startswith("warm-"), "of the pool of its template"
    assert found["status"]["sandbox"]["podIPs"]
    eventually("a warning", lambda: cluster.events("Deprecated"))
    cluster.patch(POOLS, "warm", {"spec": {"size": 2}})
    cluster.wait(POOLS, "warm", lambda one: one["status"].get("readyReplicas") == 2)
    cluster.kubectl("delete", CLAIMS, "mine")
    cluster.wait_gone(f"sandboxclaims.{NEW}", "mine")
    cluster.wait_gone("sandbox", name)
    # A template without a pool, and a name that is taken.
    cluster.kubectl("delete", POOLS, "warm")
    cluster.wait_gone(f"sandboxwarmpools.{NEW}", "warm")
    cluster.apply(claim("taken", "shadow-pool-base"), old("SandboxClaim", "taken", template="base"))
    cluster.apply(old("SandboxClaim", "cold", template="base"))
    found = cluster.wait(CLAIMS, "cold", lambda one: condition(one, "Ready")["status"] == "True")
    assert found["status"]["sandbox"]["name"] == "cold"
    refused = cluster.wait(
        CLAIMS, "taken", lambda one: condition(one, "Ready")["reason"] == "NameTaken"
    )
    assert "was not made from it" in condition(refused, "Ready")["message"]
    owners = cluster.get(f"sandboxclaims.{NEW}", "taken")["metadata"]
    assert "ownerReferences" not in owners
    cluster.kubectl("delete", CLAIMS, "--all")
    cluster.kubectl("delete", TEMPLATES, "--all")
