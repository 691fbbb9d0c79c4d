"""Traffic to sandboxes, as whoever routes it tells: it keeps them awake, and wakes them.

A router asks :meth:`Activity.ready` before it passes a request on, and holds the request meanwhile.
Sandboxes that ask for nothing (:data:`k8e.controller.additions.IDLE_SECONDS`) cost it one
dictionary look-up.
"""

from __future__ import annotations

import asyncio
import time

from k8e import errors
from k8e.controller import additions, conditions, desired, resources
from k8e.controller.resources import Key, Now, Object, key_of, path_of
from k8e.kubernetes.api import CONFLICT, NOT_FOUND, Api, ApiError

MERGE = "application/merge-patch+json"
WAKE_SECONDS = 120.0
_LONGEST_SILENCE = 30.0
_ATTEMPTS = 5
_REMEMBERED = 65_536


class NotAwake(errors.K8eError):
    """A sandbox that does not run, and that traffic does not wake or did not wake in time."""


class Activity:
    """Says that sandboxes are used, and wakes those that were suspended as idle."""

    def __init__(self, api: Api, *, now: Now = time.time) -> None:
        """``api`` may get, list, watch and patch Sandboxes."""
        self._api, self._now = api, now
        self._told: dict[str, float] = {}
        self._waking: dict[Key, asyncio.Task[Object]] = {}

    async def ready(self, sandbox: Object, *, seconds: float = WAKE_SECONDS) -> Object:
        """A sandbox that can be used: this one, or it once more after it was woken.

        NotAwake if it was suspended by a person, is gone, or does not become ready in time.
        """
        if not desired.is_suspended(sandbox):
            await self._note(sandbox)
            return sandbox
        key = key_of(sandbox)
        task = self._waking.get(key)
        if task is None:
            task = asyncio.create_task(self._wake(key))
            self._waking[key] = task
            task.add_done_callback(lambda done: self._woken(key, done))
        try:
            # A client that goes away does not end the waking that others wait for.
            return await asyncio.wait_for(asyncio.shield(task), seconds)
        except TimeoutError:
            raise NotAwake(
                f"the sandbox {key[1]} did not wake within {seconds:g} s",
                hint=f"kubectl describe sandbox -n {key[0]} {key[1]} says what its pod waits for",
            ) from None

    def _woken(self, key: Key, task: asyncio.Task[Object]) -> None:
        self._waking.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever still waits has it; perhaps nobody does

    async def _note(self, sandbox: Object) -> None:
        """Write that a sandbox is in use, at most a few times in its idle time."""
        limit = additions.seconds(sandbox, additions.IDLE_SECONDS)
        if limit is None:
            return
        uid, now = resources.uid_of(sandbox), self._now()
        if now - self._told.get(uid, float("-inf")) < min(limit / 4, _LONGEST_SILENCE):
            return
        self._told.pop(uid, None)
        self._told[uid] = now
        while len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        path = path_of(resources.SANDBOX, key_of(sandbox))
        await self._api.call("PATCH", path, additions.activity(now), kind=MERGE)

    async def _wake(self, key: Key) -> Object:
        path = path_of(resources.SANDBOX, key)
        for _ in range(_ATTEMPTS):
            sandbox = await self._api.find(path)
            if sandbox is None or resources.is_going(sandbox):
                raise NotAwake(f"the sandbox {key[1]} does not exist any more")
            if not desired.is_suspended(sandbox):
                break
            if not additions.is_suspended_as_idle(sandbox):
                raise NotAwake(
                    f"the sandbox {key[1]} was suspended",
                    hint=f"kubectl patch sandbox -n {key[0]} {key[1]} --type=merge "
                    """-p '{"spec":{"operatingMode":"Running"}}' resumes it""",
                )
            try:
                patch = additions.resumption(sandbox, self._now())
                await self._api.call("PATCH", path, patch, kind=MERGE)
                break
            except ApiError as error:
                if error.status not in (CONFLICT, NOT_FOUND):
                    raise
        return await self._api.wait_until(
            resources.collection(resources.SANDBOX, key[0]),
            _is_awake,
            seconds=WAKE_SECONDS,
            fieldSelector=f"metadata.name={key[1]}",
        )


def _is_awake(sandbox: Object) -> bool:
    ready = resources.condition_of(sandbox, conditions.READY)
    generation = sandbox["metadata"].get("generation", 1)
    return (
        ready is not None
        and ready["status"] == "True"
        and ready.get("observedGeneration", 0) >= generation
        and additions.SUSPENDED_BY not in resources.annotations_of(sandbox)
    )
