"""Metrics: Prometheus can read them, and nobody outside can make a series."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k8e import metrics
from k8e.egress import denials

SERIES = {
    "k8e_egress_denials_total": ("reason", metrics.DENIALS, metrics.count_denial),
    "k8e_egress_dns_queries_total": ("outcome", metrics.QUERIES, metrics.count_query),
    "k8e_egress_connections_total": ("outcome", metrics.CONNECTIONS, metrics.count_connection),
    "k8e_limits_reached_total": ("limit", metrics.LIMITS, metrics.count_limit),
    "k8e_pool_claims_total": ("outcome", metrics.CLAIMS, metrics.count_claim),
}
DISK = (
    "total",
    "free",
    "kept_free",
    "promised",
    "reserve",
    "reserve_held",
    "workspaces",
    "held_back",
    "broken",
)
NUMBERS = (
    "k8e_sessions",
    "k8e_pool_ready",
    "k8e_removals_pending",
    *(f"k8e_disk_{name}" for name in DISK),
)
TIMES = ("k8e_claim_seconds_count", "k8e_claim_seconds_sum")
BUCKETS = "k8e_claim_seconds_bucket"


def read() -> dict[tuple[str, str, str], float]:
    """Every sample by its name, its label and the label's value, as a scraper reads it."""
    found: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name == BUCKETS:
                continue
            ((label, value),) = sample.labels.items() or (("", ""),)
            found[sample.name, label, value] = sample.value
    return found


def test_every_series_is_there_from_the_start_and_no_other() -> None:
    expected = {
        (name, label, word)
        for name, (label, words, _) in SERIES.items()
        for word in (*words, metrics.OTHER)
    }
    expected |= {(name, "start", word) for name in TIMES for word in metrics.STARTS}
    assert set(read()) == {*expected, *((name, "", "") for name in NUMBERS)}


@pytest.mark.parametrize(
    ("warm", "start", "other"), [(True, "warm", "cold"), (False, "cold", "warm")]
)
def test_the_time_of_a_claim_is_told_for_ready_sandboxes_and_new_ones_apart(
    warm: bool, start: str, other: str
) -> None:
    before = read()
    metrics.observe_claim(0.25, warm=warm)
    after = read()
    count, total = (("k8e_claim_seconds_count", "start"), ("k8e_claim_seconds_sum", "start"))
    assert after[*count, start] - before[*count, start] == 1
    assert after[*total, start] - before[*total, start] == pytest.approx(0.25)
    assert after[*count, other] == before[*count, other]


@pytest.mark.parametrize("name", SERIES)
def test_each_word_is_counted_in_its_own_series(name: str) -> None:
    label, words, count = SERIES[name]
    before = read()
    for times, word in enumerate(words, 1):
        for _ in range(times):
            count(word)
    after = read()
    for times, word in enumerate(words, 1):
        assert after[name, label, word] - before[name, label, word] == times
    others = {key for key in after if key[0] != name or key[2] == metrics.OTHER}
    assert {key: after[key] for key in others} == {key: before[key] for key in others}


@pytest.mark.parametrize("name", SERIES)
def test_a_word_from_outside_makes_no_series(name: str) -> None:
    label, _, count = SERIES[name]
    before = read()
    for word in ("", "evil.example.org", 'a"} 1\nk8e_sessions 99', "x" * 10_000, "NAME"):
        count(word)
    after = read()
    assert set(after) == set(before)
    assert after[name, label, metrics.OTHER] - before[name, label, metrics.OTHER] == 5


def test_every_reason_of_a_denial_has_its_series() -> None:
    found = [
        cast("tuple[str, str]", item) for item in vars(denials).values() if type(item) is tuple
    ]
    reasons = [reason for reason, _ in found]
    assert len(reasons) > 5
    assert set(reasons) <= set(metrics.DENIALS)


def test_the_number_of_sessions_goes_up_and_down() -> None:
    for number in (3, 0):
        metrics.set_sessions(number)
        assert read()["k8e_sessions", "", ""] == number


def test_nothing_is_lost_when_threads_count_at_once() -> None:
    key = ("k8e_egress_denials_total", "reason", "port")
    before = read()[key]

    def work() -> None:
        for _ in range(5000):
            metrics.count_denial("port")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert read()[key] - before == 20_000


def test_what_is_rendered_is_the_text_format_with_types_and_help() -> None:
    text = metrics.render().decode("ascii")
    assert metrics.CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    for name in SERIES:
        assert f"# TYPE {name} counter\n" in text
        assert f"# HELP {name} " in text
    assert "# TYPE k8e_sessions gauge\n" in text
    assert "_created" not in text
    assert text.endswith("\n")


@pytest.mark.parametrize("module", ["k8e", "k8e.cli", "k8e.cli.fast", "k8e.client.blocking"])
def test_the_command_line_and_the_sdk_do_not_pay_for_metrics(module: str) -> None:
    script = (
        f"import sys, {module}; "
        "print([m for m in ('prometheus_client', 'dns', 'k8e.metrics') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "[]\n"
