"""The guest of an OCI sandbox: from its first word to its end, whichever program started it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from k8e import errors, link
from k8e.runtimes import bundle
from k8e.runtimes.base import Binding
from k8e.runtimes.host import Record

if TYPE_CHECKING:
    from k8e.runtimes.oci import OciRuntime

HOLD_SECONDS = 5.0  # that a guest has to stop its clocks; one that does not is frozen all the same
CONNECT_SECONDS = 20.0
REDIAL_SECONDS = 5.0
SETTLE_SECONDS = 60.0

log = logging.getLogger(__name__)

T = TypeVar("T")


async def to_the_end(function: Callable[[Record], T], record: Record) -> T:
    """Run ``function`` in a thread; a caller that is cancelled still waits for its end.

    Otherwise whoever cleans up would race with a thread that still makes things.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, record))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        work.exception()  # whoever cancelled does not want to know
        raise


class OciGuest:
    """A sandbox made of an OCI bundle."""

    def __init__(self, runtime: OciRuntime, record: Record, listener: link.Listener) -> None:
        self.sandbox_id = record.sandbox_id
        self.record = record
        self._runtime = runtime
        self._listener = listener
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pidfd = -1
        self._patience = CONNECT_SECONDS
        self._frozen = False  # as far as we know: an adopted one may be
        listener.on_breach = self._on_breach

    def watch(self) -> None:
        """Notice the end of the sandbox's main process, without polling."""
        try:
            self._pidfd = os.pidfd_open(self.record.pid)
        except ProcessLookupError:
            self._on_exit()
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        self._stop_watching()
        if not self._gone.done():
            self._give_up(self._runtime.explain_end(self.record))

    def _on_breach(self, what: str) -> None:
        """A guest that breaks the protocol is no longer ours: whoever waits for its end kills it.

        A new link would not make it honest, and it could go on for as long as its session lives.
        """
        if not self._gone.done():
            self._give_up(f"its guest broke the protocol: {what}")

    def _give_up(self, reason: str) -> None:
        self._gone.set_result(reason)
        self._listener.close(errors.SandboxDied(reason))

    def _stop_watching(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def link(self) -> link.Link | None:
        return self._listener.link

    async def connect(self) -> link.Link:
        ready = await self._listener.ready(self._patience)
        self._patience = REDIAL_SECONDS
        return ready

    async def settle(self, warm: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        await self._mount_workspace()
        wanted = bundle.warm_languages(self.record.limits)
        call = {
            "op": "settle",
            "warm": {name: list(warm[name]) for name in wanted if name in warm},
            "env": self.record.env,  # an image's: interpreters start with it
            **self._runtime.guest_limits(self.record),
        }
        answer = await link.request(await self.connect(), call, seconds=SETTLE_SECONDS)
        too_large = [name for name in warm if name not in wanted and name in bundle.WARM]
        return (
            *(f"{name}: the limits leave no room for one that waits" for name in too_large),
            *(str(item) for item in answer.get("left_out") or ()),
        )

    async def bind(self, binding: Binding) -> None:
        before = self.record
        self.record = replace(before, limits=binding.limits or before.limits)
        changes: dict[str, Any] = {}
        if self.record.limits != before.limits:
            changes = await to_the_end(self._runtime.change_places(before), self.record)
        await self._mount_workspace()
        call = {
            "op": "bind",
            "env": {**self.record.env, **binding.env},
            "cwd": binding.cwd,
            "hidden": list(binding.hidden),
            "warm": self._warm_languages(binding.warm),
            "limits": dict(vars(self.record.limits)),
            "other_limits": self.record.limits != before.limits,
            **self._runtime.guest_limits(self.record),
            **changes,
        }
        try:
            await link.request(await self.connect(), call)
        except OSError as error:
            if not binding.cwd:
                raise
            raise errors.InvalidRequest(
                f"commands cannot start in {binding.cwd[:80]!r}: {error.strerror}"
            ) from None
        if self.record.limits != before.limits:
            # Not before: with less memory, interpreters that waited had to go first.
            await to_the_end(self._runtime.hold_limits, self.record)

    def _warm_languages(self, asked: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """The languages whose interpreters may wait, each with its modules; none if none shall.

        Node.js need not be asked for by name: nobody's waits before the first use.
        """
        roomy = bundle.warm_languages(self.record.limits) if asked else []
        return {name: list(asked.get(name, ())) for name in roomy if name in {*asked, "node"}}

    async def _mount_workspace(self) -> None:
        if not self.record.settled:
            self.record = await to_the_end(self._runtime.mount_workspace, self.record)

    async def wait(self) -> str:
        return await asyncio.shield(self._gone)

    async def freeze(self) -> None:
        if self.link is not None and not self._frozen:
            with contextlib.suppress(errors.K8eError, OSError):  # it has no say in this
                await link.request(self.link, {"op": "hold"}, seconds=HOLD_SECONDS)
        await self._runtime.switch("pause", self.sandbox_id, "paused")
        self._frozen = True

    async def thaw(self) -> None:
        await self._runtime.switch("resume", self.sandbox_id, "running")
        self._frozen = False
        try:
            await link.request(await self.connect(), {"op": "release"})
        except (errors.K8eError, OSError) as error:
            # It runs, whatever it says; its time-outs may stand still, which is its own loss.
            log.warning("sandbox %s went on without a word: %s", self.sandbox_id, error)

    async def kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._stop_watching()
        if not self._gone.done():
            self._gone.set_result("the session was destroyed")
        self._listener.close(errors.SandboxDied(self._gone.result()))
        await self._runtime.purge(self.sandbox_id)
