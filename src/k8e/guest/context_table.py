"""The contexts of the sandbox by id, and what can be asked of them."""

from __future__ import annotations

import errno
import os
from typing import Any, Callable

from k8e.guest.contexts import Context, ContextRefused, Leader, check_folder
from k8e.guest.executions import Execution
from k8e.guest.loop import Loop, Timer
from k8e.guest.talking import CONTEXT_LANGUAGES
from k8e.guest.wire import CANCEL, RESULT, WireError, pack

MAX_CONTEXTS = 32
INTERRUPT_GRACE = 5.0  # seconds that code has to stop, before the caller is told that it did not
LONGEST_PATIENCE = 60.0


class Contexts:
    """All contexts of the sandbox. ``table`` is where its execs are."""

    def __init__(self, loop: Loop, table: Any) -> None:
        self._loop = loop
        self._table = table
        self._by_id: dict[str, Context] = {}

    def operations(self) -> dict[str, Callable[[Any, dict[str, Any]], None]]:
        return {
            "create_context": self._create,
            "list_contexts": self._list,
            "remove_context": self._remove,
            "restart_context": self._restart,
            "interrupt_context": self._interrupt,
        }

    def run(self, exec_id: str, spec: dict[str, Any]) -> Execution:
        """Put code in the line of a context, which is made if that was asked for."""
        context = self._by_id.get(spec["context"])
        if context is None:
            if not spec.get("make_context"):
                raise _unknown(spec["context"])
            context = self._make(spec["context"], spec)
        language = CONTEXT_LANGUAGES.get(spec.get("language") or context.language)
        if language != context.language:
            raise ContextRefused(
                "conflict",
                f"context {context.id} is for {context.language}, not {spec['language']}",
                "use another context for it",
            )
        made = Execution(self._loop, exec_id, spec, context)
        made.on_exit.append(lambda: self._table.finished(made))
        context.add(made)
        made.set_deadline()
        return made

    def _make(self, name: str, spec: dict[str, Any]) -> Context:
        if len(self._by_id) >= MAX_CONTEXTS:
            raise ContextRefused(
                "limit_exceeded",
                f"the session has {MAX_CONTEXTS} contexts, which is the limit",
                "remove one that is not needed",
            )
        wanted = spec.get("language") or spec.get("make_context")
        language = CONTEXT_LANGUAGES.get(wanted if isinstance(wanted, str) else "python")
        if language is None:
            raise ContextRefused("invalid_request", "there are no contexts for this language")
        cwd = check_folder(spec.get("cwd") or self._table.cwd)
        context = Context(self._loop, name, language, cwd)
        self._start(context)
        self._by_id[name] = context
        return context

    def _start(self, context: Context) -> None:
        try:
            context.start(self._table.env)
        except OSError as error:
            # As for execs: those that only wait make room.
            if error.errno != errno.EAGAIN or not self._table.warmth.clear():
                raise
            context.start(self._table.env)
        self._table.adopt(Leader(context))

    def _get(self, spec: dict[str, Any]) -> Context:
        context = self._by_id.get(spec.get("id") or "")
        if context is None:
            raise _unknown(spec.get("id"))
        return context

    # Operations.

    def _create(self, channel: Any, spec: dict[str, Any]) -> None:
        name = spec.get("id") or "ctx-" + os.urandom(8).hex()
        if name in self._by_id:
            raise ContextRefused("conflict", f"there is a context {name} already")
        channel.send(RESULT, pack(self._make(name, spec).describe()))

    def _list(self, channel: Any, _: dict[str, Any]) -> None:
        found = [context.describe() for context in self._by_id.values()]
        channel.send(RESULT, pack({"contexts": found}))

    def _remove(self, channel: Any, spec: dict[str, Any]) -> None:
        context = self._get(spec)
        context.kill("it was removed")
        del self._by_id[context.id]
        channel.send(RESULT, pack({}))

    def _restart(self, channel: Any, spec: dict[str, Any]) -> None:
        context = self._get(spec)
        context.kill("it was restarted")
        self._start(context)
        channel.send(RESULT, pack(context.describe()))

    def _interrupt(self, channel: Any, spec: dict[str, Any]) -> None:
        context = self._get(spec)
        grace = min(max(0.0, float(spec.get("grace", INTERRUPT_GRACE))), LONGEST_PATIENCE)
        if context.current is None:
            # It is starting, perhaps: then the one for which it starts is meant.
            answer = {"interrupted": context.skip(), "stopped": True}
            channel.send(RESULT, pack(dict(context.describe(), **answer)))
            return
        Interruption(self._loop, context, channel).begin(grace)


def _unknown(name: Any) -> ContextRefused:
    return ContextRefused(
        "context_not_found",
        f"there is no context {str(name)[:80]} in this session",
        "k8e sandbox context list SESSION lists its contexts",
    )


class Interruption:
    """Interrupts what a context runs; the caller is told when it stopped, or that it did not."""

    def __init__(self, loop: Loop, context: Context, channel: Any) -> None:
        self._loop = loop
        self._context = context
        self._channel: Any = channel
        self._target: Any = context.current
        self._timer: Timer | None = None
        channel.handler = self

    def begin(self, grace: float) -> None:
        self._target.on_exit.append(self._answer)
        self._timer = self._loop.later(grace, self._answer)
        self._context.interrupt()

    def _answer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._channel is not None:
            stopped = self._target.code is not None
            answer = {"interrupted": True, "stopped": stopped}
            self._channel.send(RESULT, pack(dict(self._context.describe(), **answer)))
            self._channel.close()
            self._channel = None

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind != CANCEL:
            raise WireError(f"frame {kind} on an interruption")
        self._channel.close()
        self._channel = None

    def on_lost(self) -> None:
        self._channel = None
