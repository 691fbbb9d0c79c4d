"""What goes beyond upstream, decided without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from k8e.controller import additions, blueprints, conditions, resources
from k8e.controller.conditions import Found, timestamp
from k8e.controller.warm_pools import Pace
from tests.controller.clusters import claim, pool, sandbox, template
from tests.controller.test_decisions import pod_of, stored

Object = dict[str, Any]
BEGAN = conditions.seconds_of("2026-01-01T00:00:00Z")


def annotated(item: Object, **marks: str) -> Object:
    return stored(item, annotations={f"sandbox.k8e.io/{name}": v for name, v in marks.items()})


def ready(item: Object, since: float = BEGAN) -> Object:
    told = {"type": "Ready", "status": "True", "lastTransitionTime": timestamp(since)}
    return {**item, "status": {"conditions": [told]}}


def test_a_sandbox_is_idle_from_its_last_traffic_on_or_from_when_it_became_ready() -> None:
    item = ready(annotated(sandbox("one"), **{"idle-seconds": "60"}))
    assert additions.idle_left(item, BEGAN + 10) == 50
    item["metadata"]["annotations"][additions.LAST_ACTIVE] = timestamp(BEGAN + 30)
    assert additions.idle_left(item, BEGAN + 40) == 50
    # Whoever dates traffic in the future does not keep a sandbox awake for ever.
    item["metadata"]["annotations"][additions.LAST_ACTIVE] = timestamp(BEGAN + 10_000)
    assert additions.idle_left(item, BEGAN + 40) == 60
    assert additions.idle_left(ready(stored(sandbox("two"))), BEGAN + 10_000) is None


def test_idle_members_of_a_pool_are_not_suspended() -> None:
    owner = resources.owner_reference(stored(pool()), resources.POOL)
    item = ready(annotated(sandbox("one"), **{"idle-seconds": "60"}))
    item["metadata"]["ownerReferences"] = [owner]
    assert additions.idle_left(item, BEGAN + 1000) is None


def test_a_member_that_is_claimed_counts_as_used_in_that_moment() -> None:
    made = blueprints.member(stored(pool()), annotated(template(), **{"idle-seconds": "60"}), "m")
    taken = annotated(claim("mine"), **{"idle-seconds": "9000", "recreate-failed": "true"})
    marks = blueprints.adoption(taken, stored(made), BEGAN)["metadata"]["annotations"]
    assert marks[additions.IDLE_SECONDS] == "60", "the template's word stands"
    assert marks[additions.RECREATE_FAILED] == "true"
    assert marks[additions.LAST_ACTIVE] == timestamp(BEGAN)
    plain = blueprints.member(stored(pool()), stored(template()), "m")
    marks = blueprints.adoption(stored(claim("mine")), stored(plain), BEGAN)["metadata"]
    assert not any(name.startswith("sandbox.k8e.io/") for name in marks["annotations"])


@pytest.mark.parametrize(
    ("before", "lived", "pause"),
    [("0", 5, 0), ("1", 5, 10), ("3", 5, 40), ("30", 5, 300), ("30", 700, 0), ("nonsense", 5, 0)],
)
def test_a_failed_pod_is_replaced_after_pauses_that_double(
    before: str, lived: float, pause: float
) -> None:
    item = annotated(sandbox("one"), **{"recreate-failed": "true", "recreated": before})
    pod = pod_of(item, "Failed", ready=False)
    pod["metadata"]["creationTimestamp"] = timestamp(BEGAN)
    pod["status"]["conditions"][0]["lastTransitionTime"] = timestamp(BEGAN + lived)
    assert additions.is_replaced(item, pod)
    assert additions.replacement(item, pod, BEGAN + lived).left == pause


def test_a_pod_that_will_be_replaced_is_not_told_as_the_end() -> None:
    item = annotated(sandbox("one"), **{"recreate-failed": "true"})
    pod = pod_of(item, "Failed", ready=False)
    found = Found(pods=[pod], replaced_in=10.0)
    status = conditions.status(item, found, domain="x", now=BEGAN)
    reasons = {one["type"]: one["reason"] for one in status["conditions"]}
    assert reasons["Ready"] == "DependenciesNotReady"
    assert "Finished" not in reasons


def test_a_claim_without_an_end_gets_its_pools() -> None:
    holder = annotated(pool(), **{"claim-seconds": "100"})
    item = stored(claim("one"))
    assert additions.claim_end(item, holder) == (BEGAN + 100, "Delete")
    own = stored(claim("two", lifecycle={"ttlSecondsAfterFinished": 1}))
    assert additions.claim_end(own, holder) is None
    assert additions.claim_end(item, stored(pool())) is None
    assert additions.claim_end(item, None) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("idle-seconds", "soon"),
        ("idle-seconds", "-1"),
        ("claim-seconds", "nan"),
        ("replenish-per-second", "inf"),
        ("recreate-failed", "yes"),
        ("claim-shutdown-policy", "Burn"),
    ],
)
def test_an_annotation_that_means_nothing_is_told_by_its_name(name: str, value: str) -> None:
    item = annotated(sandbox("one"), **{name: value})
    assert f"sandbox.k8e.io/{name}" in additions.invalid(item)
    assert additions.invalid(stored(sandbox("two"))) == ""


def test_a_pool_is_filled_no_sooner_and_no_faster_than_it_says() -> None:
    plain, slow = stored(pool()), annotated(pool(), **{"replenish-per-second": "2"})
    assert Pace().allow(plain, 50, 0.0) == (50, None)
    pace = Pace()
    assert pace.allow(slow, 5, 0.0) == (2, 0.5)
    assert pace.allow(slow, 3, 0.5) == (1, 0.5)
    assert pace.allow(slow, 2, 10.0) == (2, None)
    late = annotated(pool(), **{"replenish-delay-seconds": "30"})
    pace = Pace()
    assert pace.allow(late, 5, 0.0) == (5, None), "a new pool is filled at once"
    assert pace.allow(late, 0, 1.0) == (0, None)
    assert pace.allow(late, 1, 10.0) == (0, 30.0)
    assert pace.allow(late, 2, 30.0) == (0, 10.0)
    assert pace.allow(late, 2, 40.0) == (2, None)
    assert pace.allow(late, 0, 41.0) == (0, None)
    late["spec"]["replicas"] = 9
    assert pace.allow(late, 8, 42.0) == (8, None), "a pool that grows is filled at once"
