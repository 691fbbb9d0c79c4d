"""Watches the disk that all workspaces share, and tells sessions what happens to theirs.

Its runtime holds each workspace to what it may still grow; this refills the gateway's reserve when
there is room again, and saves the files of workspaces that broke.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from k8e import disk, errors, metrics
from k8e.model import Principal, new_id
from k8e.runtimes.base import DiskReport
from k8e.runtimes.registry import Runtimes
from k8e.sessions.events import Events
from k8e.sessions.live import Live
from k8e.sessions.snapshots import Snapshots

log = logging.getLogger(__name__)

RESCUE_SECONDS = 5.0  # between two tries to save what a broken workspace holds
LEAST = 8 << 20  # bytes that a new workspace must be able to take
HELD = (
    "the disk of the gateway is nearly full, so /workspace cannot grow now; delete files in it, or "
    "ask the gateway's operator to make room"
)
FAILED = (
    "the file system of /workspace met an error of the disk below it and takes no more writes; it "
    "can be read; what it holds is saved as a snapshot as soon as there is room, and it is "
    "repaired where that is possible"
)


class DiskWatch:
    """Watches the disk for as long as a gateway runs."""

    def __init__(
        self,
        runtimes: Runtimes,
        live: Mapping[str, Live],
        events: Events,
        snapshots: Snapshots,
        end: Callable[[Live, str], Awaitable[None]],
    ) -> None:
        self._disk = runtimes.disk
        self._machine = runtimes.machine
        self._live = live
        self._events = events
        self._snapshots = snapshots
        self._end = end
        self._held_back: set[str] = set()  # sandboxes whose sessions know that they are held back
        self._rescue_at: dict[
            str, float
        ] = {}  # sandboxes, and when to try again to save their files
        self._was_full = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[DiskReport] = asyncio.Queue()
        before: list[object] = []

        def tell(report: DiskReport) -> None:
            reserve, spare = (
                self._machine.reserve,
                report.free - self._machine.settings.min_free_disk,
            )
            if reserve is not None and reserve.missing and spare > 0:
                reserve.fill(spare)
            now = [report.held, report.failed, report.free <= report.kept]
            if now != before or report.failed:  # most rounds find what the one before found
                before[:] = now
                loop.call_soon_threadsafe(news.put_nowait, report)

        stop = self._disk.watch(tell)
        try:
            while True:
                report = await news.get()
                while not news.empty():
                    report = news.get_nowait()
                self._tell(report)
                await self._rescue(report)
        finally:
            await asyncio.to_thread(stop)

    def _tell(self, report: DiskReport) -> None:
        full = report.free <= report.kept
        if full is not self._was_full:
            self._was_full = full
            now = "is nearly full" if full else "has room again"
            log.warning("the disk of the data folder %s: %d MiB are free", now, report.free >> 20)
        held = set(report.held)
        for live in list(self._live.values()):
            sandbox_id = live.session.sandbox_id
            # A session that does not grow need not hear of it.
            if sandbox_id in held - self._held_back and self._disk.is_growing(sandbox_id):
                self._held_back.add(sandbox_id)
                self._events.write(live.session, "workspace.held", message=HELD)
            elif sandbox_id in self._held_back - held:
                self._held_back.discard(sandbox_id)
                self._events.write(live.session, "workspace.released")
        self._held_back &= {live.session.sandbox_id for live in self._live.values()}

    async def _rescue(self, report: DiskReport) -> None:
        """Save the files of broken workspaces, then repair them or end their sessions."""
        by_sandbox = {live.session.sandbox_id: live for live in self._live.values()}
        now = asyncio.get_running_loop().time()
        for sandbox_id in report.failed:
            live = by_sandbox.get(sandbox_id)
            if live is None or live.ending is not None or live.paused:
                continue
            if sandbox_id not in self._rescue_at:
                self._rescue_at[sandbox_id] = now
                self._events.write(live.session, "workspace.failed", message=FAILED)
                log.error("the workspace of sandbox %s has failed", sandbox_id)
            if now >= self._rescue_at[sandbox_id]:
                self._rescue_at[sandbox_id] = now + RESCUE_SECONDS
                await self._save(live)
        broken = by_sandbox.keys() & set(report.failed)
        self._rescue_at = {name: due for name, due in self._rescue_at.items() if name in broken}

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
        if await self._heal(live):
            self._events.write(live.session, "workspace.healed", snapshot=name)
            return
        broken = "its workspace broke after an error of the disk below it"
        files = "what could be read of its files is" if warning else "its files are"
        await self._end(live, f"{broken}; {files} in the snapshot {name}")

    async def _heal(self, live: Live) -> bool:
        """Give a session a repaired copy of its workspace, unless it shares the broken one."""
        async with live.turning:
            if live.parent is not None or live.children or live.paused or live.ending is not None:
                return False
            try:
                return await live.guest.heal_workspace()
            except (errors.K8eError, OSError) as error:
                log.warning("session %s: %s", live.session.session_id, error)
                return False

    def admit(self) -> None:
        """Refuse a session whose workspace could not hold anything."""
        report = self._disk.report
        if len(self._disk) and report.another < LEAST:
            told = "the rest is for sessions that live, and a new one needs"
            raise disk.nearly_full(report.free, report.kept + LEAST, told)

    def describe(self) -> dict[str, Any]:
        """Figures for operators: sizes in bytes, and how many workspaces are affected."""
        report, reserve = self._disk.report, self._machine.reserve
        found = disk.space(self._machine.settings.data_dir)
        told = {
            "total": found.total,
            "free": found.free,
            "kept_free": self._machine.settings.min_free_disk,
            "promised": report.promised,
            "reserve": reserve.size if reserve is not None else 0,
            "reserve_held": reserve.held if reserve is not None else 0,
            "workspaces": len(self._disk),
            "held_back": len(report.held),
            "broken": len(report.failed),
        }
        metrics.set_disk(told)
        return told
