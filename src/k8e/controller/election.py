"""One active controller: a Lease that its holder renews."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from k8e import errors
from k8e.controller.conditions import precise_timestamp
from k8e.controller.resources import Object
from k8e.kubernetes.api import CONFLICT, Api, ApiError, ApiUnreachable, section

log = logging.getLogger(__name__)

LEASE_SECONDS = 15
RENEW_SECONDS = 2.0
GIVE_UP_SECONDS = 10.0
"""The holder stops this long after its last renewal, well before another one may begin."""


class LeadershipLost(errors.K8eError):
    """Another controller may be at work: this one has to stop at once."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the lease {name} could not be renewed for {GIVE_UP_SECONDS:g} s",
            hint="it stops, so that no two controllers work; whatever runs it starts it again",
        )


class Election:
    """A contest for one Lease."""

    def __init__(self, api: Api, namespace: str, name: str, identity: str) -> None:
        self._api, self._name, self._identity = api, name, identity
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._namespace = namespace
        self._lease: Object | None = None
        # When the lease was last seen to change, by our own clock: others' clocks may be wrong.
        self._seen: tuple[str, float] = "", 0.0

    async def win(self) -> None:
        """Wait until the lease is ours."""
        while True:
            with contextlib.suppress(ApiUnreachable):
                try:
                    if await self._try():
                        log.info("%s leads", self._identity)
                        return
                except ApiError as error:
                    if error.status != CONFLICT:
                        log.warning("%s", error)
            await asyncio.sleep(RENEW_SECONDS)

    async def _try(self) -> bool:
        lease = await self._api.find(self._path)
        if lease is None:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec(0),
            }
            self._lease = await self._api.call("POST", self._collection, body)
            return True
        spec = section(lease, "spec")
        holder = spec.get("holderIdentity") or ""
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = version, time.monotonic()
        lasts = float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)
        if holder not in ("", self._identity) and time.monotonic() - self._seen[1] < lasts:
            return False
        lease["spec"] = self._spec(int(spec.get("leaseTransitions") or 0) + 1)
        self._lease = await self._api.call("PUT", self._path, lease)
        return True

    def _spec(self, transitions: int) -> Object:
        now = precise_timestamp(time.time())
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    async def keep(self) -> None:
        """Renew the lease, for ever; LeadershipLost when that does not work any more."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                left = GIVE_UP_SECONDS - (time.monotonic() - renewed)
                async with asyncio.timeout(max(left, 0.0)):
                    await self._renew()
            except TimeoutError:
                raise LeadershipLost(self._name) from None
            except ApiError as error:
                if error.status == CONFLICT:
                    raise LeadershipLost(self._name) from None
                log.warning("%s", error)
            except ApiUnreachable as error:
                log.warning("%s", error)
            else:
                renewed = time.monotonic()
            if time.monotonic() - renewed > GIVE_UP_SECONDS:
                raise LeadershipLost(self._name)

    async def _renew(self) -> None:
        if self._lease is None:
            raise LeadershipLost(self._name)
        self._lease["spec"]["renewTime"] = precise_timestamp(time.time())
        self._lease = await self._api.call("PUT", self._path, self._lease, seconds=5)

    async def release(self) -> None:
        """Let the next one begin at once."""
        if self._lease is None:
            return
        with contextlib.suppress(ApiError, ApiUnreachable):
            self._lease["spec"]["holderIdentity"] = ""
            await self._api.call("PUT", self._path, self._lease, seconds=2)
