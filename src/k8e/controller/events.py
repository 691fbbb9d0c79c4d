"""Kubernetes events: what ``kubectl describe`` tells of an object. They may be lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from k8e.controller import conditions, resources
from k8e.controller.resources import Object
from k8e.kubernetes.api import Api, ApiError, ApiUnreachable

log = logging.getLogger(__name__)
_WAITING = 1000
_REMEMBERED = 4096
_AGAIN_SECONDS = 600.0
_LONGEST_MESSAGE = 1024


class Events:
    """Writes events behind everything else; the same one of an object once in ten minutes."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._queue: asyncio.Queue[Object] = asyncio.Queue(_WAITING)
        self._told: dict[tuple[str, str, str], float] = {}

    def normal(self, item: Object, kind: str, reason: str, message: str) -> None:
        self._add(item, kind, ("Normal", reason, message))

    def warn(self, item: Object, kind: str, reason: str, message: str) -> None:
        self._add(item, kind, ("Warning", reason, message))

    def _add(self, item: Object, kind: str, told: tuple[str, str, str]) -> None:
        severity, reason, message = told
        message = message[:_LONGEST_MESSAGE]
        metadata, now = item["metadata"], time.monotonic()
        known = metadata["uid"], reason, message
        if now - self._told.get(known, float("-inf")) < _AGAIN_SECONDS:
            return
        self._told[known] = now
        while len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        stamp = conditions.timestamp(time.time())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name'][:200]}.{secrets.token_hex(8)}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": resources.API_VERSIONS[kind],
                "kind": resources.kind_of(kind),
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": severity,
            "reason": reason,
            "message": message,
            "source": {"component": resources.CONTROLLER},
            "reportingComponent": resources.CONTROLLER,
            "reportingInstance": resources.CONTROLLER,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            log.debug("an event of %s is lost: too many wait", metadata["name"])

    async def run(self) -> None:
        """Write them, for ever."""
        while True:
            event = await self._queue.get()
            path = f"/api/v1/namespaces/{event['metadata']['namespace']}/events"
            try:
                await self._api.call("POST", path, event)
            except (ApiError, ApiUnreachable) as error:
                log.debug("an event is lost: %s", error)
