"""Traces of the controller's work for an OpenTelemetry collector. Off where no endpoint is given.

OTLP over HTTP, as JSON: one request a second at most, behind everything else. Spans may be lost: a
collector that is slow or gone costs the controller nothing but a bounded queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from k8e import errors
from k8e.controller import resources
from k8e.controller.resources import Object

log = logging.getLogger(__name__)
_QUEUED = 4096
_BATCH = 512
_PAUSE_SECONDS = 1.0
_SECONDS = 10.0
_CHUNK = 1 << 14
_LONGEST_CONTEXT = 4096
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_INTERNAL, _ERROR = 1, 2


@dataclass(slots=True)
class Span:
    """A piece of work: when it began and ended, and of which other one it is a part."""

    name: str
    trace: str
    id: str
    parent: str
    began: int
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    ended: int = 0
    failure: str = ""


_current: ContextVar[Span | None] = ContextVar("span", default=None)


class Tracer:
    """Notes spans, and sends them; does neither without an endpoint."""

    def __init__(self, endpoint: str = "") -> None:
        """``endpoint`` is the collector's ``http://HOST:PORT``."""
        parts = urlsplit(endpoint)
        if endpoint and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise errors.InvalidRequest(
                f"{endpoint!r} is no endpoint for traces", hint="http://collector.example:4318"
            )
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 4318)
        self._path = f"{parts.path.rstrip('/')}/v1/traces"
        self._ended: deque[Span] = deque(maxlen=_QUEUED)
        self._wake = asyncio.Event()

    @contextlib.contextmanager
    def span(self, name: str, item: Object) -> Generator[None]:
        """Work on an object: part of the work around it, or of the trace that the object names."""
        if not self._host:
            yield
            return
        span = _begin(name, item)
        token = _current.set(span)
        try:
            yield
        except Exception as error:
            span.failure = str(error)[:1024] or type(error).__name__
            raise
        finally:
            _current.reset(token)
            span.ended = time.time_ns()
            self._ended.append(span)
            self._wake.set()

    async def run(self) -> None:
        """Send what has ended, for ever."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_PAUSE_SECONDS)
            self._wake.clear()
            while self._ended:
                count = min(len(self._ended), _BATCH)
                batch = [self._ended.popleft() for _ in range(count)]
                try:
                    async with asyncio.timeout(_SECONDS):
                        status = await self._send(json.dumps(_document(batch)).encode())
                except (OSError, TimeoutError, h11.ProtocolError) as error:
                    log.debug("%d spans are lost: %s", count, error)
                else:
                    if status >= 300:
                        log.debug("%d spans are lost: the collector answered %d", count, status)

    async def _send(self, body: bytes) -> int:
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls or None
        )
        try:
            http = h11.Connection(h11.CLIENT)
            headers = [
                ("Host", f"{self._host}:{self._port}"),
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            request = h11.Request(method="POST", target=self._path, headers=headers)
            out = (http.send(request) or b"") + (http.send(h11.Data(data=body)) or b"")
            writer.write(out + (http.send(h11.EndOfMessage()) or b""))
            await writer.drain()
            while not isinstance(event := http.next_event(), h11.Response):
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(_CHUNK))
                elif isinstance(event, h11.ConnectionClosed):
                    raise ConnectionResetError("it closed the connection")
            return event.status_code
        finally:
            writer.transport.abort()


def _begin(name: str, item: Object) -> Span:
    trace, parent = "", ""
    if (around := _current.get()) is not None:
        trace, parent = around.trace, around.id
    else:
        trace, parent = _told(resources.annotations_of(item).get(resources.TRACE, ""))
    namespace, own = resources.key_of(item)
    return Span(
        name,
        trace or secrets.token_hex(16),
        secrets.token_hex(8),
        parent,
        time.time_ns(),
        {"k8s.namespace.name": namespace, "k8s.object.name": own},
    )


def _told(context: str) -> tuple[str, str]:
    """Trace and parent of an annotation, which a client wrote; empty if it names none."""
    try:
        found: Any = json.loads(context) if len(context) <= _LONGEST_CONTEXT else {}
    except (ValueError, RecursionError):
        return "", ""
    said: Any = found.get("traceparent") if isinstance(found, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    match = _PARENT.fullmatch(said) if isinstance(said, str) else None
    if match is None or set(match[1]) == {"0"} or set(match[2]) == {"0"}:
        return "", ""
    return match[1], match[2]


def _document(spans: list[Span]) -> Object:
    service = {"service.name": resources.CONTROLLER}
    scope = {"scope": {"name": "k8e.controller"}, "spans": [_encoded(span) for span in spans]}
    resource = {"attributes": _attributes(service)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def _encoded(span: Span) -> Object:
    made: Object = {
        "traceId": span.trace,
        "spanId": span.id,
        "name": span.name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(span.began),
        "endTimeUnixNano": str(span.ended),
        "attributes": _attributes(span.attributes),
    }
    if span.parent:
        made["parentSpanId"] = span.parent
    if span.failure:
        made["status"] = {"code": _ERROR, "message": span.failure}
    return made


def _attributes(values: dict[str, str]) -> list[Object]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in values.items()]
