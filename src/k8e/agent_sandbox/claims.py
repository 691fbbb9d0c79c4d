"""Claims of one caller: each is a session, and watchers learn what becomes of it.

The gateway's sessions are the truth. What is kept here beside them are claims of which no session
came, or whose session has ended, and who watches; a gateway that starts anew forgets these.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from k8e import errors
from k8e.agent_sandbox import objects, status
from k8e.agent_sandbox.client import InsideClient
from k8e.agent_sandbox.objects import Claim, ClaimRequest, Condition, Object
from k8e.client.results import SessionInfo
from k8e.model import DEFAULT_TEMPLATE, Phase, check_id

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""How long a creation is waited for, so that its error is the answer. Else watchers learn of it."""
MAX_OVER = 256
"""Claims kept that came to nothing, or whose sandbox has ended."""
MAX_DELETED = 256
"""Deletions that a watch which began before them still gets."""
MAX_WATCHES = 64
MAX_BEHIND = 1024
"""Events that wait for one watcher; one that is further behind has to begin anew."""
EXPIRY_SLACK = 0.5  # seconds after a session's date at which its end is looked at
POLICY_HINT = "volume claim templates are not served on one machine; a sandbox has its /workspace"

Key = tuple[str, str]


class Event(NamedTuple):
    """A change of one claim."""

    type: str
    """``ADDED``, ``MODIFIED`` or ``DELETED``."""
    key: Key
    version: int
    object: Object


class Watch:
    """What one watcher has not been told yet."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.some = asyncio.Event()
        self.behind = False

    def put(self, event: Event) -> None:
        self.behind = self.behind or len(self.events) >= MAX_BEHIND
        if not self.behind:
            self.events.append(event)
        self.some.set()


class Claims:
    """The claims of one caller, in all its namespaces."""

    def __init__(self, client: InsideClient) -> None:
        self._client = client
        self._claims: dict[Key, Claim] = {}
        self._making: dict[Key, asyncio.Task[None]] = {}
        self._deleted: deque[Event] = deque(maxlen=MAX_DELETED)
        self._watches: set[Watch] = set()
        # Larger than any of a gateway before this one: nobody changes a thousand claims a second.
        self.oldest = self.version = time.time_ns() // 1_000_000

    async def close(self) -> None:
        for task in list(self._making.values()):
            task.cancel()
        if self._making:
            await asyncio.wait(list(self._making.values()))

    # Creating.

    async def create(self, namespace: str, request: ClaimRequest) -> Object:
        """A new claim, as it was before anything came of it: its watchers learn the rest."""
        key = (namespace, request.name)
        if key in self._claims:
            await self._refresh(self._claims[key])
        claim = Claim(namespace, request, str(uuid.uuid4()), time.time())
        if self._claims.setdefault(key, claim) is not claim:
            raise _exists(key)
        self._forget_oldest()
        self._tell("ADDED", claim)
        answer = claim.to_json()
        if refusal := _refusal(claim):
            self._fail(claim, refusal)
            return answer
        task = self._making[key] = asyncio.create_task(self._make(claim))
        task.add_done_callback(lambda task: self._made(claim, task))
        done, _ = await asyncio.wait({task}, timeout=ANSWER_SECONDS)
        if done and not task.cancelled() and (error := task.exception()) is not None:
            raise error
        return answer

    async def _make(self, claim: Claim) -> None:
        request, (namespace, name) = claim.request, claim.key
        lifetime = request.shutdown_at - time.time() if request.shutdown_at else 0
        labels = {
            objects.NAME_LABEL: name,
            objects.UID_LABEL: claim.uid,
            objects.CLAIM_LABEL: request.kept(),
        }
        template = "" if request.pool == DEFAULT_TEMPLATE else request.pool
        try:
            claim.session_id = await self._client.create_session(
                tenant_id=namespace,
                template=template,
                request_id=f"sandboxclaim/{namespace}/{name}"[:200],
                env=request.env,
                labels=labels,
                lifetime=lifetime,
            )
        except errors.TemplateNotFound as error:
            self._fail(claim, Condition("Ready", False, "WarmPoolNotFound", error.message))
            return
        except errors.Conflict:
            raise _exists(claim.key) from None
        if request.shutdown_at:
            claim.expires_at = request.shutdown_at
        self._become(claim, objects.READY)

    def _made(self, claim: Claim, task: asyncio.Task[None]) -> None:
        """A creation has ended; one that failed leaves no claim."""
        self._making.pop(claim.key, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            if error is not None and not isinstance(error, (errors.K8eError, status.ApiError)):
                log.error("a claim could not be made", exc_info=error)
            self._remove(claim)

    def _fail(self, claim: Claim, condition: Condition) -> None:
        claim.over = True
        self._become(claim, condition)

    def _become(self, claim: Claim, condition: Condition) -> None:
        if claim.ready != condition:
            claim.ready, claim.changed_at = condition, time.time()
            self._tell("MODIFIED", claim)

    # Looking.

    async def get(self, key: Key) -> Claim:
        claim = self._claims.get(key)
        if claim is None:
            await self._look(key[0])
        else:
            await self._refresh(claim)
        claim = self._claims.get(key)
        if claim is None:
            raise _missing("sandboxclaims", objects.CLAIM_GROUP, key[1])
        return claim

    async def list(self, namespace: str) -> list[Claim]:
        """All claims of a namespace; of all namespaces, if that is empty."""
        await self._look(namespace)
        return [
            claim for key, claim in self._claims.items() if not namespace or key[0] == namespace
        ]

    async def _look(self, namespace: str) -> None:
        """Compare the claims of a namespace with its sessions."""
        alive = {item.session_id: item for item in await self._client.list_sessions(namespace)}
        known = {claim.session_id for claim in self._claims.values()}
        for session in alive.values():
            found = objects.claim_of(session) if session.session_id not in known else None
            if found is not None and found.key not in self._claims:
                self._claims[found.key] = found
                self._number(found)
        for claim in list(self._claims.values()):
            if not namespace or claim.namespace == namespace:
                session = alive.get(claim.session_id)
                if session is not None:
                    self._see(claim, session)
                elif claim.session_id:
                    await self._refresh(claim)
                else:
                    self._drop_old(claim)

    async def _refresh(self, claim: Claim) -> None:
        """See what has become of a claim's session."""
        if claim.over or not claim.session_id:
            self._drop_old(claim)
            return
        try:
            session = await self._client.get_session(claim.session_id)
        except errors.SessionNotFound:
            self._end(claim, "")
        else:
            self._see(claim, session)

    def _see(self, claim: Claim, session: SessionInfo) -> None:
        if session.phase == Phase.ENDED:
            self._end(claim, session.ended_reason)
        else:
            claim.expires_at = session.expires_at
            paused = session.phase == Phase.PAUSED
            self._become(claim, objects.SUSPENDED if paused else objects.READY)

    def _end(self, claim: Claim, why: str) -> None:
        """A claim's session has ended by itself; its policy says whether the claim goes with it."""
        if claim.over:
            return
        if claim.request.policy in objects.DELETE_POLICIES:
            self._remove(claim)
            return
        expired = bool(claim.expires_at) and time.time() >= claim.expires_at
        reason = "ClaimExpired" if expired else "SandboxExpired"
        text = why or "its sandbox has ended"
        self._fail(claim, Condition("Ready", False, reason, f"Claim expired: {text}"))

    def _drop_old(self, claim: Claim) -> None:
        ttl = claim.request.ttl
        if claim.over and ttl is not None and time.time() >= claim.changed_at + ttl:
            self._remove(claim)

    def _forget_oldest(self) -> None:
        over = [claim for claim in self._claims.values() if claim.over]
        for claim in over[: max(0, len(over) - MAX_OVER)]:
            self._remove(claim)

    # Sandboxes.

    async def sandbox(self, namespace: str, name: str) -> Object:
        """A session of this namespace as a Sandbox."""
        return objects.sandbox_of(await self.session(namespace, name), self.version)

    async def session(self, namespace: str, name: str) -> SessionInfo:
        """The live session of this id, if it is of this namespace."""
        try:
            session = await self._client.get_session(name)
        except (errors.SessionNotFound, errors.InvalidRequest):
            session = None
        if session is None or session.tenant_id != namespace or session.phase == Phase.ENDED:
            raise _missing("sandboxes", objects.SANDBOX_GROUP, name)
        return session

    async def sandboxes(self, namespace: str) -> list[Object]:
        found = await self._client.list_sessions(namespace)
        return [objects.sandbox_of(session, self.version) for session in found]

    async def set_mode(self, namespace: str, name: str, mode: str) -> Object:
        """Suspend a sandbox, with its memory, or let it run again."""
        session = await self.session(namespace, name)
        if mode == "Suspended" and session.phase == Phase.ACTIVE:
            await self._client.pause_session(name)
        elif mode == "Running" and session.phase == Phase.PAUSED:
            await self._client.resume_session(name)
        for claim in list(self._claims.values()):
            if claim.session_id == name:
                await self._refresh(claim)
        return await self.sandbox(namespace, name)

    # Deleting.

    async def delete(self, key: Key, uid: str = "") -> None:
        """End a claim and its session."""
        claim = await self.get(key)
        if uid and uid != claim.uid:
            raise status.ApiError(409, f"the claim {key[1]} has another uid", "Conflict")
        if (task := self._making.get(key)) is not None:
            await asyncio.wait({task})  # half a session could not be destroyed
        if claim.session_id and not claim.over:
            with contextlib.suppress(errors.SessionNotFound):  # it has just ended by itself
                await self._client.destroy_session(claim.session_id)
        self._remove(claim)

    def _remove(self, claim: Claim) -> None:
        if self._claims.get(claim.key) is claim:
            del self._claims[claim.key]
            self._tell("DELETED", claim)

    # Watching.

    def _number(self, claim: Claim) -> None:
        self.version += 1
        claim.version = self.version

    def _tell(self, kind: str, claim: Claim) -> None:
        self._number(claim)
        event = Event(kind, claim.key, claim.version, claim.to_json())
        if kind == "DELETED":
            self._deleted.append(event)
        for watch in self._watches:
            watch.put(event)

    async def watch(
        self, namespace: str, since: int | None, seconds: float
    ) -> AsyncGenerator[Event | None]:
        """What happens to claims, until the time is over; None means that nothing did for a while.

        Args:
            namespace: whose claims; empty for all.
            since: the version after which events count; None means all claims as they are now.
            seconds: after which it ends.
        """
        if len(self._watches) >= MAX_WATCHES:
            raise status.ApiError(429, f"there are {MAX_WATCHES} watches already")
        if since is not None and since < self.oldest:
            raise status.ApiError(410, "this version is too old; begin without one")
        watch = Watch()
        self._watches.add(watch)
        try:
            for event in await self._missed(namespace, since):
                yield event
            yield None  # whoever is answered learns at once that it watches
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0 and not watch.behind:
                await self._wait(watch, namespace, left)
                while watch.events:
                    event = watch.events.popleft()
                    if not namespace or event.key[0] == namespace:
                        yield event
                yield None
        finally:
            self._watches.discard(watch)

    async def _missed(self, namespace: str, since: int | None) -> list[Event]:
        if since is None:
            found = [
                Event("ADDED", claim.key, claim.version, claim.to_json())
                for claim in await self.list(namespace)
            ]
        else:
            found = [event for event in self._deleted if event.version > since]
            found += [
                Event("MODIFIED", claim.key, claim.version, claim.to_json())
                for claim in self._claims.values()
                if claim.version > since
            ]
        chosen = [event for event in found if not namespace or event.key[0] == namespace]
        return sorted(chosen, key=lambda event: event.version)

    async def _wait(self, watch: Watch, namespace: str, seconds: float) -> None:
        """Wait for an event, or for a date at which a session expires."""
        now = time.time()
        due = [
            max(0.0, claim.expires_at + EXPIRY_SLACK - now)
            for claim in self._claims.values()
            if claim.expires_at and not claim.over
        ]
        limit = min([seconds, *due])
        try:
            async with asyncio.timeout(max(limit, EXPIRY_SLACK) if limit < seconds else seconds):
                await watch.some.wait()
        except TimeoutError:
            if limit < seconds:
                await self._look(namespace)
        watch.some.clear()


def _refusal(claim: Claim) -> Condition | None:
    """Why nothing will come of a claim; None if something may."""
    request = claim.request
    if request.spec.get("volumeClaimTemplates"):
        return Condition("Ready", False, "VolumeClaimTemplatesError", POLICY_HINT)
    if request.shutdown_at and request.shutdown_at <= time.time():
        return Condition("Ready", False, "ClaimExpired", "its shutdownTime has passed")
    try:
        check_id(request.pool, "warm pool")
    except errors.InvalidRequest as error:
        return Condition("Ready", False, "WarmPoolNotFound", error.message)
    return None


def _exists(key: Key) -> status.ApiError:
    where = f"sandboxclaims.{objects.CLAIM_GROUP} {key[1]!r}"
    return status.ApiError(409, f"{where} already exists")


def _missing(plural: str, group: str, name: str) -> status.ApiError:
    return status.ApiError(404, f'{plural}.{group} "{name[:253]}" not found')


def summary(items: list[Any], kind: str, group: str, version: int) -> Object:
    """A list of objects, as the Kubernetes API has it."""
    return {
        "apiVersion": f"{group}/{objects.VERSION}",
        "kind": kind,
        "metadata": {"resourceVersion": str(version)},
        "items": items,
    }
