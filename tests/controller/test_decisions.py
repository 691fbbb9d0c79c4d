"""What objects become, decided without a cluster."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from k8e.controller import (
    blueprints,
    conditions,
    definitions,
    deployment,
    desired,
    policies,
    resources,
    upgrade,
)
from k8e.controller.candidates import Candidates
from k8e.controller.claims import expiry
from k8e.controller.conditions import Found
from k8e.controller.warm_pools import member_name
from tests.controller.clusters import claim, pool, sandbox, template

Object = dict[str, Any]
ANNOTATION_LIMIT = 262_144


def stored(item: Object, **metadata: Any) -> Object:
    """An object as an API server has it."""
    made = copy.deepcopy(item)
    made["metadata"] |= {
        "namespace": "default",
        "uid": f"uid-{item['metadata']['name']}",
        "resourceVersion": "7",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        **metadata,
    }
    return made


def pod_of(item: Object, phase: str = "Running", *, ready: bool = True) -> Object:
    status = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "podIPs": [{"ip": "10.0.0.1"}],
    }
    made = desired.pod(item)
    return {**made, "metadata": {**made["metadata"], "uid": "pod"}, "status": status}


@pytest.mark.parametrize(
    ("text", "expected"), [("", "811c9dc5"), ("a", "e40c292c"), ("foobar", "bf9cf968")]
)
def test_names_are_hashed_by_fnv_1a(text: str, expected: str) -> None:
    assert resources.name_hash(text) == expected


@pytest.mark.parametrize(
    ("phase", "ready", "reason", "message"),
    [
        ("Running", True, "DependenciesReady", "Pod is Ready"),
        ("Running", False, "DependenciesNotReady", "Pod is Running but not Ready"),
        ("Pending", False, "DependenciesNotReady", "Pod exists with phase: Pending"),
        ("Succeeded", False, "PodSucceeded", "Pod has succeeded"),
        ("Failed", False, "PodFailed", "Pod has failed"),
    ],
)
def test_ready_says_what_the_pod_does(phase: str, ready: bool, reason: str, message: str) -> None:
    item = stored(sandbox("one"))
    found = conditions.ready(item, Found(pods=[pod_of(item, phase, ready=ready)]))
    assert (found["reason"], found["message"]) == (reason, message)


def test_an_image_that_cannot_be_pulled_is_told_in_the_same_words_while_the_kubelet_tries() -> None:
    item = stored(sandbox("one"))
    said: set[str] = set()
    for reason in ("ErrImagePull", "ImagePullBackOff"):
        found = pod_of(item, "Pending", ready=False)
        waiting = {"waiting": {"reason": reason, "message": "changes"}}
        one = {"name": "main", "image": "example/x:1", "state": waiting}
        found["status"]["containerStatuses"] = [one]
        said.add(conditions.ready(item, Found(pods=[found]))["message"])
    assert said == {
        "Pod exists with phase: Pending: container main: the image example/x:1 cannot be pulled"
    }


def test_the_time_of_a_condition_changes_with_its_status_alone() -> None:
    item = stored(sandbox("one"))
    first = conditions.status(item, Found(), domain="x", now=1000)
    item["status"] = first
    later = conditions.status(item, Found(), domain="x", now=2000)
    assert later == first
    assert conditions.status_patch(item, later) == {}
    running = conditions.status(item, Found(pods=[pod_of(item)]), domain="x", now=3000)
    times = {one["type"]: one["lastTransitionTime"] for one in running["conditions"]}
    assert times["Ready"] == conditions.timestamp(3000)
    assert times["Suspended"] == conditions.timestamp(1000)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01t00:01:00z", 60.0),
        ("1970-01-01T01:01:00.123456789+01:00", 60.123456),
        ("0000-01-01T00:00:00Z", -62135596800.0),
    ],
)
def test_each_time_that_the_api_server_takes_is_understood(text: str, seconds: float) -> None:
    assert conditions.seconds_of(text) == pytest.approx(seconds)


def test_where_a_pod_went_can_wait_and_what_it_became_cannot() -> None:
    item = stored(sandbox("one"))
    pod = pod_of(item, "Pending", ready=False)
    pod["spec"]["nodeName"] = ""
    del pod["status"]["podIPs"]
    item["status"] = conditions.status(item, Found(pods=[pod]), domain="x", now=1)
    pod["spec"]["nodeName"] = "node"
    patch = conditions.status_patch(
        item, conditions.status(item, Found(pods=[pod]), domain="x", now=2)
    )
    assert patch
    assert conditions.may_wait(item, patch)
    patch = conditions.status_patch(
        item, conditions.status(item, Found(pods=[pod_of(item)]), domain="x", now=2)
    )
    assert not conditions.may_wait(item, patch)


def test_ports_of_a_service_are_those_of_containers_and_of_sidecars_once() -> None:
    port: Object = {"containerPort": 80}
    spec: Object = {
        "containers": [
            {"name": "a", "image": "x", "ports": [port, {**port, "protocol": "UDP"}]},
            {"name": "b", "image": "x", "ports": [port, {"name": "web", "containerPort": 81}]},
        ],
        "initContainers": [
            {"name": "c", "image": "x", "restartPolicy": "Always", "ports": [{"containerPort": 9}]},
            {"name": "d", "image": "x", "ports": [{"containerPort": 10}]},
        ],
    }
    item = stored(sandbox("one", podTemplate={"spec": spec}))
    names = [one["name"] for one in desired.service(item)["spec"]["ports"]]
    assert names == ["p-80-tcp", "p-80-udp", "web", "p-9-tcp"]


def test_a_sandbox_made_by_hand_does_not_choose_its_network_policy() -> None:
    labels = {resources.TEMPLATE_REF_HASH: resources.name_hash("strict")}
    item = stored(sandbox("one"), labels=labels)
    assert resources.TEMPLATE_REF_HASH not in desired.pod_metadata(item)[0]
    owner = resources.owner_reference(stored(pool()), resources.POOL)
    item["metadata"]["ownerReferences"] = [owner]
    assert desired.pod_metadata(item)[0][resources.TEMPLATE_REF_HASH] == labels.popitem()[1]


keys = st.sampled_from(["a", "b", "c", "agents.x-k8s.io/claim-uid", "example.com/x"])
maps = st.dictionaries(keys, st.sampled_from(["1", "2"]))


@given(maps, maps, maps, maps)
def test_a_metadata_patch_makes_the_pod_as_wanted_and_is_empty_then(
    first: dict[str, str], second: dict[str, str], third: dict[str, str], fourth: dict[str, str]
) -> None:
    def of(labels: dict[str, str], annotations: dict[str, str]) -> Object:
        metadata = {"labels": labels, "annotations": annotations}
        return stored(
            sandbox("one", podTemplate={"metadata": metadata, "spec": {"containers": []}})
        )

    old, new = of(first, third), of(second, fourth)
    pod = pod_of(old)
    pod["metadata"].setdefault("labels", {})["others"] = "stays"
    change = desired.metadata_patch(new, pod).get("metadata", {})
    for part, values in change.items():
        has = pod["metadata"].setdefault(part, {})
        for key, value in values.items():
            if value is None:
                del has[key]
            else:
                has[key] = value
    labels, annotations = desired.pod_metadata(new)
    assert pod["metadata"]["labels"] == {**labels, "others": "stays"}
    assert pod["metadata"].get("annotations", {}) == annotations
    assert desired.metadata_patch(new, pod) == {}


# Templates, pools and claims.


def member(version: str = "7") -> Object:
    made = blueprints.member(stored(pool()), stored(template()), "pool-abcde")
    return stored(made, resourceVersion=version)


def test_a_member_is_fresh_until_what_counts_of_its_template_changes() -> None:
    item, changed = member(), stored(template())
    changed["spec"]["networkPolicy"] = {"egress": []}
    changed["spec"]["podTemplate"]["metadata"] = {"labels": {"a": "b"}}
    assert blueprints.is_fresh(item, changed)
    item["metadata"]["labels"][resources.BLUEPRINT_HASH] = "of-another-controller"
    assert blueprints.is_fresh(item, changed)
    changed["spec"]["service"] = True
    assert not blueprints.is_fresh(item, changed)


def test_an_adoption_names_the_version_that_it_was_decided_on() -> None:
    taken = stored(claim("mine"), labels={resources.CREATED_BY: "somebody"})
    patch = blueprints.adoption(taken, member("41"), 0.0)["metadata"]
    assert patch["resourceVersion"] == "41"
    assert [one["uid"] for one in patch["ownerReferences"]] == ["uid-mine"]
    assert patch["labels"][resources.POOL_HASH] is None
    assert patch["labels"][resources.CREATED_BY] == "unknown"


def test_safe_defaults_hold_where_a_template_says_nothing() -> None:
    spec = blueprints.pod_spec(stored(template()))
    assert (spec["automountServiceAccountToken"], spec["dnsPolicy"]) == (False, "None")
    own = stored(template(networkPolicyManagement="Unmanaged"))
    assert "dnsPolicy" not in blueprints.pod_spec(own)
    own["spec"]["podTemplate"]["spec"] = {"containers": [], "automountServiceAccountToken": True}
    assert blueprints.pod_spec(own)["automountServiceAccountToken"] is True


def test_candidates_are_ready_ones_of_the_fullest_node_oldest_first() -> None:
    available: list[str] = []
    candidates = Candidates(available.append)

    def add(name: str, node: str, created: str, *, ready: bool = True) -> Object:
        item = member()
        item["metadata"] |= {"name": name, "uid": name, "creationTimestamp": created}
        status = {"type": "Ready", "status": str(ready)}
        item["status"] = {"conditions": [status], "nodeName": node, "podIPs": ["10.0.0.1"]}
        candidates.change(None, item)
        return item

    add("lonely", "one", "2026-01-01T00:00:00Z")
    young = add("young", "two", "2026-01-03T00:00:00Z")
    add("old", "two", "2026-01-02T00:00:00Z")
    add("unready", "three", "2025-01-01T00:00:00Z", ready=False)
    owner = "uid-pool"
    taken: list[str] = []
    while (found := candidates.take(owner, lambda _: True)) is not None:
        taken.append(found["metadata"]["name"])
    assert taken[0] == "old"
    assert sorted(taken) == ["lonely", "old", "unready", "young"]
    assert taken[-1] == "unready"
    candidates.release(young)
    candidates.change(young, None)
    assert candidates.take(owner, lambda _: True) is None


@pytest.mark.parametrize(
    ("policy", "env", "accepted"),
    [
        ("Disallowed", [{"name": "B"}], False),
        ("Allowed", [{"name": "B"}], True),
        ("Allowed", [{"name": "A"}], False),
        ("Overrides", [{"name": "A"}], True),
        ("Overrides", [{"name": "A", "containerName": "none"}], False),
    ],
)
def test_environment_variables_follow_the_templates_policy(
    policy: str, env: list[Object], accepted: bool
) -> None:
    spec = {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}]}
    wanted = claim("one", env=env)
    if not accepted:
        with pytest.raises(policies.Rejected):
            policies.inject_env(spec, wanted, policy)
        return
    made = policies.inject_env(spec, wanted, policy)["containers"][0]["env"]
    assert len(made) == len({one["name"] for one in made})
    assert spec["containers"][0]["env"] == [{"name": "A", "value": "1"}]


@pytest.mark.parametrize(
    ("policy", "names", "made"),
    [
        ("Disallowed", ["b"], None),
        ("Allowed", ["b"], ["a", "b"]),
        ("Allowed", ["a"], None),
        ("Overrides", ["a"], ["a"]),
        ("Overrides", ["b", "b"], None),
        ("Overrides", [""], None),
    ],
)
def test_volume_claims_follow_the_templates_policy(
    policy: str, names: list[str], made: list[str] | None
) -> None:
    def volume(name: str, size: str) -> Object:
        return {"metadata": {"name": name}, "spec": {"resources": {"requests": {"storage": size}}}}

    wanted = claim("one", volumeClaimTemplates=[volume(name, "2Gi") for name in names])
    has = [volume("a", "1Gi")]
    if made is None:
        with pytest.raises(policies.Rejected):
            policies.merge_volumes(has, wanted, policy)
        return
    merged = policies.merge_volumes(has, wanted, policy)
    assert [one["metadata"]["name"] for one in merged] == made
    sizes = {one["metadata"]["name"]: one["spec"]["resources"]["requests"] for one in merged}
    assert all(sizes[name] == {"storage": "2Gi"} for name in names)


def test_allowed_domains_are_words_of_the_config_map() -> None:
    assert policies.allowed_domains(None) == ("sandbox.users.io",)
    config = {"data": {"allowed-label-domains": "a.example, B.example\nc.example"}}
    assert policies.allowed_domains(config) == ("a.example", "b.example", "c.example")


def test_a_claim_ends_at_the_earlier_of_its_two_times() -> None:
    lifecycle = {"shutdownTime": "2026-01-01T00:01:00Z", "ttlSecondsAfterFinished": 10}
    item = stored(claim("one", lifecycle=lifecycle))
    assert expiry(item) == conditions.seconds_of("2026-01-01T00:01:00Z")
    finished = {"type": "Finished", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    item["status"] = {"conditions": [finished]}
    assert expiry(item) == conditions.seconds_of("2026-01-01T00:00:10Z")
    assert expiry(stored(claim("two"))) is None


def test_names_of_members_fit_however_long_their_pools_name_is() -> None:
    assert len(member_name("x" * 200)) == 63
    assert member_name("pool").startswith("pool-")


# Manifests.


@pytest.mark.parametrize("part", deployment.PARTS)
def test_manifests_are_rendered_from_one_source(part: str, pytestconfig: pytest.Config) -> None:
    name = "manifest.yaml" if part == "core" else f"{part}.yaml"
    file = pytestconfig.rootpath / "deploy/agent-sandbox" / name
    told = f"k8e manifests render {part} > deploy/agent-sandbox/{name}"
    assert file.read_text("utf-8") == deployment.render(part), told


def test_each_test_that_the_reference_names_exists(pytestconfig: pytest.Config) -> None:
    page = (pytestconfig.rootpath / "docs/reference/agent-sandbox.md").read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    files = (pytestconfig.rootpath / "tests").rglob("test_*.py")
    there = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 20
    assert named <= there, named - there


def test_definitions_fit_into_the_annotation_of_kubectl_apply() -> None:
    for item in (*definitions.core(), *definitions.extensions(), *definitions.legacy()):
        assert len(json.dumps(item, separators=(",", ":"))) < ANNOTATION_LIMIT


def test_old_manifests_get_todays_form() -> None:
    old = """
apiVersion: agents.x-k8s.io/v1alpha1
kind: Sandbox
metadata: {name: one}
spec: {replicas: 0, podTemplate: {spec: {containers: []}}}
---
apiVersion: agents.x-k8s.io/v1alpha1
kind: SandboxTemplate
metadata: {name: base}
spec: {template: {spec: {containers: []}}}
---
apiVersion: agents.x-k8s.io/v1alpha1
kind: SandboxWarmPool
metadata: {name: warm}
spec: {size: 3, template: base}
---
apiVersion: agents.x-k8s.io/v1alpha1
kind: SandboxClaim
metadata: {name: short, namespace: team}
spec: {template: base}
---
apiVersion: extensions.agents.x-k8s.io/v1alpha1
kind: SandboxClaim
metadata: {name: long}
spec: {sandboxTemplateRef: {name: base}, warmpool: warm}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: other}
"""
    made, notes = upgrade.upgrade(list(yaml.safe_load_all(old)))
    found = {(one["kind"], one["metadata"]["name"]): one for one in made}
    assert found["Sandbox", "one"]["spec"]["operatingMode"] == "Suspended"
    assert "podTemplate" in found["SandboxTemplate", "base"]["spec"]
    assert found["SandboxWarmPool", "warm"]["spec"] == {
        "replicas": 3,
        "sandboxTemplateRef": {"name": "base"},
    }
    shadow = found["SandboxWarmPool", "shadow-pool-base"]
    assert shadow["metadata"]["namespace"] == "team"
    assert shadow["spec"]["replicas"] == 0
    assert found["SandboxClaim", "short"]["spec"]["warmPoolRef"] == {"name": "shadow-pool-base"}
    assert found["SandboxClaim", "long"]["spec"] == {"warmPoolRef": {"name": "warm"}}
    assert found["ConfigMap", "other"]
    assert all(
        one["apiVersion"].endswith("v1beta1") for key, one in found.items() if key[0] != "ConfigMap"
    )
    assert len(notes) >= 5
