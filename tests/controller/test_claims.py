"""SandboxClaim, against a real API server. The names of the tests are the promises."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k8e.controller.conditions import timestamp
from k8e.controller.resources import name_hash
from k8e.kubernetes.api import section
from tests.controller.clusters import (
    POD,
    SandboxCluster,
    behaving,
    claim,
    condition,
    eventually,
    pool,
    sandbox,
    template,
)

LABEL = "sandbox.users.io/team"
VOLUME = {
    "metadata": {"name": "work"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
}


def in_seconds(seconds: float) -> str:
    return timestamp(time.time() + seconds)


def with_pool(cluster: SandboxCluster, replicas: int = 1, **spec: Any) -> None:
    """A template and a pool of it, filled."""
    cluster.apply(template(**spec), pool(replicas=replicas))
    cluster.wait_pool("pool", replicas)


def sandbox_of(found: dict[str, Any]) -> str:
    return str(found["status"]["sandbox"]["name"])


def test_a_claim_is_given_an_idle_sandbox_that_the_pool_then_replaces(
    cluster: SandboxCluster,
) -> None:
    with_pool(cluster)
    [idle] = cluster.list("sandbox")
    pod = cluster.get("pod", idle["metadata"]["name"])["metadata"]
    assert pod["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "true"
    assert pod["labels"]["agents.x-k8s.io/warm-pool-sandbox"] == name_hash("pool")
    cluster.apply(claim("mine"))
    found = cluster.wait_ready("sandboxclaim", "mine")
    name = sandbox_of(found)
    assert name == idle["metadata"]["name"]
    assert found["status"]["sandbox"]["podIPs"] == idle["status"]["podIPs"]
    assert condition(found, "Ready")["reason"] == "DependenciesReady"
    adopted = cluster.get("sandbox", name)["metadata"]
    assert [owner["uid"] for owner in adopted["ownerReferences"]] == [found["metadata"]["uid"]]
    assert adopted["labels"]["agents.x-k8s.io/launch-type"] == "warm"
    assert adopted["labels"]["agents.x-k8s.io/claim-uid"] == found["metadata"]["uid"]
    assert "agents.x-k8s.io/warm-pool-sandbox" not in adopted["labels"]
    assert adopted["annotations"]["agents.x-k8s.io/pod-name"] == name
    after = cluster.wait(
        "pod",
        name,
        lambda one: "agents.x-k8s.io/warm-pool-sandbox" not in one["metadata"]["labels"],
    )["metadata"]
    assert after["uid"] == pod["uid"]
    assert after["labels"]["agents.x-k8s.io/claim-uid"] == found["metadata"]["uid"]
    assert "cluster-autoscaler.kubernetes.io/safe-to-evict" not in after.get("annotations", {})
    cluster.wait_pool("pool", 1)
    eventually("an event", lambda: cluster.events("SandboxAdopted"))
    marks = cluster.wait(
        "sandboxclaim",
        "mine",
        lambda one: "agents.x-k8s.io/claim-first-ready-at" in one["metadata"]["annotations"],
    )["metadata"]["annotations"]
    assert "agents.x-k8s.io/controller-first-observed-at" in marks
    assert marks["agents.x-k8s.io/sandbox-name"] == name


def test_parallel_claims_get_a_sandbox_each_and_no_two_the_same(cluster: SandboxCluster) -> None:
    with_pool(cluster, 4)
    names = [f"many-{number}" for number in range(8)]
    cluster.apply(*(claim(name) for name in names))
    given = [sandbox_of(cluster.wait_ready("sandboxclaim", name)) for name in names]
    assert len(set(given)) == len(names)
    for name, sandbox_name in zip(names, given, strict=True):
        owners = cluster.get("sandbox", sandbox_name)["metadata"]["ownerReferences"]
        assert [owner["name"] for owner in owners] == [name]
    cluster.wait_pool("pool", 4)


def test_a_warm_claim_costs_four_writes_two_of_them_before_it_is_ready(
    cluster: SandboxCluster,
) -> None:
    with_pool(cluster)
    [idle] = cluster.list("sandbox")
    name = idle["metadata"]["name"]
    cluster.apply(claim("counted"))
    cluster.wait_ready("sandboxclaim", "counted")
    mark = "agents.x-k8s.io/claim-first-ready-at"
    cluster.wait("sandboxclaim", "counted", lambda one: mark in one["metadata"]["annotations"])
    label = "agents.x-k8s.io/warm-pool-sandbox"
    cluster.wait("pod", name, lambda one: label not in one["metadata"]["labels"])
    began = False
    writes: list[str] = []
    for entry in cluster.plane.audit():
        target = section(entry, "objectRef")
        if target.get("namespace") != cluster.namespace:
            continue
        ours = "agent-sandbox-controller" in entry["user"]["username"]
        began |= target.get("name") == "counted" or (
            not ours and target["resource"] == "sandboxclaims"
        )
        if began and ours and target.get("name") in (name, "counted"):
            writes.append("/".join(filter(None, (target["resource"], target.get("subresource")))))
    assert sorted(writes) == ["pods", "sandboxclaims", "sandboxclaims/status", "sandboxes"]
    assert writes[:2] == ["sandboxes", "sandboxclaims/status"]


def test_a_claim_on_an_empty_pool_gets_a_sandbox_of_its_own_name(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=0))
    cluster.apply(claim("cold"))
    found = cluster.wait_ready("sandboxclaim", "cold")
    assert sandbox_of(found) == "cold"
    made = cluster.get("sandbox", "cold")
    assert made["metadata"]["labels"]["agents.x-k8s.io/launch-type"] == "cold"
    spec = cluster.get("pod", "cold")["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["dnsPolicy"] == "None"
    assert spec["dnsConfig"]["nameservers"] == ["8.8.8.8", "1.1.1.1"]
    eventually("an event", lambda: cluster.events("SandboxProvisioned"))


def test_a_claim_does_not_wait_long_for_a_member_that_does_not_start(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(podTemplate=behaving("Pending")), pool(replicas=1))
    eventually("a member", lambda: cluster.list("sandbox"))
    cluster.apply(claim("impatient"))
    found = cluster.wait(
        "sandboxclaim", "impatient", lambda one: one.get("status", {}).get("sandbox")
    )
    assert sandbox_of(found) == "impatient"
    assert condition(found, "Ready")["reason"] in ("SandboxNotReady", "DependenciesNotReady")


def test_claims_and_sandboxes_are_counted_under_upstreams_names(cluster: SandboxCluster) -> None:
    with_pool(cluster)
    wanted = claim("counted-once")
    wanted["metadata"]["labels"] = {"agents.x-k8s.io/created-by": "python-client"}
    cluster.apply(wanted)
    cluster.wait_ready("sandboxclaim", "counted-once")
    words = {
        "namespace": cluster.namespace,
        "launch_type": "warm",
        "warmpool_name": "pool",
        "created_by": "python-client",
    }

    def count() -> float | None:
        with urlopen(f"http://127.0.0.1:{cluster.metrics_port}/metrics", timeout=20) as answer:
            families = {
                one.name: one for one in text_string_to_metric_families(answer.read().decode())
            }
        assert families["agent_sandbox_claim_controller_startup_latency_ms"].samples
        population = families["agent_sandboxes"].samples
        assert any(one.labels["namespace"] == cluster.namespace for one in population)
        for one in families["agent_sandbox_claim_creation"].samples:
            if one.name.endswith("_total") and words.items() <= one.labels.items():
                return one.value
        return None

    assert eventually("it is counted", count) == 1


def test_a_foreign_sandbox_of_the_claims_name_is_an_error(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=0), sandbox("taken"))
    cluster.apply(claim("taken"))
    found = cluster.wait_reason("sandboxclaim", "taken", "ReconcilerError")
    assert "is not this claim's" in condition(found, "Ready")["message"]
    assert "ownerReferences" not in cluster.get("sandbox", "taken")["metadata"]


def test_a_missing_pool_or_template_is_told_and_found_when_it_comes(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(claim("early"))
    cluster.wait_reason("sandboxclaim", "early", "WarmPoolNotFound")
    cluster.apply(pool(replicas=0))
    cluster.wait_reason("sandboxclaim", "early", "TemplateNotFound")
    cluster.apply(template())
    cluster.wait_ready("sandboxclaim", "early")


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {"team": "x"}},
        {"labels": {"app": "sandbox-router"}},
        {"labels": {LABEL: "no label value!"}},
        {"annotations": {"agents.x-k8s.io/pod-name": "x"}},
        {"annotations": {"sub.kubernetes.io/x": "x"}},
    ],
)
def test_metadata_that_is_not_a_claims_to_set_is_refused(
    cluster: SandboxCluster, metadata: dict[str, Any]
) -> None:
    cluster.apply(template(), pool(replicas=0), claim("bad", additionalPodMetadata=metadata))
    cluster.wait_reason("sandboxclaim", "bad", "InvalidMetadata")
    assert cluster.list("sandbox") == []


def test_a_claims_metadata_reaches_the_pod_and_changes_nothing_of_the_templates(
    cluster: SandboxCluster,
) -> None:
    with_pool(cluster, podTemplate=behaving("Running", labels={"sandbox.users.io/own": "1"}))
    wanted = {"labels": {LABEL: "red"}, "annotations": {"example.com/note": "x"}}
    cluster.apply(claim("told", additionalPodMetadata=wanted))
    name = sandbox_of(cluster.wait_ready("sandboxclaim", "told"))
    pod = cluster.wait("pod", name, lambda one: one["metadata"]["labels"].get(LABEL) == "red")
    assert pod["metadata"]["annotations"]["example.com/note"] == "x"
    cluster.apply(claim("changes", additionalPodMetadata={"labels": {"sandbox.users.io/own": "2"}}))
    cluster.wait_reason("sandboxclaim", "changes", "InvalidMetadata")
    cluster.wait_pool("pool", 1)


def test_environment_variables_need_the_templates_leave_and_a_cold_start(
    cluster: SandboxCluster,
) -> None:
    with_pool(cluster)
    env = [{"name": "TOKEN", "value": "x"}]
    cluster.apply(claim("refused", env=env))
    cluster.wait_reason("sandboxclaim", "refused", "EnvVarsInjectionRejected")
    cluster.apply(template("open", envVarsInjectionPolicy="Allowed"))
    cluster.apply(pool("open", 0, "open"), claim("given", "open", env=env))
    assert sandbox_of(cluster.wait_ready("sandboxclaim", "given")) == "given"
    assert cluster.get("pod", "given")["spec"]["containers"][0]["env"] == env


def test_variables_reach_a_warm_sandbox_where_its_template_takes_them_late(
    cluster: SandboxCluster,
) -> None:
    late = template(envVarsInjectionPolicy="Allowed")
    late["metadata"]["annotations"] = {"sandbox.k8e.io/late-env": "true"}
    cluster.apply(late, pool(replicas=1))
    cluster.wait_pool("pool", 1)
    [idle] = cluster.list("sandbox")
    cluster.apply(claim("bound", env=[{"name": "TOKEN", "value": "it's one"}]))
    name = sandbox_of(cluster.wait_ready("sandboxclaim", "bound"))
    assert name == idle["metadata"]["name"]
    mark = "sandbox.k8e.io/env"
    pod = cluster.wait("pod", name, lambda one: mark in one["metadata"].get("annotations", {}))
    assert pod["metadata"]["annotations"][mark] == "export TOKEN='it'\"'\"'s one'\n"
    assert [one["name"] for one in pod["spec"]["volumes"]] == ["claim-env"]


def test_volume_claims_need_the_templates_leave(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=0), claim("refused", volumeClaimTemplates=[VOLUME]))
    cluster.wait_reason("sandboxclaim", "refused", "VolumeClaimTemplatesError")
    cluster.apply(template("open", volumeClaimTemplatesPolicy="Allowed"), pool("open", 0, "open"))
    cluster.apply(claim("given", "open", volumeClaimTemplates=[VOLUME]))
    cluster.wait_ready("sandboxclaim", "given")
    assert cluster.get("pvc", "work-given")


def test_an_expired_claim_is_kept_without_its_sandbox(cluster: SandboxCluster) -> None:
    with_pool(cluster)
    cluster.apply(claim("kept"))
    name = sandbox_of(cluster.wait_ready("sandboxclaim", "kept"))
    cluster.patch("sandboxclaim", "kept", {"spec": {"lifecycle": {"shutdownTime": in_seconds(0)}}})
    cluster.wait_reason("sandboxclaim", "kept", "ClaimExpired")
    cluster.wait_gone("sandbox", name)
    assert cluster.get("sandboxclaim", "kept")
    eventually("an event", lambda: cluster.events("ClaimExpired"))


@pytest.mark.parametrize("policy", ["Delete", "DeleteForeground"])
def test_an_expired_claim_goes_with_its_sandbox(cluster: SandboxCluster, policy: str) -> None:
    cluster.apply(template(), pool(replicas=0))
    cluster.apply(
        claim("brief", lifecycle={"shutdownTime": in_seconds(5), "shutdownPolicy": policy})
    )
    cluster.wait_gone("sandboxclaim", "brief")
    cluster.wait_gone("sandbox", "brief")


def test_a_claim_ends_some_time_after_its_pod_has_ended(cluster: SandboxCluster) -> None:
    cluster.apply(template(podTemplate=behaving("Succeeded")), pool(replicas=0))
    lifecycle = {"shutdownPolicy": "Delete", "shutdownTime": in_seconds(3600)}
    cluster.apply(
        claim("timed", lifecycle={**lifecycle, "ttlSecondsAfterFinished": 1}),
        claim("zero", lifecycle={"ttlSecondsAfterFinished": 0}),
        claim("stays", lifecycle={}),
    )
    cluster.wait_gone("sandboxclaim", "timed")
    zero = cluster.wait_reason("sandboxclaim", "zero", "ClaimExpired")
    assert condition(zero, "Finished")["reason"] == "PodSucceeded"
    stays = cluster.wait_reason("sandboxclaim", "stays", "PodSucceeded", of="Finished")
    assert condition(stays, "Ready")["reason"] == "PodSucceeded"


def test_a_claim_whose_sandbox_was_deleted_says_so_and_gets_no_other(
    cluster: SandboxCluster,
) -> None:
    with_pool(cluster)
    cluster.apply(claim("lost"))
    name = sandbox_of(cluster.wait_ready("sandboxclaim", "lost"))
    cluster.kubectl("delete", "sandbox", name)
    found = cluster.wait_reason("sandboxclaim", "lost", "SandboxMissing")
    assert sandbox_of(found) == name


def test_a_suspended_sandbox_shows_in_its_claim(cluster: SandboxCluster) -> None:
    with_pool(cluster)
    cluster.apply(claim("resting"))
    name = sandbox_of(cluster.wait_ready("sandboxclaim", "resting"))
    cluster.patch("sandbox", name, {"spec": {"operatingMode": "Suspended"}})
    cluster.wait_reason("sandboxclaim", "resting", "SandboxSuspended")
    cluster.patch("sandbox", name, {"spec": {"operatingMode": "Running"}})
    cluster.wait_ready("sandboxclaim", "resting")


def test_kubectl_lists_claims_and_pools(cluster: SandboxCluster) -> None:
    with_pool(cluster)
    cluster.apply(claim("listed"))
    name = sandbox_of(cluster.wait_ready("sandboxclaim", "listed"))
    lines = cluster.kubectl("get", "sandboxclaim").splitlines()
    assert lines[0].split() == ["NAME", "READY", "SANDBOX", "REASON", "AGE"]
    assert lines[1].split()[:4] == ["listed", "True", name, "DependenciesReady"]
    cluster.wait_pool("pool", 1)
    lines = cluster.kubectl("get", "swp").splitlines()
    assert lines[0].split() == ["NAME", "READY", "DESIRED", "AGE"]
    assert lines[1].split()[:3] == ["pool", "1", "1"]


def test_a_sandbox_that_claims_to_be_of_a_pool_is_not_handed_out(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=0))
    forged = sandbox("poison", podTemplate={"spec": POD})
    forged["metadata"]["labels"] = {
        "agents.x-k8s.io/warm-pool-sandbox": name_hash("another"),
        "agents.x-k8s.io/sandbox-template-ref-hash": name_hash("template"),
    }
    cluster.apply(forged)
    cluster.wait_ready("sandbox", "poison")
    cluster.apply(claim("careful"))
    assert sandbox_of(cluster.wait_ready("sandboxclaim", "careful")) == "careful"


def test_a_claim_cannot_name_a_member_of_another_pool_as_its_own(cluster: SandboxCluster) -> None:
    cluster.apply(template("secret"), pool("secret", 1, "secret"), template(), pool(replicas=0))
    cluster.wait_pool("secret", 1)
    [other] = cluster.list("sandbox")
    name = other["metadata"]["name"]
    thief = claim("thief")
    thief["metadata"]["annotations"] = {"agents.x-k8s.io/sandbox-name": name}
    cluster.apply(thief)
    assert sandbox_of(cluster.wait_ready("sandboxclaim", "thief")) == "thief"
    [owner] = cluster.get("sandbox", name)["metadata"]["ownerReferences"]
    assert owner["kind"] == "SandboxWarmPool"


def test_a_claim_whose_name_was_taken_gets_its_sandbox_when_that_is_free(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(), pool(replicas=0), sandbox("held"), claim("held"))
    cluster.wait_reason("sandboxclaim", "held", "ReconcilerError")
    cluster.kubectl("delete", "sandbox", "held")
    assert sandbox_of(cluster.wait_ready("sandboxclaim", "held")) == "held"


def test_a_quota_that_is_used_up_is_told_and_the_claim_goes_on_when_there_is_room(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(), pool(replicas=0))
    none = {"count/sandboxes.agents.x-k8s.io": "0"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
    cluster.apply({**quota, "spec": {"hard": none}})
    # No controller counts here what is used, so the test says so.
    status = {"status": {"hard": none, "used": none}}
    cluster.patch("resourcequota", "none", status, "--subresource=status")
    trial = json.dumps({**sandbox("trial"), "metadata": {"generateName": "trial-"}})
    eventually(
        "the quota holds",
        lambda: (
            "quota"
            in cluster.kubectl("create", "--dry-run=server", "-f", "-", check=False, text=trial)
        ),
    )
    cluster.apply(claim("waits"))
    found = cluster.wait_reason("sandboxclaim", "waits", "ReconcilerError")
    assert "quota" in condition(found, "Ready")["message"]
    cluster.apply(pool("blocked", 2))
    [event] = eventually("a warning", lambda: cluster.events("WarmPoolNotProgressing"))
    assert "quota" in event["message"]
    cluster.kubectl("delete", "resourcequota", "none")
    cluster.wait_ready("sandboxclaim", "waits")


def test_a_claim_that_names_no_end_gets_the_one_of_its_pool(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=0))
    own = claim("own", lifecycle={"shutdownTime": in_seconds(3600)})
    cluster.apply(claim("forgotten"), own)
    cluster.wait_ready("sandboxclaim", "forgotten")
    cluster.wait_ready("sandboxclaim", "own")
    # Also for those that exist already: clients that forgot them will not come back.
    cluster.kubectl("annotate", "swp", "pool", "sandbox.k8e.io/claim-seconds=1")
    cluster.wait_gone("sandboxclaim", "forgotten")
    cluster.wait_gone("sandbox", "forgotten")
    assert cluster.get("sandboxclaim", "own")


def test_an_expired_claim_stays_until_what_it_owned_is_gone_if_it_asks_for_that(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(), pool(replicas=0))
    cluster.apply(claim("last"))
    cluster.wait_ready("sandboxclaim", "last")
    cluster.patch("pod", "last", {"metadata": {"finalizers": ["example.com/hold"]}})
    ends = {"shutdownTime": in_seconds(0), "shutdownPolicy": "DeleteForeground"}
    cluster.patch("sandboxclaim", "last", {"spec": {"lifecycle": ends}})
    cluster.wait("pod", "last", lambda one: "deletionTimestamp" in one["metadata"])
    kept = cluster.get("sandboxclaim", "last")["metadata"]
    assert kept["finalizers"] == ["foregroundDeletion"]
    cluster.patch("pod", "last", {"metadata": {"finalizers": None}})
    cluster.wait_gone("sandboxclaim", "last")
