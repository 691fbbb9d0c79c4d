"""SandboxWarmPool and SandboxTemplate, against a real API server."""

from __future__ import annotations

import time
from typing import Any

from k8e.controller.conditions import seconds_of, timestamp
from k8e.controller.resources import name_hash
from tests.controller.clusters import (
    SandboxCluster,
    behaving,
    claim,
    condition,
    eventually,
    pool,
    sandbox,
    template,
)

NEW_POD = {"containers": [{"name": "main", "image": "example/x:2"}]}


def images(cluster: SandboxCluster) -> list[str]:
    listed = cluster.list("sandbox")
    return sorted(
        one["spec"]["podTemplate"]["spec"]["containers"][0]["image"]
        for one in listed
        if "deletionTimestamp" not in one["metadata"]
    )


def test_a_pool_follows_its_number_in_both_directions(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=3))
    found = cluster.wait_pool("pool", 3)
    assert found["status"]["selector"] == f"agents.x-k8s.io/warm-pool-sandbox={name_hash('pool')}"
    assert all(one["metadata"]["generateName"] == "pool-" for one in cluster.list("sandbox"))
    cluster.kubectl("scale", "swp/pool", "--replicas=1")
    cluster.wait_pool("pool", 1)
    eventually("the others go", lambda: len(cluster.list("sandbox")) == 1)


def test_a_member_that_was_deleted_is_replaced(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=2))
    cluster.wait_pool("pool", 2)
    name = cluster.list("sandbox")[0]["metadata"]["name"]
    cluster.kubectl("delete", "sandbox", name)
    eventually(
        "another one",
        lambda: len(cluster.list("sandbox")) == 2 and cluster.find("sandbox", name) is None,
    )


def test_members_that_are_not_ready_go_first(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=1))
    cluster.wait_pool("pool", 1)
    [first] = cluster.list("sandbox")
    cluster.apply(template(podTemplate=behaving("NotReady")), pool(replicas=3))
    eventually("unready ones", lambda: len(cluster.list("sandbox")) == 3)
    cluster.kubectl("scale", "swp/pool", "--replicas=1")
    eventually("they go", lambda: len(cluster.list("sandbox")) == 1)
    assert cluster.list("sandbox")[0]["metadata"]["name"] == first["metadata"]["name"]


def test_recreate_replaces_idle_members_and_leaves_claimed_ones(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=2, updateStrategy={"type": "Recreate"}))
    cluster.wait_pool("pool", 2)
    cluster.apply(claim("mine"))
    name = cluster.wait_ready("sandboxclaim", "mine")["status"]["sandbox"]["name"]
    cluster.wait_pool("pool", 2)
    cluster.apply(template(podTemplate={"spec": NEW_POD}))
    wanted = ["example/x:1", "example/x:2", "example/x:2"]
    eventually("new ones", lambda: images(cluster) == wanted)
    assert cluster.get("sandbox", name)
    cluster.wait_pool("pool", 2)


def test_on_replenish_keeps_idle_members_until_they_are_claimed(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=1))
    cluster.wait_pool("pool", 1)
    [old] = cluster.list("sandbox")
    cluster.apply(template(podTemplate={"spec": NEW_POD}))
    cluster.apply(claim("mine"))
    found = cluster.wait_ready("sandboxclaim", "mine")
    assert found["status"]["sandbox"]["name"] == old["metadata"]["name"]
    eventually("a new one", lambda: images(cluster) == ["example/x:1", "example/x:2"])


def test_metadata_of_a_template_makes_no_member_stale(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=1, updateStrategy={"type": "Recreate"}))
    cluster.wait_pool("pool", 1)
    [before] = cluster.list("sandbox")
    cluster.apply(template(podTemplate=behaving("Running"), envVarsInjectionPolicy="Allowed"))
    cluster.kubectl("scale", "swp/pool", "--replicas=2")
    cluster.wait_pool("pool", 2)
    assert before["metadata"]["name"] in {
        one["metadata"]["name"] for one in cluster.list("sandbox")
    }


def test_a_pool_without_a_template_keeps_its_members_and_makes_none(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(), pool(replicas=1))
    cluster.wait_pool("pool", 1)
    cluster.kubectl("delete", "sandboxtemplate", "template")
    cluster.kubectl("scale", "swp/pool", "--replicas=2")
    cluster.wait("swp", "pool", lambda one: one["status"].get("observedGeneration") == 2)
    assert len(cluster.list("sandbox")) == 1
    cluster.apply(template())
    cluster.wait_pool("pool", 2)


def test_a_pool_that_gets_another_template_is_made_of_that_one(cluster: SandboxCluster) -> None:
    cluster.apply(template("one"), template("two", podTemplate={"spec": NEW_POD}))
    cluster.apply(pool("pool", 2, "one", updateStrategy={"type": "Recreate"}))
    cluster.wait_pool("pool", 2)
    cluster.apply(pool("pool", 2, "two", updateStrategy={"type": "Recreate"}))
    eventually("new ones", lambda: images(cluster) == ["example/x:2", "example/x:2"])
    cluster.wait_pool("pool", 2)


def age(cluster: SandboxCluster) -> None:
    """Make the members of a pool look as if they had not been ready for ten minutes."""
    long_ago = timestamp(time.time() - 600)
    for one in cluster.list("sandbox"):
        told = [{**found, "lastTransitionTime": long_ago} for found in one["status"]["conditions"]]
        name = one["metadata"]["name"]
        cluster.patch("sandbox", name, {"status": {"conditions": told}}, "--subresource=status")


def test_a_member_that_does_not_become_ready_is_replaced(cluster: SandboxCluster) -> None:
    cluster.apply(template(podTemplate=behaving("NotReady")), pool(replicas=1))
    [stuck] = eventually("a member", lambda: [one for one in cluster.list("sandbox") if told(one)])
    age(cluster)
    cluster.wait_gone("sandbox", stuck["metadata"]["name"])
    eventually("another one", lambda: len(cluster.list("sandbox")) == 1)


def test_a_member_for_which_no_node_has_room_is_kept_with_a_warning(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(podTemplate=behaving("Unschedulable")), pool(replicas=1))

    def unscheduled() -> list[dict[str, Any]]:
        return [
            one
            for one in cluster.list("sandbox")
            if condition(one, "PodScheduled")["reason"] == "Unschedulable"
        ]

    [stuck] = eventually("a member", unscheduled)
    age(cluster)
    eventually("a warning", lambda: cluster.events("WarmPoolNotProgressing"))
    assert (
        cluster.get("sandbox", stuck["metadata"]["name"])["metadata"]["uid"]
        == (stuck["metadata"]["uid"])
    )


def told(item: dict[str, Any]) -> bool:
    return condition(item, "Ready")["status"] == "False"


def test_members_that_a_deleted_pool_left_are_taken_in_and_forged_ones_are_not(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(), pool(replicas=2))
    cluster.wait_pool("pool", 2)
    members = cluster.list("sandbox")
    cluster.kubectl("delete", "swp", "pool", "--cascade=orphan")
    eventually(
        "they have no owner",
        lambda: not any("ownerReferences" in one["metadata"] for one in cluster.list("sandbox")),
    )
    forged = sandbox("forged", podTemplate={"spec": NEW_POD})
    forged["metadata"]["labels"] = members[0]["metadata"]["labels"]
    cluster.apply(forged)
    cluster.apply(pool(replicas=2))
    cluster.wait_gone("sandbox", "forged")
    cluster.wait_pool("pool", 2)
    names = {one["metadata"]["name"] for one in cluster.list("sandbox")}
    assert names == {one["metadata"]["name"] for one in members}


def test_a_claim_gets_no_stale_member_of_a_pool_that_is_recreated(cluster: SandboxCluster) -> None:
    stale = "example.com/hold"
    cluster.apply(template(), pool(replicas=1, updateStrategy={"type": "Recreate"}))
    cluster.wait_pool("pool", 1)
    [old] = cluster.list("sandbox")
    name = old["metadata"]["name"]
    cluster.patch("sandbox", name, {"metadata": {"finalizers": [stale]}})
    cluster.apply(template(podTemplate={"spec": NEW_POD}))
    cluster.apply(claim("mine"))
    given = cluster.wait_ready("sandboxclaim", "mine")["status"]["sandbox"]["name"]
    assert given != name
    cluster.patch("sandbox", name, {"metadata": {"finalizers": None}})


def test_a_member_that_a_claim_took_is_replaced_no_sooner_than_the_pool_says(
    cluster: SandboxCluster,
) -> None:
    slow = pool(replicas=1)
    slow["metadata"]["annotations"] = {"sandbox.k8e.io/replenish-delay-seconds": "3"}
    cluster.apply(template(), slow)
    cluster.wait_pool("pool", 1)
    cluster.apply(claim("mine"))
    taken = cluster.wait_ready("sandboxclaim", "mine")["status"]["sandbox"]["name"]
    cluster.wait_pool("pool", 0)
    cluster.wait_pool("pool", 1)
    [new] = [one for one in cluster.list("sandbox") if one["metadata"]["name"] != taken]
    made = seconds_of(new["metadata"]["creationTimestamp"])
    claimed = cluster.get("sandboxclaim", "mine")["metadata"]["creationTimestamp"]
    assert made - seconds_of(claimed) >= 2, "whole seconds: a delay of 3 shows as 2 at least"


def test_two_pools_do_not_give_each_others_sandboxes(cluster: SandboxCluster) -> None:
    cluster.apply(template("one"), template("two", podTemplate={"spec": NEW_POD}))
    cluster.apply(pool("one", 1, "one"), pool("two", 1, "two"))
    cluster.wait_pool("one", 1)
    cluster.wait_pool("two", 1)
    cluster.apply(claim("first", "one"), claim("second", "two"))
    for name, prefix in (("first", "one-"), ("second", "two-")):
        found = cluster.wait_ready("sandboxclaim", name)
        assert found["status"]["sandbox"]["name"].startswith(prefix)


def test_a_deleted_pool_takes_idle_sandboxes_with_it(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=2))
    cluster.wait_pool("pool", 2)
    cluster.apply(claim("mine"))
    name = cluster.wait_ready("sandboxclaim", "mine")["status"]["sandbox"]["name"]
    cluster.wait_pool("pool", 2)
    cluster.kubectl("delete", "swp", "pool")
    eventually(
        "idle ones go",
        lambda: [one["metadata"]["name"] for one in cluster.list("sandbox")] == [name],
    )


# Network policies.


def test_a_template_has_a_safe_network_policy(cluster: SandboxCluster) -> None:
    cluster.apply(template("safe"))
    found = cluster.wait("networkpolicy", "safe-network-policy", bool)["spec"]
    label = "agents.x-k8s.io/sandbox-template-ref-hash"
    assert found["podSelector"]["matchLabels"] == {label: name_hash("safe")}
    assert found["policyTypes"] == ["Ingress", "Egress"]
    [ingress] = found["ingress"]
    [peer] = ingress["from"]
    assert peer["podSelector"]["matchLabels"] == {"app": "sandbox-router"}
    names = peer["namespaceSelector"]["matchLabels"]
    assert names == {"kubernetes.io/metadata.name": "agent-sandbox-system"}
    [egress] = found["egress"]
    assert "169.254.0.0/16" in egress["to"][0]["ipBlock"]["except"]
    cluster.wait("sandboxtemplate", "safe", lambda one: label in one["metadata"].get("labels", {}))


def test_a_network_policy_follows_its_template(cluster: SandboxCluster) -> None:
    cluster.apply(template("own"))
    cluster.wait("networkpolicy", "own-network-policy", bool)
    rule = {"ports": [{"port": 443}], "to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}
    cluster.apply(template("own", networkPolicy={"egress": [rule]}))
    found = cluster.wait(
        "networkpolicy", "own-network-policy", lambda one: "ingress" not in one["spec"]
    )
    assert found["spec"]["egress"][0]["to"] == rule["to"]
    cluster.patch("networkpolicy", "own-network-policy", {"spec": {"egress": []}})
    cluster.wait("networkpolicy", "own-network-policy", lambda one: one["spec"].get("egress"))
    cluster.apply(template("own", networkPolicyManagement="Unmanaged"))
    cluster.wait_gone("networkpolicy", "own-network-policy")


def test_somebody_elses_network_policy_is_left_alone(cluster: SandboxCluster) -> None:
    policy: dict[str, Any] = {"podSelector": {}, "policyTypes": ["Ingress"]}
    cluster.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "held-network-policy"},
            "spec": policy,
        }
    )
    cluster.apply(template("held"))
    eventually("a warning", lambda: cluster.events("NetworkPolicyNotOwned"))
    assert cluster.get("networkpolicy", "held-network-policy")["spec"] == policy
