"""What the controller counts, under upstream's names, in the text form that Prometheus reads."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from k8e._version import __version__
from k8e.controller import conditions, policies, resources
from k8e.controller.cache import Cache
from k8e.controller.resources import Object
from k8e.kubernetes.api import section

_BUCKETS = (5, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000, 2000, 5000, 15000, 60000)
_UNKNOWN = "unknown"
_OTHERS = "others"
_MOST_SERIES = 2000
"""Of a metric whose labels are users' words: each is kept for ever."""
_LONGEST_NAME = 253
_POPULATION = (
    *("namespace", "ready_condition", "expired", "launch_type"),
    *("sandbox_template", "owned_by", "created_by"),
)


class Metrics:
    """Counters of claims, and gauges of what there is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._known: set[tuple[str, ...]] = set()
        labels = ("launch_type", "sandbox_template")
        self._startup = Histogram(
            "agent_sandbox_claim_controller_startup_latency_ms",
            "From the controller's first look at a claim to its being ready.",
            labels,
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._client_startup = Histogram(
            "agent_sandbox_client_claim_startup_latency_ms",
            "From a client's request, as the client dated it, to the claim being ready.",
            labels,
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._claims = Counter(
            "agent_sandbox_claim_creation",
            "Claims that have become ready.",
            (
                *("namespace", "sandbox_template", "launch_type", "warmpool_name"),
                "pod_condition",
                "created_by",
            ),
            registry=self.registry,
        )
        self._creation = Histogram(
            "agent_sandbox_creation_latency_ms",
            "From the creation of a sandbox to its being ready.",
            ("namespace", *labels),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        build = Gauge(
            "agent_sandbox_build_info", "The release.", ("version",), registry=self.registry
        )
        build.labels(__version__).set(1)

    def follow(self, sandboxes: Cache, pools: Cache | None) -> None:
        """Count what is in these caches, whenever somebody asks."""
        self.registry.register(_Population(sandboxes, pools))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counted(self, *words: str) -> tuple[str, ...]:
        """Words of users as labels; when there are too many, the new ones are counted together."""
        if words in self._known:
            return words
        if len(self._known) >= _MOST_SERIES:
            return (_OTHERS,) * len(words)
        self._known.add(words)
        return words

    def claim_is_ready(self, claim: Object, sandbox: Object | None) -> None:
        """Count a claim, once: when it is ready for the first time."""
        namespace, pool = claim["metadata"]["namespace"], claim["spec"]["warmPoolRef"]["name"]
        launch = _launch(sandbox)
        namespace, template, pool = self._counted(namespace, _template(sandbox), pool)
        marks = resources.annotations_of(claim)
        ready = _seconds(marks.get(resources.FIRST_READY))
        for mark, histogram in (
            (resources.CONTROLLER_OBSERVED, self._startup),
            (resources.CLIENT_REQUESTED, self._client_startup),
        ):
            began = _seconds(marks.get(mark))
            if ready is not None and began is not None and ready >= began:
                histogram.labels(launch, template).observe((ready - began) * 1000)
        self._claims.labels(
            namespace,
            template,
            launch,
            pool,
            "ready",
            policies.creator(resources.labels_of(claim)),
        ).inc()

    def sandbox_is_ready(self, before: Object, after: Object, now: float) -> None:
        """Count how long a sandbox took, when it is ready for the first time."""
        ready = resources.condition_of(after, conditions.READY)
        if (
            ready is None
            or ready["status"] != "True"
            or resources.is_true(before, conditions.READY)
        ):
            return
        metadata = after["metadata"]
        if metadata.get("generation", 1) > 1:
            return  # it was suspended or changed meanwhile
        took = now - conditions.seconds_of(metadata["creationTimestamp"])
        namespace, template = self._counted(metadata["namespace"], _template(after))
        series = self._creation.labels(namespace, _launch(after), template)
        series.observe(max(took, 0.0) * 1000)


def _launch(sandbox: Object | None) -> str:
    found = resources.labels_of(sandbox).get(resources.LAUNCH_TYPE) if sandbox else None
    return found if found in (resources.WARM, resources.COLD) else _UNKNOWN


def _template(sandbox: Object | None) -> str:
    """The template that a sandbox names; whoever makes one by hand can write anything there."""
    found = resources.annotations_of(sandbox).get(resources.TEMPLATE_REF) if sandbox else None
    return found if found and len(found) <= _LONGEST_NAME else _UNKNOWN


def _seconds(text: str | None) -> float | None:
    try:
        return conditions.seconds_of(text) if text else None
    except ValueError:  # a client wrote it
        return None


class _Population(Collector):
    """How many sandboxes and members of pools there are."""

    def __init__(self, sandboxes: Cache, pools: Cache | None) -> None:
        self._sandboxes, self._pools = sandboxes, pools

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return (self._sandbox_family(), self._pool_family())

    def _sandbox_family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily("agent_sandboxes", "Sandboxes that exist.", labels=_POPULATION)

    def _pool_family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "agent_sandbox_warmpool_size",
            "Members of warm pools.",
            labels=("namespace", "warmpool_name", "state"),
        )

    def collect(self) -> Iterable[GaugeMetricFamily]:
        sandboxes, pools = self._sandbox_family(), self._pool_family()
        for words, count in Count(map(_words, self._sandboxes)).items():
            sandboxes.add_metric(words, count)
        for pool in self._pools or ():
            status = section(pool, "status")
            for state, name in (("all", "replicas"), ("ready", "readyReplicas")):
                pools.add_metric([*resources.key_of(pool), state], status.get(name) or 0)
        yield sandboxes
        yield pools


def _words(sandbox: Object) -> tuple[str, ...]:
    ready = resources.condition_of(sandbox, conditions.READY) or {}
    expired = ready.get("reason") == conditions.SANDBOX_EXPIRED
    owner = resources.controller_of(sandbox)
    return (
        sandbox["metadata"]["namespace"],
        str(ready.get("status", "Unknown")).lower(),
        str(expired).lower(),
        _launch(sandbox),
        _template(sandbox),
        owner["kind"] if owner else "None",
        policies.creator(resources.labels_of(sandbox)),
    )
