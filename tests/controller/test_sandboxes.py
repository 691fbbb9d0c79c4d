"""Sandbox, against a real API server. The names of the tests are the promises."""

from __future__ import annotations

import time
from typing import Any

import pytest

from k8e.controller.conditions import timestamp
from k8e.controller.resources import name_hash
from tests.controller.clusters import (
    POD,
    SandboxCluster,
    behaving,
    condition,
    eventually,
    sandbox,
)

NAME_HASH = "agents.x-k8s.io/sandbox-name-hash"
VOLUME = {
    "metadata": {"name": "work"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
}


def in_seconds(seconds: float) -> str:
    return timestamp(time.time() + seconds)


def test_a_sandbox_has_one_pod_of_its_name_and_says_so_exactly(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("simple"))
    found = cluster.wait_ready("sandbox", "simple")
    status = found["status"]
    ready = condition(found, "Ready")
    assert ready["reason"] == "DependenciesReady"
    assert ready["message"] == "Pod is Ready"
    assert ready["observedGeneration"] == 1
    assert condition(found, "Suspended")["reason"] == "NotSuspended"
    assert status["selector"] == f"{NAME_HASH}={name_hash('simple')}"
    assert status["podIPs"]
    assert "service" not in status
    pod = cluster.get("pod", "simple")
    assert pod["metadata"]["labels"] == {NAME_HASH: name_hash("simple")}
    [owner] = pod["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "name": "simple",
        "uid": found["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    assert pod["spec"]["containers"][0]["image"] == "example/x:1"
    assert cluster.find("service", "simple") is None


def test_a_sandbox_with_a_service_has_a_name_in_dns(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("named", service=True))
    found = cluster.wait_ready("sandbox", "named")
    assert condition(found, "Ready")["message"] == "Pod is Ready; Service Exists"
    assert found["status"]["serviceFQDN"] == f"named.{cluster.namespace}.svc.cluster.local"
    service = cluster.get("service", "named")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {NAME_HASH: name_hash("named")}
    assert [(port["name"], port["port"]) for port in service["spec"]["ports"]] == [
        ("p-8888-tcp", 8888)
    ]
    cluster.patch("service", "named", {"spec": {"selector": {"other": "x"}}})
    cluster.wait(
        "service",
        "named",
        lambda one: one["spec"]["selector"] == {NAME_HASH: name_hash("named")},
        "drift is repaired",
    )
    cluster.patch("sandbox", "named", {"spec": {"service": False}})
    cluster.wait_gone("service", "named")
    cluster.wait("sandbox", "named", lambda one: "service" not in one["status"])


def test_a_suspended_sandbox_has_no_pod_and_keeps_its_volumes(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("resting", service=True, volumeClaimTemplates=[VOLUME]))
    first = cluster.wait_ready("sandbox", "resting")
    before = cluster.get("pod", "resting")["metadata"]["uid"]
    volume = cluster.get("pvc", "work-resting")
    assert volume["metadata"]["ownerReferences"][0]["uid"] == first["metadata"]["uid"]
    cluster.patch("sandbox", "resting", {"spec": {"operatingMode": "Suspended"}})
    found = cluster.wait_reason("sandbox", "resting", "PodTerminated", of="Suspended")
    assert condition(found, "Suspended")["status"] == "True"
    assert condition(found, "Ready")["reason"] == "SandboxSuspended"
    assert condition(found, "Ready")["message"] == "Sandbox is suspended"
    assert "podIPs" not in found["status"]
    assert cluster.find("pod", "resting") is None
    assert cluster.get("service", "resting")
    cluster.patch("sandbox", "resting", {"spec": {"operatingMode": "Running"}})
    found = cluster.wait_ready("sandbox", "resting")
    assert condition(found, "Suspended")["reason"] == "NotSuspended"
    pod = cluster.get("pod", "resting")
    assert pod["metadata"]["uid"] != before
    claims = [one for one in pod["spec"]["volumes"] if "persistentVolumeClaim" in one]
    assert [one["persistentVolumeClaim"]["claimName"] for one in claims] == ["work-resting"]
    assert cluster.get("pvc", "work-resting")["metadata"]["uid"] == volume["metadata"]["uid"]


def test_somebody_elses_pod_of_that_name_blocks_suspension_and_is_left_alone(
    cluster: SandboxCluster,
) -> None:
    foreign = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "taken"}, "spec": POD}
    cluster.apply(foreign)
    cluster.apply(sandbox("taken", operatingMode="Suspended"))
    found = cluster.wait_reason("sandbox", "taken", "PodNotOwned", of="Suspended")
    assert condition(found, "Suspended")["status"] == "False"
    cluster.patch("sandbox", "taken", {"spec": {"operatingMode": "Running"}})
    found = cluster.wait_reason("sandbox", "taken", "ReconcilerError")
    assert "is not the sandbox's" in condition(found, "Ready")["message"]
    assert "ownerReferences" not in cluster.get("pod", "taken")["metadata"]


def test_a_pod_that_takes_its_time_keeps_its_sandbox_from_being_suspended(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(sandbox("slow"))
    cluster.wait_ready("sandbox", "slow")
    cluster.patch("pod", "slow", {"metadata": {"finalizers": ["example.com/hold"]}})
    cluster.patch("sandbox", "slow", {"spec": {"operatingMode": "Suspended"}})
    found = cluster.wait_reason("sandbox", "slow", "PodTerminating", of="Suspended")
    assert condition(found, "Suspended")["status"] == "False"
    assert condition(found, "Ready")["reason"] == "SandboxSuspended"
    cluster.patch("pod", "slow", {"metadata": {"finalizers": None}})
    cluster.wait_reason("sandbox", "slow", "PodTerminated", of="Suspended")


def test_a_pod_that_lost_the_label_by_which_it_is_followed_gets_it_back(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(sandbox("bare"))
    uid = cluster.wait_ready("sandbox", "bare")["metadata"]["uid"]
    cluster.kubectl("label", "pod", "bare", f"{NAME_HASH}-")
    pod = cluster.wait("pod", "bare", lambda one: NAME_HASH in one["metadata"].get("labels", {}))
    assert pod["metadata"]["ownerReferences"][0]["uid"] == uid
    # It is followed again: what becomes of it shows.
    cluster.kubectl("delete", "pod", "bare", "--wait=false")
    cluster.wait(
        "pod",
        "bare",
        lambda one: (
            one["metadata"]["uid"] != pod["metadata"]["uid"]
            and one["status"].get("phase") == "Running"
        ),
    )
    cluster.wait_ready("sandbox", "bare")


def test_an_unowned_pod_is_taken_over_only_where_its_label_permits_it(
    cluster: SandboxCluster,
) -> None:
    label = {"agents.x-k8s.io/adoptable": "true"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "free", "labels": label}}
    cluster.apply({**pod, "spec": POD})
    cluster.apply(sandbox("free"))
    found = cluster.wait_ready("sandbox", "free")
    owned = cluster.get("pod", "free")["metadata"]
    assert owned["ownerReferences"][0]["uid"] == found["metadata"]["uid"]
    assert owned["labels"][NAME_HASH] == name_hash("free")


def test_a_service_with_a_cluster_ip_is_refused(cluster: SandboxCluster) -> None:
    labels = {"agents.x-k8s.io/adoptable": "true"}
    service = {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}}
    cluster.apply({**service, "metadata": {"name": "routed", "labels": labels}})
    cluster.apply(sandbox("routed", service=True))
    found = cluster.wait_reason("sandbox", "routed", "ReconcilerError")
    assert "cluster IP" in condition(found, "Ready")["message"]


def test_a_second_pod_of_the_same_owner_stops_everything(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("double"))
    found = cluster.wait_ready("sandbox", "double")
    pod = cluster.get("pod", "double")
    metadata = {key: pod["metadata"][key] for key in ("labels", "ownerReferences")}
    second = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", **metadata}}
    cluster.apply({**second, "spec": POD})
    found = cluster.wait_reason("sandbox", "double", "MultiplePods")
    assert condition(found, "Ready")["status"] == "False"
    eventually("a warning", lambda: cluster.events("MultiplePods"))
    cluster.kubectl("delete", "pod", "other")
    cluster.wait_ready("sandbox", "double")


def test_a_pod_that_was_deleted_is_made_again(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("lasting"))
    cluster.wait_ready("sandbox", "lasting")
    before = cluster.get("pod", "lasting")["metadata"]["uid"]
    cluster.kubectl("delete", "pod", "lasting", "--wait=false")
    cluster.wait(
        "pod",
        "lasting",
        lambda pod: pod["metadata"]["uid"] != before and pod["status"].get("phase") == "Running",
    )
    found = cluster.wait_ready("sandbox", "lasting")
    assert condition(found, "Suspended")["reason"] == "NotSuspended"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_stays_and_is_never_replaced(
    cluster: SandboxCluster, phase: str
) -> None:
    cluster.apply(sandbox("ended", podTemplate=behaving(phase)))
    found = cluster.wait_reason("sandbox", "ended", f"Pod{phase}", of="Finished")
    assert condition(found, "Ready")["reason"] == f"Pod{phase}"
    before = cluster.get("pod", "ended")["metadata"]["uid"]
    cluster.patch("sandbox", "ended", {"metadata": {"labels": {"look": "again"}}})
    assert cluster.get("pod", "ended")["metadata"]["uid"] == before


def test_only_metadata_of_the_template_reaches_a_pod_that_runs(cluster: SandboxCluster) -> None:
    labels = {"app.example/a": "1", "app.example/b": "1", "agents.x-k8s.io/claim-uid": "forged"}
    cluster.apply(sandbox("labelled", podTemplate=behaving("Running", labels=labels)))
    cluster.wait_ready("sandbox", "labelled")
    pod = cluster.get("pod", "labelled")["metadata"]
    assert pod["labels"]["app.example/b"] == "1"
    assert "agents.x-k8s.io/claim-uid" not in pod["labels"]
    cluster.kubectl("label", "pod", "labelled", "somebody=else")
    change = {
        "metadata": {"labels": {"app.example/a": "2", "app.example/b": None}},
        "spec": {"containers": [{"name": "main", "image": "example/x:2"}]},
    }
    cluster.patch("sandbox", "labelled", {"spec": {"podTemplate": change}})
    found = cluster.wait(
        "pod", "labelled", lambda one: one["metadata"]["labels"].get("app.example/a") == "2"
    )
    assert "app.example/b" not in found["metadata"]["labels"]
    assert found["metadata"]["labels"]["somebody"] == "else"
    assert found["spec"]["containers"][0]["image"] == "example/x:1"


def test_at_its_time_a_sandbox_loses_its_pod_and_is_kept(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("kept", service=True, volumeClaimTemplates=[VOLUME]))
    cluster.wait_ready("sandbox", "kept")
    cluster.patch("sandbox", "kept", {"spec": {"shutdownTime": in_seconds(2)}})
    found = cluster.wait_reason("sandbox", "kept", "SandboxExpired")
    assert condition(found, "Ready")["status"] == "False"
    cluster.wait_gone("pod", "kept")
    cluster.wait_gone("service", "kept")
    assert set(cluster.get("sandbox", "kept")["status"]) == {"conditions"}
    assert cluster.get("pvc", "work-kept")


def test_at_its_time_a_sandbox_that_ended_still_says_how(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("over", podTemplate=behaving("Succeeded")))
    cluster.wait_reason("sandbox", "over", "PodSucceeded", of="Finished")
    cluster.patch("sandbox", "over", {"spec": {"shutdownTime": in_seconds(0)}})
    found = cluster.wait_reason("sandbox", "over", "SandboxExpired")
    assert condition(found, "Finished")["reason"] == "PodSucceeded"


def test_at_its_time_a_sandbox_goes_if_it_says_so(cluster: SandboxCluster) -> None:
    lifetime = {"shutdownTime": in_seconds(3), "shutdownPolicy": "Delete"}
    cluster.apply(sandbox("brief", volumeClaimTemplates=[VOLUME], **lifetime))
    cluster.wait_gone("sandbox", "brief")
    cluster.wait_gone("pod", "brief")
    eventually(
        "its volume goes", lambda: "deletionTimestamp" in cluster_volume(cluster, "work-brief")
    )


def cluster_volume(cluster: SandboxCluster, name: str) -> dict[str, object]:
    """Metadata of a volume claim; nobody removes its finalizer where no volume controller runs."""
    found = cluster.find("pvc", name)
    return found["metadata"] if found else {"deletionTimestamp": "gone"}


def test_volume_claim_templates_cannot_be_changed(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("fixed", volumeClaimTemplates=[VOLUME]))
    other = {**VOLUME, "metadata": {"name": "other"}}
    for change in ([other], []):
        said = cluster.refusal(sandbox("fixed", volumeClaimTemplates=change))
        assert "volumeClaimTemplates is immutable" in said
    assert "volumeClaimTemplates is immutable" in cluster.kubectl(
        *("patch", "sandbox", "fixed", "--type=merge", "-p"),
        '{"spec":{"volumeClaimTemplates":null}}',
        check=False,
    )


def test_a_pod_that_nobody_can_run_says_why_once(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("nowhere", podTemplate=behaving("Unschedulable")))
    found = cluster.wait(
        "sandbox",
        "nowhere",
        lambda one: "0/1 nodes are available" in condition(one, "Ready")["message"],
    )
    assert condition(found, "Ready")["reason"] == "DependenciesNotReady"
    assert condition(found, "PodScheduled")["reason"] == "Unschedulable"


def test_a_pod_that_the_api_server_refuses_is_told(cluster: SandboxCluster) -> None:
    cluster.apply(sandbox("classless", podTemplate={"spec": {**POD, "runtimeClassName": "none"}}))
    found = cluster.wait(
        "sandbox", "classless", lambda one: "RuntimeClass" in condition(one, "Ready")["message"]
    )
    assert condition(found, "Ready")["reason"] == "ReconcilerError"
    refused = {"spec": {**POD, "hostname": "not a name"}}
    cluster.apply(sandbox("invalid", podTemplate=refused))
    found = cluster.wait_reason("sandbox", "invalid", "InvalidConfiguration")
    assert "hostname" in condition(found, "Ready")["message"]


def test_a_bad_object_is_refused_with_the_name_of_the_field(cluster: SandboxCluster) -> None:
    assert "spec.operatingMode" in cluster.refusal(sandbox("bad", operatingMode="Asleep"))
    ports = [{"name": "main", "image": "x", "ports": [{"containerPort": "eighty"}]}]
    said = cluster.refusal(sandbox("bad", podTemplate={"spec": {"containers": ports}}))
    assert "containerPort" in said


def annotated(item: dict[str, Any], **marks: str) -> dict[str, Any]:
    """An object with annotations of our own group."""
    found = {f"sandbox.k8e.io/{name.replace('_', '-')}": value for name, value in marks.items()}
    return {**item, "metadata": {**item["metadata"], "annotations": found}}


def test_a_sandbox_without_traffic_is_suspended_and_sleeps_again_after_it_was_woken(
    cluster: SandboxCluster,
) -> None:
    mark = "sandbox.k8e.io/suspended-by"
    cluster.apply(annotated(sandbox("idle"), idle_seconds="2"))
    cluster.wait_reason("sandbox", "idle", "PodTerminated", of="Suspended")
    assert cluster.get("sandbox", "idle")["metadata"]["annotations"][mark] == "idle"
    eventually("an event", lambda: cluster.events("SandboxIdle"))
    for _ in range(2):
        # What the router does, and a person may do: the mark goes, so that a later stop stays one.
        cluster.patch("sandbox", "idle", {"spec": {"operatingMode": "Running"}})
        cluster.wait_ready("sandbox", "idle")
        woken = cluster.get("sandbox", "idle")["metadata"]["annotations"]
        assert mark not in woken
        assert "sandbox.k8e.io/last-active" in woken
        cluster.wait_reason("sandbox", "idle", "PodTerminated", of="Suspended")


def test_a_failed_pod_is_replaced_where_that_was_asked_for(cluster: SandboxCluster) -> None:
    failing = sandbox("again", podTemplate=behaving("Failed"))
    cluster.apply(annotated(failing, recreate_failed="true"))
    # The first replacement comes at once, the next after a pause.
    cluster.wait(
        "sandbox",
        "again",
        lambda one: (
            one["metadata"]["annotations"].get("sandbox.k8e.io/recreated") == "1"
            and "it will be replaced" in condition(one, "Ready")["message"]
        ),
    )
    found = cluster.get("sandbox", "again")
    assert condition(found, "Ready")["reason"] == "DependenciesNotReady"
    assert condition(found, "Finished")["status"] == ""
    cluster.patch("sandbox", "again", {"spec": {"podTemplate": behaving("Running")}})
    cluster.wait_ready("sandbox", "again")
    eventually("an event", lambda: cluster.events("PodRecreated"))


def test_the_alpha_version_is_understood(cluster: SandboxCluster) -> None:
    old = {**sandbox("old", replicas=1), "apiVersion": "agents.x-k8s.io/v1alpha1"}
    cluster.apply(old)
    cluster.wait_ready("sandbox", "old")
    cluster.patch("sandboxes.v1alpha1.agents.x-k8s.io", "old", {"spec": {"replicas": 0}})
    cluster.wait_reason("sandbox", "old", "PodTerminated", of="Suspended")


def test_kubectl_explains_and_lists(cluster: SandboxCluster) -> None:
    said = cluster.kubectl("explain", "sandbox.spec.podTemplate.spec.containers.image")
    assert "image" in said.lower()
    assert "FIELD: image <string>" in said
    cluster.apply(sandbox("listed"))
    cluster.wait_ready("sandbox", "listed")
    lines = cluster.kubectl("get", "sandbox").splitlines()
    assert lines[0].split() == ["NAME", "READY", "REASON", "AGE"]
    assert lines[1].split()[:3] == ["listed", "True", "DependenciesReady"]
    cluster.kubectl("wait", "--for=condition=Ready", "sandbox/listed", "--timeout=5s")
