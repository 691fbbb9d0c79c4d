"""Metrics of the gateway, in the text form that Prometheus reads.

Every label is a word from a closed list: words from a client or a sandbox never become labels,
since each would make a series of its own. A word that is not in its list is counted as ``other``.

Only what runs in a gateway imports this module: prometheus_client takes longer to import than the
command line and the SDK take to start.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OTHER = "other"
DENIALS = ("name", "address", "port", "private", "resolver", "upstream", "strict", "rate")
QUERIES = ("answered", "refused", "failed", "dropped")
CONNECTIONS = ("allowed", "refused", "failed")
CLAIMS = ("hit", "miss", "unhealthy")
LIMITS = ("memory", "pids", "disk", "inodes", "open_files", "output", "timeout")
STARTS = ("warm", "cold")
CLAIM_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

disable_created_metrics()  # a second series for each counter, which says when this process started
_registry = CollectorRegistry(auto_describe=True)


class _Counts:
    """A counter with one label; all of its series exist from the start, at zero."""

    def __init__(self, name: str, told: str, *, label: str, words: tuple[str, ...]) -> None:
        counter = Counter(name, told, (label,), registry=_registry)
        self._other = counter.labels(OTHER)
        self._series = {word: counter.labels(word) for word in words}

    def add(self, word: str) -> None:
        self._series.get(word, self._other).inc()


_denials = _Counts(
    "k8e_egress_denials", "What sandboxes were refused.", label="reason", words=DENIALS
)
_queries = _Counts(
    "k8e_egress_dns_queries", "Questions of sandboxes for names.", label="outcome", words=QUERIES
)
_connections = _Counts(
    "k8e_egress_connections",
    "Connections that strict policies looked into.",
    label="outcome",
    words=CONNECTIONS,
)
_limits = _Counts(
    "k8e_limits_reached", "Limits that sessions have met.", label="limit", words=LIMITS
)
_claims = _Counts(
    "k8e_pool_claims",
    "Sessions that got a ready sandbox (hit) or found none (miss), and ready ones of no use.",
    label="outcome",
    words=CLAIMS,
)
_claim_seconds = Histogram(
    "k8e_claim_seconds",
    "From the wish for a session until it is there, with its policy and its files; no sub-agents.",
    ("start",),
    buckets=CLAIM_SECONDS,
    registry=_registry,
)
_by_start = {word: _claim_seconds.labels(word) for word in STARTS}
_ready = Gauge("k8e_pool_ready", "Sandboxes that wait for a session.", registry=_registry)
_sessions = Gauge("k8e_sessions", "Sessions that are alive.", registry=_registry)


_removals = Gauge(
    "k8e_removals_pending", "Sandboxes that could not be removed yet.", registry=_registry
)
_disk = {
    name: Gauge(f"k8e_disk_{name}", told, registry=_registry)
    for name, told in (
        ("total", "Bytes of the data folder's disk."),
        ("free", "Bytes of the data folder's disk that nobody uses."),
        ("kept_free", "Bytes of it that stay free (K8E_MIN_FREE_DISK)."),
        ("promised", "Bytes that workspaces may still take."),
        ("reserve", "Bytes that the gateway holds for itself when all is well (K8E_DISK_RESERVE)."),
        ("reserve_held", "Bytes that the gateway holds for itself now."),
        ("workspaces", "Workspaces on the data folder's disk."),
        ("held_back", "Workspaces that may not grow because the disk is nearly full."),
        ("broken", "Workspaces that take no more writes after an error of the disk."),
    )
}


def count_denial(reason: str) -> None:
    """A sandbox was refused something; one of ``DENIALS``."""
    _denials.add(reason)


def count_query(outcome: str) -> None:
    """A sandbox asked for a name; one of ``QUERIES``."""
    _queries.add(outcome)


def count_connection(outcome: str) -> None:
    """A strict policy judged a connection; one of ``CONNECTIONS``."""
    _connections.add(outcome)


def count_claim(outcome: str) -> None:
    """Count the outcome of a session's claim, or of a ready sandbox; one of ``CLAIMS``."""
    _claims.add(outcome)


def count_limit(name: str) -> None:
    """A session met one of its limits; one of ``LIMITS``."""
    _limits.add(name)


def observe_claim(seconds: float, *, warm: bool) -> None:
    """Note how long it took to make a session, with a ready sandbox (``warm``) or a new one."""
    _by_start["warm" if warm else "cold"].observe(seconds)


def set_ready(number: int) -> None:
    """How many sandboxes wait for a session now."""
    _ready.set(number)


def set_sessions(number: int) -> None:
    """How many sessions are alive now."""
    _sessions.set(number)


def set_removals(number: int) -> None:
    """How many sandboxes have ended and could not be removed yet."""
    _removals.set(number)


def set_disk(sizes: Mapping[str, int]) -> None:
    """Set the figures of the data folder's disk, and of its users."""
    for name, value in sizes.items():
        _disk[name].set(value)


def render() -> bytes:
    """All metrics, of the type ``CONTENT_TYPE``."""
    return generate_latest(_registry)
