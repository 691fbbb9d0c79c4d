"""The controller killed, doubled, cut off: it converges, and nothing is bound twice."""

from __future__ import annotations

import signal
from collections import defaultdict
from typing import Any

from k8e.kubernetes.api import entries, section
from tests.controller.clusters import SandboxCluster, claim, eventually, pool, template

CLAIMS = 12


def test_a_controller_that_is_killed_while_it_binds_leaves_nothing_half_done(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(), pool(replicas=4))
    cluster.wait_pool("pool", 4)
    [process] = cluster.controllers
    for number in range(3):
        cluster.apply(*(claim(f"c-{number}-{at}") for at in range(CLAIMS // 3)))
        cluster.stop_controller(process, signal.SIGKILL)
        process = cluster.start_controller("--leader-elect=false")
    _check(cluster, [f"c-{number}-{at}" for number in range(3) for at in range(CLAIMS // 3)])
    assert cluster.stop_controller(process) == 0
    cluster.start_controller()


def test_two_controllers_at_once_bind_each_claim_once(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=4))
    cluster.wait_pool("pool", 4)
    # Neither waits for the other: as if a leader went on after it had lost its lease.
    second = cluster.start_controller("--leader-elect=false")
    names = [f"both-{number}" for number in range(CLAIMS)]
    cluster.apply(*(claim(name) for name in names))
    _check(cluster, names)
    cluster.stop_controller(second)


def test_an_api_server_that_restarts_is_followed_again(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=2))
    cluster.wait_pool("pool", 2)
    # Without a lease: who cannot renew one for ten seconds stops, and here nobody starts it again.
    [leader] = cluster.controllers
    cluster.stop_controller(leader)
    process = cluster.start_controller("--leader-elect=false")
    cluster.apply(claim("before"))
    cluster.wait_ready("sandboxclaim", "before")
    cluster.plane.restart_api_server()
    cluster.apply(claim("after"))
    _check(cluster, ["before", "after"], replicas=2)
    assert process.poll() is None
    cluster.stop_controller(process)
    cluster.start_controller()


def test_a_second_controller_waits_and_takes_over(cluster: SandboxCluster) -> None:
    [first] = cluster.controllers
    cluster.start_controller()
    cluster.apply(template(), pool(replicas=1))
    cluster.wait_pool("pool", 1)
    cluster.stop_controller(first)
    cluster.apply(claim("next"))
    _check(cluster, ["next"], replicas=1)


def _check(cluster: SandboxCluster, names: list[str], *, replicas: int = 4) -> None:
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
