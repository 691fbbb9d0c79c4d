"""Traces, received by a server in the place of an OpenTelemetry collector."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from k8e import errors
from k8e.controller import resources, traces
from k8e.controller.traces import Tracer
from tests.controller.clusters import SandboxCluster, claim, eventually, pool, sandbox, template
from tests.controller.test_decisions import stored

Object = dict[str, Any]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = json.dumps({"traceparent": f"00-{TRACE}-{PARENT}-01"})


class Collector:
    """An HTTP server that keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Object] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/traces":
                    outer.spans += _spans(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def named(self, name: str) -> list[Object]:
        return [one for one in self.spans if one["name"] == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(20)


def _spans(body: Object) -> Iterator[Object]:
    for resource in body["resourceSpans"]:
        [name] = resource["resource"]["attributes"]
        assert name["value"]["stringValue"] == "agent-sandbox-controller"
        for scope in resource["scopeSpans"]:
            yield from scope["spans"]


@pytest.fixture
def collector() -> Generator[Collector]:
    found = Collector()
    yield found
    found.close()


def traced(item: Object, context: str) -> Object:
    return stored(item, annotations={resources.TRACE: context})


async def sent(tracer: Tracer, collector: Collector, count: int) -> None:
    """Send what has ended, until a collector has it."""
    task = asyncio.create_task(tracer.run())
    try:
        await asyncio.to_thread(eventually, "spans", lambda: len(collector.spans) >= count)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.anyio
async def test_work_belongs_to_the_trace_that_its_object_names(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_PAUSE_SECONDS", 0.01)
    tracer = Tracer(collector.url)
    with contextlib.suppress(ValueError), tracer.span("outer", traced(sandbox("one"), CONTEXT)):
        with tracer.span("inner", traced(sandbox("one"), CONTEXT)):
            pass
        raise ValueError("it went wrong")
    await sent(tracer, collector, 2)
    [outer], [inner] = collector.named("outer"), collector.named("inner")
    assert (outer["traceId"], outer["parentSpanId"]) == (TRACE, PARENT)
    assert (inner["traceId"], inner["parentSpanId"]) == (TRACE, outer["spanId"])
    assert outer["status"] == {"code": 2, "message": "it went wrong"}
    assert int(outer["endTimeUnixNano"]) >= int(inner["endTimeUnixNano"])


@pytest.mark.anyio
@pytest.mark.parametrize(
    "context",
    [
        "no JSON",
        "[]",
        "[" * 3000,
        '{"traceparent": 7}',
        '{"traceparent": "00-xyz-1-01"}',
        json.dumps({"traceparent": f"00-{'0' * 32}-{PARENT}-01"}),
        json.dumps({"traceparent": f"00-{TRACE}-{PARENT}-01", "x": "y" * 5000}),
    ],
)
async def test_a_context_that_means_nothing_begins_a_trace_of_its_own(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    monkeypatch.setattr(traces, "_PAUSE_SECONDS", 0.01)
    tracer = Tracer(collector.url)
    with tracer.span("alone", traced(sandbox("one"), context)):
        pass
    await sent(tracer, collector, 1)
    [alone] = collector.spans
    assert alone["traceId"] not in (TRACE, "0" * 32)
    assert "parentSpanId" not in alone


@pytest.mark.anyio
async def test_a_collector_that_is_gone_costs_some_spans_and_nothing_else(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(traces, "_QUEUED", 10)
    lost = Tracer("http://127.0.0.1:1")
    for _ in range(50):
        with lost.span("lost", stored(sandbox("one"))):
            pass
    task = asyncio.create_task(lost.run())
    tracer = Tracer(collector.url)
    with tracer.span("kept", stored(sandbox("one"))):
        pass
    await sent(tracer, collector, 1)
    assert not task.done()
    task.cancel()


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="no endpoint"):
        Tracer("collector:4317")


def test_a_claim_and_its_sandbox_are_one_trace(
    cluster: SandboxCluster, collector: Collector
) -> None:
    [process] = cluster.controllers
    cluster.stop_controller(process)
    process = cluster.start_controller("--trace-endpoint", collector.url)
    cluster.apply(template(), pool(replicas=1))
    cluster.wait_pool("pool", 1)
    wanted = claim("mine")
    wanted["metadata"]["annotations"] = {resources.TRACE: CONTEXT}
    cluster.apply(wanted)
    cluster.wait_ready("sandboxclaim", "mine")

    def traced_names() -> set[str]:
        return {one["name"] for one in collector.spans if one["traceId"] == TRACE}

    names = {"ReconcileSandboxClaim", "ReconcileSandbox", "reconcilePod", "reconcilePVCs"}
    eventually("spans", lambda: names <= traced_names())
    assert collector.named("ReconcileSandboxTemplate")
    cluster.stop_controller(process)
    cluster.start_controller()
