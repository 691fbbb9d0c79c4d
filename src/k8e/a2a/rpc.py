"""JSON-RPC calls and their answers: the method, the task, and the dialect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

from k8e import json_size
from k8e.a2a import dialects, message
from k8e.a2a.dialects import Dialect
from k8e.a2a.message import Fault
from k8e.a2a.runner import TaskRunner
from k8e.a2a.tasks import Event, Task

PING_SECONDS = 15.0
MAX_STREAMS = 8
"""Streams of one task at a time. Each keeps one of the requests that a caller may have open."""
logger = logging.getLogger(__name__)


class RpcCall:
    """A call that can be answered."""

    def __init__(self, body: bytes, version: str) -> None:
        self.id: str | int | None = None
        found = _parse(body)
        self.id = found.get("id") if isinstance(found.get("id"), str | int) else None
        method = found.get("method")
        if found.get("jsonrpc") != "2.0" or not isinstance(method, str):
            raise self.fault(Fault(message.INVALID_REQUEST, "this is not a call of JSON-RPC 2.0"))
        speaks = dialects.speaking(method)
        if speaks is None:
            raise self.fault(Fault(message.NO_METHOD, f"there is no method {method[:64]!r}"))
        if version and version.split(".")[0] != speaks.version.split(".")[0]:
            told = f"A2A-Version {version[:16]} does not have the method {method!r}"
            raise self.fault(Fault(message.VERSION, told))
        self.dialect: Dialect = speaks
        self.does = speaks.methods[method]
        try:
            self.params: Mapping[str, Any] = message.mapping(found.get("params"), "params")
        except Fault as fault:
            raise self.fault(fault) from None

    def fault(self, fault: Fault) -> RpcRefusal:
        return RpcRefusal(self.id, fault)

    def result(self, result: Any) -> bytes:
        return _encode({"jsonrpc": "2.0", "id": self.id, "result": result})


class RpcRefusal(Exception):
    """A call that is answered with an error."""

    def __init__(self, call_id: str | int | None, fault: Fault) -> None:
        super().__init__(fault.message)
        told = {"code": fault.code, "message": fault.message}
        self.body = _encode({"jsonrpc": "2.0", "id": call_id, "error": told})


def _parse(body: bytes) -> Mapping[str, Any]:
    if json_size.is_too_large(body):
        told = f"the body has more than {json_size.MAX_VALUES} JSON values; send fewer"
        raise RpcRefusal(None, Fault(message.PARSE, told))
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise RpcRefusal(None, Fault(message.PARSE, "the body is not JSON")) from None
    if not isinstance(found, dict):
        raise RpcRefusal(None, Fault(message.INVALID_REQUEST, "the body is not one call"))
    return cast("Mapping[str, Any]", found)


def _encode(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class RpcService:
    """Answers the calls of one caller."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner
        self._streams: Counter[Task] = Counter()

    async def answer(self, call: RpcCall) -> bytes | AsyncGenerator[bytes]:
        """One answer, or the lines of a stream of them."""
        try:
            return await self._answer(call)
        except Fault as fault:
            raise call.fault(fault) from None
        except Exception:
            logger.exception("an A2A call failed unexpectedly")
            told = Fault(message.INTERNAL, "k8e failed; its log says why")
            raise call.fault(told) from None

    async def _answer(self, call: RpcCall) -> bytes | AsyncGenerator[bytes]:
        dialect = call.dialect
        if call.does in ("send", "stream"):
            ask = dialect.ask(call.params, self._runner.terms.longest)
            task = self._runner.submit(ask)
            if call.does == "stream":
                return self._events(call, task)
            if ask.blocking:
                await task.ended()
            return call.result(dialect.sent(task))
        if call.does in ("get", "cancel", "subscribe"):
            return await self._about(call)
        if call.does == "push":
            raise Fault(message.NO_PUSH, "there are no push notifications; stream, or ask again")
        if call.does == "extended_card":
            raise Fault(message.NO_EXTENDED_CARD, "there is no extended card, only the public one")
        raise Fault(message.UNSUPPORTED, "this is not supported; keep the ids of your tasks")

    async def _about(self, call: RpcCall) -> bytes | AsyncGenerator[bytes]:
        task_id = message.text(call.params.get("id"), "id")
        if call.does == "cancel":
            task = await self._runner.cancel(task_id)
        else:
            task = self._runner.get(task_id)
        if call.does != "subscribe":
            return call.result(call.dialect.task(task))
        if task.over:
            raise Fault(message.UNSUPPORTED, f"task {task.id} is over; get it instead")
        if self._streams[task] >= MAX_STREAMS:
            raise Fault(message.BUSY, f"task {task.id} has {MAX_STREAMS} streams; end one of them")
        return self._events(call, task)

    async def _events(self, call: RpcCall, task: Task) -> AsyncGenerator[bytes]:
        """The task's present state, then its further events, as server-sent events."""
        self._streams[task] += 1
        at = task.mark()  # with the first event: what is sent later must not repeat it
        try:
            yield _event(call.result(call.dialect.sent(task)))
            async with contextlib.aclosing(task.follow(at, PING_SECONDS)) as events:
                async for event in events:
                    yield b": ping\n\n" if event is None else _told(call, task, event)
                    await asyncio.sleep(0)  # let the program's next output join
        finally:
            self._streams[task] -= 1
            if not self._streams[task]:
                del self._streams[task]


def _told(call: RpcCall, task: Task, event: Event) -> bytes:
    return _event(call.result(call.dialect.event(task, event)))


def _event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
