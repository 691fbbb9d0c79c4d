"""A task as it runs: its output, its state, and the callers that follow it."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import datetime
import secrets
from collections.abc import AsyncGenerator
from typing import Any

SUBMITTED, WORKING = "submitted", "working"
COMPLETED, FAILED, CANCELED, REJECTED = "completed", "failed", "canceled", "rejected"
OVER = (COMPLETED, FAILED, CANCELED, REJECTED)


def now() -> str:
    told = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return told.replace("+00:00", "Z")


class TaskStatus:
    """The state of a task from a moment on."""

    def __init__(self, state: str, text: str = "") -> None:
        self.state = state
        self.text = text
        self.at = now()


class TaskOutput:
    """Text of one stream. It grows until a reader takes it: slow readers get larger pieces."""

    def __init__(self, name: str, *, first: bool) -> None:
        self.name = name
        self.first = first
        self.parts: list[str] = []
        self.taken = False

    @property
    def text(self) -> str:
        return "".join(self.parts)


class TaskResult:
    """The result of a program, as data."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


Event = TaskStatus | TaskOutput | TaskResult


class Task:
    """One task of one caller. Its whole history is kept, within the output's limit."""

    def __init__(self, context_id: str) -> None:
        self.id = f"task-{secrets.token_hex(12)}"
        self.context_id = context_id
        self.status = TaskStatus(SUBMITTED)
        self.log: list[Event] = []
        self.running: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._begun: set[str] = set()
        self._followers = 0

    @property
    def over(self) -> bool:
        return self.status.state in OVER

    # Events.

    def change(self, state: str, text: str = "") -> None:
        if self.over:
            return  # a task that is over stays as it ended
        self.status = TaskStatus(state, text)
        self._add(self.status)
        self._join()

    def printed(self, stream: str, data: bytes, *, final: bool = False) -> None:
        if stream not in self._decoders:
            self._decoders[stream] = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._decoders[stream].decode(data, final)
        if not text:
            return
        last = self.log[-1] if self.log else None
        if not isinstance(last, TaskOutput) or last.taken or last.name != stream:
            last = TaskOutput(stream, first=stream not in self._begun)
            self._begun.add(stream)
            self.log.append(last)
        last.parts.append(text)
        self._tell()

    def printed_all(self) -> None:
        """End the output: an incomplete last character stays incomplete."""
        for stream in list(self._decoders):
            self.printed(stream, b"", final=True)

    def came_to(self, result: dict[str, Any]) -> None:
        self._add(TaskResult(result))

    def _join(self) -> None:
        """Keep one piece for each stream of a task that is over, once no reader is in the log."""
        if not self.over or self._followers:
            return
        whole: list[Event] = []
        for name in self.streams:
            joined = TaskOutput(name, first=True)
            joined.parts.append(self.text(name))
            whole.append(joined)
        self.log = [*whole, *(item for item in self.log if not isinstance(item, TaskOutput))]

    def _add(self, event: Event) -> None:
        self.log.append(event)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # Contents.

    def text(self, stream: str) -> str:
        found = [
            item.text for item in self.log if isinstance(item, TaskOutput) and item.name == stream
        ]
        return "".join(found)

    @property
    def streams(self) -> list[str]:
        return list(dict.fromkeys(item.name for item in self.log if isinstance(item, TaskOutput)))

    @property
    def result(self) -> dict[str, Any] | None:
        return next((item.data for item in self.log if isinstance(item, TaskResult)), None)

    def mark(self) -> int:
        """The end of the log, from which to follow the task."""
        self._followers += 1
        if self.log and isinstance(last := self.log[-1], TaskOutput):
            last.taken = True
        return len(self.log)

    async def follow(self, at: int, pause: float) -> AsyncGenerator[Event | None]:
        """Events from a marked place on; None after each ``pause`` without news."""
        try:
            async with contextlib.aclosing(self._follow(at, pause)) as events:
                async for event in events:
                    yield event
        finally:
            self._followers -= 1
            self._join()

    async def _follow(self, at: int, pause: float) -> AsyncGenerator[Event | None]:
        while True:
            news = self._news
            while at < len(self.log):
                event = self.log[at]
                at += 1
                if isinstance(event, TaskOutput):
                    event.taken = True
                yield event
                news = self._news
            if self.over and at >= len(self.log):
                return
            if at < len(self.log):
                continue
            try:
                async with asyncio.timeout(pause):
                    await news.wait()
            except TimeoutError:
                yield None

    async def ended(self) -> None:
        async with contextlib.aclosing(self.follow(self.mark(), 3600)) as events:
            async for _ in events:
                pass
