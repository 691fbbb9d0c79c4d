"""The controller killed, doubled, cut off: it converges, and nothing is bound twice."""

from __future__ import annotations

import signal
import time

import pytest

from k8e.controller.conditions import timestamp
from tests.controller.clusters import (
    SandboxCluster,
    behaving,
    claim,
    pool,
    sandbox,
    template,
)
from tests.controller.invariants import check_bindings

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
    check_bindings(
        cluster, [f"c-{number}-{at}" for number in range(3) for at in range(CLAIMS // 3)]
    )
    assert cluster.stop_controller(process) == 0
    cluster.start_controller()


def test_two_controllers_at_once_bind_each_claim_once(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=4))
    cluster.wait_pool("pool", 4)
    # Neither waits for the other: as if a leader went on after it had lost its lease.
    second = cluster.start_controller("--leader-elect=false")
    names = [f"both-{number}" for number in range(CLAIMS)]
    cluster.apply(*(claim(name) for name in names))
    check_bindings(cluster, names)
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
    check_bindings(cluster, ["before", "after"], replicas=2)
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
    check_bindings(cluster, ["next"], replicas=1)


def test_claims_are_served_while_the_database_is_slow(cluster: SandboxCluster) -> None:
    cluster.apply(template(), pool(replicas=2))
    cluster.wait_pool("pool", 2)
    names = [f"slow-{number}" for number in range(4)]
    cluster.plane.pause("etcd", 0.5)
    cluster.apply(*(claim(name) for name in names))
    for _ in range(3):
        cluster.plane.pause("etcd", 0.5)
    check_bindings(cluster, names, replicas=2)


def test_pods_that_are_evicted_are_made_again_and_claims_keep_their_sandboxes(
    cluster: SandboxCluster,
) -> None:
    cluster.apply(template(), pool(replicas=2), claim("kept"))
    cluster.wait_ready("sandboxclaim", "kept")
    cluster.wait_pool("pool", 2)
    cluster.kubectl("delete", "pods", "--all", "--wait=false")
    check_bindings(cluster, ["kept"], replicas=2)


@pytest.mark.parametrize("wrong", [400.0, -400.0])
def test_a_clock_that_is_wrong_ends_nothing_early_or_late(
    cluster: SandboxCluster, wrong: float
) -> None:
    [leader] = cluster.controllers
    cluster.stop_controller(leader)
    process = cluster.start_controller("--leader-elect=false", clock=wrong)
    cluster.apply(template(podTemplate=behaving("NotReady")), pool(replicas=1), sandbox("on-time"))
    cluster.wait_ready("sandbox", "on-time")
    [member] = [one for one in cluster.list("sandbox") if one["metadata"]["name"] != "on-time"]
    soon = {"spec": {"shutdownTime": timestamp(time.time() + 4)}}
    cluster.patch("sandbox", "on-time", soon)
    assert cluster.get("pod", "on-time")
    cluster.wait_reason("sandbox", "on-time", "SandboxExpired")
    # A member that has not been ready for five minutes would be replaced; this one is young.
    assert cluster.get("sandbox", member["metadata"]["name"])
    cluster.stop_controller(process)
    cluster.start_controller()
