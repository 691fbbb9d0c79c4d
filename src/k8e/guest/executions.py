"""One run of code in a context: an exec whose program goes on after it."""

# What the program of a context says has no static type.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import signal
import time
from typing import Any

from k8e.guest.execs import Exec
from k8e.guest.loop import Loop
from k8e.guest.output import CHUNK_COST
from k8e.guest.records import MAX_RECORD, MAX_TYPE, MAX_WAYS, pack_record
from k8e.guest.wire import SHOW, pack

STOP_GRACE = 3.0  # seconds between an interrupt and the end of the context
MAX_UNREAD_SHOWN = 16 << 20  # bytes of results that wait for a reader
ERROR_TEXT = {"name": 1 << 10, "value": 16 << 10, "traceback": 80 << 10}  # characters at most


class Execution(Exec):
    """Waits in the line of its context, runs, and ends; all that an exec can be asked, it can."""

    def __init__(self, loop: Loop, exec_id: str, spec: dict[str, Any], context: Any) -> None:
        super().__init__(loop, {}, exec_id, dict(spec, tty=None))
        self.context = context
        self.number = 0
        self.source: bytes = spec["code"]
        self.variables: dict[str, str] = dict(spec.get("env") or {})
        self.error: dict[str, str] | None = None
        self.pid = context.pid

    def set_deadline(self) -> None:
        """It is in line, so its time runs."""
        if self._timeout and self.code is None:
            self._deadline = self._loop.later(self._timeout, self._time_out)

    @property
    def is_waiting(self) -> bool:
        """Whether others come before it."""
        return self.code is None and self.context.current is not self

    # Output.

    def show(self, value: dict[str, Any]) -> None:
        """Take a result; what is unreadable or too much is left out, and that is told."""
        record = checked_record(value)
        if record is None or self.output.held > MAX_UNREAD_SHOWN:
            self.output.truncated = True
            return
        self.output.add(SHOW, pack_record(record))

    def _resume(self) -> None:
        self.context.listen()

    # Ending.

    def abandon(self) -> None:
        """Nobody wants what comes of it: stop it, and leave the context as it is."""
        if self.is_waiting:
            self.end(128 + signal.SIGINT, status="killed")
        elif self.code is None:
            self.context.interrupt()

    def terminate(self, status: str) -> None:
        """Interrupt it; if that does not help, end the context with it."""
        if self.code is not None:
            return
        if self.status == "running":
            self.status = status
        if self.is_waiting:
            self.end(128 + signal.SIGINT)
            return
        self.context.interrupt()
        self._loop.later(STOP_GRACE, self.kill_now)

    def kill_now(self) -> None:
        if self.code is None:
            self.context.kill("its code did not stop when it was interrupted")

    def send_signal(self, number: int) -> None:
        if self.code is None and not self.is_waiting:
            os.killpg(self.context.pid, number)

    def end(
        self, code: int, *, error: dict[str, str] | None = None, status: str = "completed"
    ) -> None:
        """It is over: in the words of its program, or of the guest."""
        if self.code is not None:
            return
        self.context.drop(self)
        self.code, self.error = code, error
        if self.status == "running":
            self.status = status
        self.ended = time.monotonic()
        if code:
            words = (error or {}).get("value", "")  # an exception is not printed
            self._find_limits(words.encode("utf-8", "replace"))
        if self._deadline is not None:
            self._deadline.cancel()
        for tell in self.on_exit:
            tell()
        self._say_all()

    def introduce(self) -> dict[str, Any]:
        told = super().introduce()
        return dict(told, context=self.context.id, execution_count=self.number)

    def describe(self, parts: int = 16, part_size: int = 200) -> dict[str, Any]:
        self.argv = [self.context.language]
        return super().describe(parts, part_size)

    def _describe_end(self) -> dict[str, Any]:
        told = super()._describe_end()
        told["context"] = self.context.id
        told["context_state"] = self.context.state
        told["execution_count"] = self.number
        if self.error is not None:
            told["error"] = self.error
        return told


def checked_record(value: dict[str, Any]) -> bytes | None:
    """A result as it travels on; None if it is not one."""
    data: Any = value.get("data")
    left_out: Any = value.get("left_out")
    if not isinstance(data, dict) or len(data) > MAX_WAYS:
        return None
    for kind, content in data.items():
        if len(kind) > MAX_TYPE or not isinstance(content, (str, bytes)):
            return None
    kept: list[str] = []
    if isinstance(left_out, list):
        kept = [kind[:MAX_TYPE] for kind in left_out[:MAX_WAYS] if isinstance(kind, str)]
    if not data and not kept:
        return None
    record = pack({"data": data, "main": value.get("main") is True, "left_out": kept})
    return record if len(record) <= MAX_RECORD else None


def checked_error(value: dict[str, Any]) -> dict[str, str] | None:
    """What went wrong in a cell, as its program tells; None if it says nothing of the kind."""
    if not isinstance(value.get("name"), str):
        return None
    found = {key: value.get(key) for key in ERROR_TEXT}
    return {
        key: text[: ERROR_TEXT[key]] if isinstance(text, str) else "" for key, text in found.items()
    }


def between_cost(data: bytes) -> int:
    return len(data) + CHUNK_COST
