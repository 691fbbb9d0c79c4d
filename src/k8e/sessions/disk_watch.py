"""Watches the disk that all workspaces share, and tells sessions what happens to theirs.

How much each may grow is the kernel's to hold (``runtimes/growth.py``); this looks often enough
that nobody is refused what there is, and refills the gateway's reserve when there is room again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from k8e import disk, errors, metrics
from k8e.model import Principal, new_id
from k8e.runtimes.growth import Report
from k8e.runtimes.host import Host
from k8e.sessions.events import Events
from k8e.sessions.live import Live
from k8e.sessions.snapshots import Snapshots

log = logging.getLogger(__name__)

RESCUE_SECONDS = 5.0  # between two tries to save what a broken workspace holds
LEAST = 8 << 20  # bytes that a new workspace must be able to take
HELD = (
    "the disk of the gateway is nearly full, so /workspace cannot grow now; delete files in it, or "
    "have whoever runs the gateway make room"
)
FAILED = (
    "the file system of /workspace met an error of the disk below it and takes no more writes; it "
    "can be read, and what it holds is saved as a snapshot as soon as there is room"
)


class DiskWatch:
    """Looks at the disk for as long as a gateway runs."""

    def __init__(
        self,
        host: Host,
        live: Mapping[str, Live],
        events: Events,
        snapshots: Snapshots,
        end: Callable[[Live, str], Awaitable[None]],
    ) -> None:
        self._host = host
        self._live = live
        self._events = events
        self._snapshots = snapshots
        self._end = end
        self._told: set[str] = set()  # sandboxes whose sessions know that they are held back
        self._failed: dict[str, float] = {}  # sandboxes, and when to try again to save their files
        self._was_full = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Report] = asyncio.Queue()
        before: list[object] = []

        def tell(report: Report) -> None:
            reserve, spare = self._host.reserve, report.free - self._host.settings.min_free_disk
            if reserve is not None and reserve.missing and spare > 0:
                reserve.fill(spare)
            now = [report.held, report.failed, report.free <= report.kept]
            if now != before or report.failed:  # most looks find what the one before found
                before[:] = now
                loop.call_soon_threadsafe(news.put_nowait, report)

        stop = self._host.growth.watch(tell)
        try:
            while True:
                report = await news.get()
                while not news.empty():
                    report = news.get_nowait()
                self._tell(report)
                await self._rescue(report)
        finally:
            await asyncio.to_thread(stop)

    def _tell(self, report: Report) -> None:
        full = report.free <= report.kept
        if full is not self._was_full:
            self._was_full = full
            now = "is nearly full" if full else "has room again"
            log.warning("the disk of the data folder %s: %d MiB are free", now, report.free >> 20)
        held = set(report.held)
        for live in list(self._live.values()):
            sandbox_id = live.session.sandbox_id
            # Who does not grow need not know.
            if sandbox_id in held - self._told and self._host.growth.is_growing(sandbox_id):
                self._told.add(sandbox_id)
                self._events.write(live.session, "workspace.held", message=HELD)
            elif sandbox_id in self._told - held:
                self._told.discard(sandbox_id)
                self._events.write(live.session, "workspace.released")
        self._told &= {live.session.sandbox_id for live in self._live.values()}

    async def _rescue(self, report: Report) -> None:
        """Save what broken workspaces hold, and end their sessions: nothing else mends them."""
        by_sandbox = {live.session.sandbox_id: live for live in self._live.values()}
        now = asyncio.get_running_loop().time()
        for sandbox_id in report.failed:
            live = by_sandbox.get(sandbox_id)
            if live is None or live.ending is not None or live.paused:
                continue
            if sandbox_id not in self._failed:
                self._failed[sandbox_id] = now
                self._events.write(live.session, "workspace.failed", message=FAILED)
                log.error("the workspace of sandbox %s has failed", sandbox_id)
            if now >= self._failed[sandbox_id]:
                self._failed[sandbox_id] = now + RESCUE_SECONDS
                await self._save(live)
        self._failed = {name: due for name, due in self._failed.items() if name in by_sandbox}

    async def _save(self, live: Live) -> None:
        name = f"rescued-{new_id('ws')}"
        owner, session_id = Principal(live.session.owner), live.session.session_id
        try:
            saved, warning = await self._snapshots.save(
                owner, session_id, name, replace=False, partly=True
            )
        except (errors.K8eError, OSError) as error:
            log.warning("the files of session %s cannot be saved yet: %s", session_id, error)
            return
        self._events.write(
            live.session,
            "workspace.rescued",
            snapshot=name,
            size_bytes=saved.size_bytes,
            **({"warning": warning} if warning else {}),
        )
        broken = "its workspace broke after an error of the disk below it"
        files = "what could be read of its files is" if warning else "its files are"
        await self._end(live, f"{broken}; {files} in the snapshot {name}")

    def admit(self) -> None:
        """Refuse a session whose workspace could not hold anything."""
        report = self._host.growth.report
        if len(self._host.growth) and report.another < LEAST:
            told = "the rest is for sessions that live, and a new one needs"
            raise disk.nearly_full(report.free, report.kept + LEAST, told)

    def describe(self) -> dict[str, Any]:
        """What an operator may know: sizes in bytes, and how many workspaces are affected."""
        report, reserve = self._host.growth.report, self._host.reserve
        found = disk.space(self._host.settings.data_dir)
        told = {
            "total": found.total,
            "free": found.free,
            "kept_free": self._host.settings.min_free_disk,
            "promised": report.promised,
            "reserve": reserve.size if reserve is not None else 0,
            "reserve_held": reserve.held if reserve is not None else 0,
            "workspaces": len(self._host.growth),
            "held_back": len(report.held),
            "broken": len(report.failed),
        }
        metrics.set_disk(told)
        return told
