"""Quotas: how many sessions a principal and a tenant may have, and how quickly they may make them.

The kernel enforces the limits of one session; the gateway enforces these, so that no caller takes
all of it. A tenant is a label inside a principal: choosing another label does not get around the
limits of the principal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from k8e import disk, errors
from k8e.model import Principal, Session
from k8e.sessions.store import Most
from k8e.settings import Settings

PERIOD = 60.0
"""Seconds over which creations are counted. As many as a whole period allows may come at once."""
MOST_BUCKETS = 10_000  # of those who made a session within the last period


class QuotaHolder(NamedTuple):
    """The principal and the tenant of a session."""

    owner: str
    tenant: str


@dataclass(frozen=True)
class Quota:
    """What a caller may have; 0 means as much as the gateway has."""

    sessions: int = 0
    """Sessions that live, or are being made, at once."""
    creations: int = 0
    """Sessions made per minute."""


@dataclass(frozen=True)
class QuotaBound:
    """One quota: its holder, and how it is raised."""

    whose: str
    quota: Quota
    raised_by: tuple[str, str]
    """The settings of its two numbers."""
    remedy: str = ""
    """What the operator can do about too many sessions, if that is not a setting."""


class Bucket:
    """A token bucket: full at first, it fills up again as time goes by."""

    def __init__(self, now: float) -> None:
        self._taken = 0.0
        self._at = now

    def wait(self, rate: int, now: float) -> float:
        """Seconds until one more is allowed; 0 if it is now."""
        self._refill(rate, now)
        missing = self._taken + 1 - rate
        return max(0.0, missing * PERIOD / rate)

    def take(self) -> None:
        self._taken += 1

    def is_full(self, now: float) -> bool:
        """Whether nothing was taken from it within a period."""
        return now - self._at >= PERIOD

    def _refill(self, rate: int, now: float) -> None:
        self._taken = max(0.0, self._taken - (now - self._at) * rate / PERIOD)
        self._at = now


class Quotas:
    """Admits new sessions, or names the limit that prevents it."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._of_principal = Quota(
            settings.max_sessions_per_principal, settings.max_creations_per_principal
        )
        self._of_tenant = Quota(settings.max_sessions_per_tenant, settings.max_creations_per_tenant)
        self._data_dir, self._min_free = settings.data_dir, settings.min_free_disk
        self._clock = clock
        self._buckets: dict[QuotaHolder, Bucket] = {}
        self.sessions_of: Callable[[str], int] = lambda _: 0
        """How many sessions a principal may have by its key; 0 where that says nothing."""

    def admit(self, principal: Principal, tenant: str, alive: Iterable[QuotaHolder]) -> None:
        """Count a session that is about to be made; LimitExceeded if a quota forbids it."""
        holder = QuotaHolder(principal.name, tenant)
        mine = [item for item in alive if item.owner == holder.owner]
        here = sum(item.tenant == tenant for item in mine)
        general, special = self._bounds(principal, tenant)
        _check_sessions(general, len(mine))
        _check_sessions(special, here)
        # Workspaces are sparse: their space is not taken before it is used.
        disk.refuse_if_full(self._data_dir, self._min_free, "new sessions need")
        self._count(holder, general, special)

    def most_of(self, session: Session) -> Most:
        """How many sessions a holder may have at once, over all gateways."""
        general, special = self._bounds(Principal(session.owner), session.spec.tenant)
        return Most(general.quota.sessions, special.quota.sessions)

    def _bounds(self, principal: Principal, tenant: str) -> tuple[QuotaBound, QuotaBound]:
        own, quota, remedy = self.sessions_of(principal.name), self._of_principal, ""
        names = ("K8E_MAX_SESSIONS_PER_PRINCIPAL", "K8E_MAX_CREATIONS_PER_PRINCIPAL")
        if own:
            quota, names = replace(quota, sessions=own), ("--max-sessions of its key", names[1])
            remedy = "make a key that may have more"
        general = QuotaBound(f"principal {principal.shown!r}", quota, names, remedy)
        names = ("K8E_MAX_SESSIONS_PER_TENANT", "K8E_MAX_CREATIONS_PER_TENANT")
        return general, QuotaBound(f"tenant {tenant!r}", self._of_tenant, names)

    def _count(self, holder: QuotaHolder, general: QuotaBound, special: QuotaBound) -> None:
        now = self._clock()
        taken: list[Bucket] = []
        for key, bound in ((QuotaHolder(holder.owner, ""), general), (holder, special)):
            rate = bound.quota.creations
            if not rate:
                continue
            bucket = self._bucket(key, now)
            seconds = bucket.wait(rate, now)
            if seconds:
                raise errors.LimitExceeded(
                    f"{bound.whose} has made {rate} sessions within a minute, the most that it "
                    f"may ({bound.raised_by[1]})",
                    hint=f"try again in {math.ceil(seconds)} s, use a session for several runs, "
                    f"or have the gateway's operator raise {bound.raised_by[1]}",
                )
            taken.append(bucket)
        for bucket in taken:  # only when both quotas allow it: a refusal costs nothing
            bucket.take()

    def _bucket(self, key: QuotaHolder, now: float) -> Bucket:
        if key not in self._buckets:
            if len(self._buckets) >= MOST_BUCKETS:
                self._buckets = {k: v for k, v in self._buckets.items() if not v.is_full(now)}
            self._buckets[key] = Bucket(now)
        return self._buckets[key]


def _check_sessions(bound: QuotaBound, count: int) -> None:
    most = bound.quota.sessions
    if most and count >= most:
        raise errors.LimitExceeded(
            f"{bound.whose} has {count} sessions; the limit is {most} ({bound.raised_by[0]})",
            hint="destroy some (k8e sandbox sessions, k8e sandbox destroy ID), or have the "
            f"gateway's operator {bound.remedy or f'raise {bound.raised_by[0]}'}",
        )
