"""What goes beyond upstream, decided without a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from k8e.controller import additions, blueprints, conditions, environment, policies, resources
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
    # Traffic that is dated in the future does not keep a sandbox awake for ever.
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


# Variables for a sandbox that runs.


def late(**spec: Any) -> Object:
    return annotated(template(envVarsInjectionPolicy="Allowed", **spec), **{"late-env": "true"})


def test_variables_are_a_file_that_a_shell_reads_whatever_they_hold(tmp_path: Path) -> None:
    value = "it's $HOME; `rm -rf`\nnext line"
    env = [{"name": "ODD", "value": value}, {"name": "EMPTY"}]
    text = environment.text_of(stored(claim("one", env=env)), late())
    assert text is not None
    file = tmp_path / "env"
    file.write_text(text)
    command = f'. {file}; printf \'%s|%s\' "$ODD" "$EMPTY"'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == f"{value}|"


@pytest.mark.parametrize(
    "variable",
    [
        {"name": "not.a.name", "value": "x"},
        {"name": "A", "value": "x", "containerName": "other"},
        {"name": "A", "value": "x" * 70_000},
    ],
)
def test_variables_that_no_file_can_give_need_a_new_sandbox(variable: Object) -> None:
    assert environment.text_of(stored(claim("one", env=[variable])), late()) is None
    plain = stored(claim("one", env=[{"name": "A", "value": "x"}]))
    assert environment.text_of(plain, stored(template())) is None


def test_a_template_that_asks_for_late_variables_makes_other_pods_than_before() -> None:
    old = stored(blueprints.member(stored(pool()), stored(template()), "m"))
    assert not environment.has_file(old)
    assert not blueprints.is_fresh(old, late())
    new = stored(blueprints.member(stored(pool()), late(), "m"))
    assert environment.has_file(new)
    assert blueprints.is_fresh(new, late())
    assert blueprints.is_made_of(new, late())


def test_a_claim_does_not_write_the_file_past_its_templates_policy() -> None:
    forged = claim("one", additionalPodMetadata={"annotations": {environment.ENV: "export A=1"}})
    with pytest.raises(policies.Rejected, match="reserved"):
        policies.check_metadata(stored(forged), ["sandbox.users.io"])
    wanted = stored(claim("one", env=[{"name": "A", "value": "x"}]))
    closed = late()
    closed["spec"]["envVarsInjectionPolicy"] = "Disallowed"
    with pytest.raises(policies.Rejected, match="Disallowed"):
        blueprints.check_late_env(wanted, closed)
