"""What the controller counts, whatever users write into their objects."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k8e.controller import metrics
from k8e.controller.metrics import Metrics
from k8e.controller.resources import LAUNCH_TYPE, TEMPLATE_REF
from tests.controller.clusters import claim, sandbox
from tests.controller.test_decisions import stored

Object = dict[str, Any]


def ready(template: str, launch: str = "warm") -> Object:
    item = stored(
        sandbox("one"), annotations={TEMPLATE_REF: template}, labels={LAUNCH_TYPE: launch}
    )
    return {**item, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def words(counted: Metrics, family: str, label: str) -> set[str]:
    families = {one.name: one for one in text_string_to_metric_families(counted.text().decode())}
    return {one.labels[label] for one in families[family].samples}


def test_words_of_users_make_a_bounded_number_of_series(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 50
    monkeypatch.setattr(metrics, "_MOST_SERIES", most)
    counted = Metrics()
    new = stored(sandbox("one"))
    for number in range(2 * most):
        item = ready(f"template-{number}", f"launch-{number}")
        counted.sandbox_is_ready(new, item, 2e9)
        counted.claim_is_ready(stored(claim("mine", pool=f"pool-{number}")), item)
    made = words(counted, "agent_sandbox_creation_latency_ms", "sandbox_template")
    assert len(made) <= most
    assert {"template-0", "others"} <= made
    pools = words(counted, "agent_sandbox_claim_creation", "warmpool_name")
    assert len(made) + len(pools) <= most + 2
    assert words(counted, "agent_sandbox_creation_latency_ms", "launch_type") == {"unknown"}


def test_a_word_that_is_no_name_is_not_kept() -> None:
    counted = Metrics()
    counted.sandbox_is_ready(stored(sandbox("one")), ready("x" * 100_000), 2e9)
    made = words(counted, "agent_sandbox_creation_latency_ms", "sandbox_template")
    assert made == {"unknown"}
    assert len(counted.text()) < 20_000
