"""Keeps interpreters of one language ready, started when nothing else is to be done."""

from __future__ import annotations

import time
from typing import Any, Callable

from k8e.guest.loop import READ, Loop, Timer
from k8e.guest.waiting import MESSAGE_MOST, Waiting, end_process, wait_for_ends

QUIET = 0.02  # seconds without a program, before one is started that nobody waits for
PATIENCE = 0.3  # seconds after which one is started even if programs run
START_SECONDS = 20.0
KEEP_MANY = 60.0  # seconds without use, after which one is enough
GIVE_UP = 5  # interpreters in a row that ended without being used


class Keeper:
    """The interpreters of one kind: how many are wanted, and those that there are."""

    def __init__(self, kind: Any, loop: Loop, busy: Callable[[], object]) -> None:
        self.kind = kind
        self.allowed = False
        self.env: dict[str, str] = {}
        self.modules: list[str] = []
        self.left_out: list[str] = []
        """Modules that cannot be loaded ahead, and why."""
        self.on_start: Callable[[int], object] = lambda _: None
        self.on_news: Callable[[], object] = lambda: None
        """One is ready, or none will be."""
        self.kept: dict[int, Waiting] = {}  # by pid
        self._loop = loop
        self._busy = busy
        self._wanted = 0
        self._failures = 0
        self._last_use = 0.0
        self._due = 0.0  # when the next one is started even if programs run
        self._refill: Timer | None = None
        self._fading: Timer | None = None

    @property
    def ready(self) -> int:
        """How many could take a program now."""
        return sum(item.ready for item in self.kept.values())

    def prepare(self, env: dict[str, str], modules: list[str]) -> None:
        """Have one ready for a session that is to come."""
        self.env = env
        self.allowed = self.kind.is_there()
        self._wanted = 1
        self._load_ahead(modules)
        if self.allowed and (why := self._obstacle()):
            self._tell(why)
            self.allowed = False
        self._fill()

    def _obstacle(self) -> str:
        """Why none may wait; what is not there is told when it is to be started."""
        try:
            return self.kind.obstacle(self.env)
        except OSError:
            return ""

    def _load_ahead(self, modules: list[str]) -> None:
        for name in modules:
            if not self.kind.loads_modules:
                self._tell(f"{name}: modules are loaded ahead only for python")
            elif not all(part.isidentifier() for part in name.split(".")):
                self._tell(f"{name}: this is no name of a module")
            else:
                self.modules.append(name)

    def _tell(self, reason: str) -> None:
        self.left_out.append(f"{self.kind.language}: {reason}")

    def bind(self, env: dict[str, str], allowed: bool, modules: list[str] | None = None) -> None:
        """A session has this environment, and room for interpreters that wait, or not."""
        if modules and not self.modules and not self.left_out:  # else they were told before
            self._load_ahead(modules)
        self.env = env
        self.allowed = allowed and self.kind.is_there()
        if not self.allowed:
            self.clear()
        for item in list(self.kept.values()):
            if item.suits(self.kind, env):
                # The folder of packages may be a new one. Nobody has put anything into either.
                item.site = self.kind.site(env)
            else:
                self._drop(item)
                self._plan_refill(QUIET)
        if not self.allowed or self.kind.conditions(env) is None:
            self._wanted = 0

    def renew(self) -> None:
        """Have others in the place of those that wait."""
        if self.clear():
            self._plan_refill(QUIET)

    # Using one.

    def claim(self, spec: dict[str, Any], env: dict[str, str], cwd: str) -> Waiting | None:
        """An interpreter that has begun to run the code of ``spec``; None if a new one must."""
        if not self.allowed or not self.kind.takes(spec) or self.kind.conditions(env) is None:
            return None
        self._last_use = time.monotonic()
        item = next((item for item in self.kept.values() if item.ready), None)
        if item is not None and item.suits(self.kind, env):
            if item.is_current(self.kind, env, cwd):
                return self._hand_over(item, spec, env, cwd)
            self.clear()
        if item is None:
            self._wanted = min(self.kind.most_ready, self._wanted + 1)
        self._plan_refill(PATIENCE)
        return None

    def _hand_over(
        self, item: Waiting, spec: dict[str, Any], env: dict[str, str], cwd: str
    ) -> Waiting | None:
        message = self.kind.message(spec, env, cwd)
        self._plan_refill(PATIENCE)
        if message is None or len(message) > MESSAGE_MOST:
            return None
        self._loop.forget(item.control.fileno())
        del self.kept[item.pid]
        if not item.begin(message):
            end_process(item.pid)
            item.close()
            return None
        self._failures = 0
        item.leave(bool(spec.get("stdin")))
        return item

    # Having some.

    def on_quiet(self) -> None:
        """No program runs any more."""
        if self.allowed and len(self.kept) < self._wanted:
            self._plan_refill(QUIET)

    def _plan_refill(self, seconds: float) -> None:
        """Start one when nothing has run for so long, and at the latest when it is due."""
        now = time.monotonic()
        if not self._due:
            self._due = now + PATIENCE
        if self._refill is not None:
            self._refill.cancel()
        self._refill = self._loop.later(min(seconds, max(0.0, self._due - now)), self._fill)

    def _fill(self) -> None:
        self._refill = None
        if self._busy() and time.monotonic() < self._due:
            self._plan_refill(PATIENCE)
            return
        self._due = 0.0
        # One after the other: there is no hurry.
        starting = any(not item.ready for item in self.kept.values())
        if starting or not self.allowed or len(self.kept) >= self._wanted or self._obstacle():
            return
        try:
            item = Waiting(self.kind, self.env, self.modules)
        except OSError:
            self._fail()
            return
        self.kept[item.pid] = item
        self.on_start(item.pid)
        self._loop.watch(item.control.fileno(), READ, lambda _: self._on_word(item))
        self._loop.later(START_SECONDS, lambda: self._check_started(item))
        if self._fading is None:
            self._fading = self._loop.later(KEEP_MANY, self._fade)

    def _on_word(self, item: Waiting) -> None:
        told = item.listen()
        if told is None:
            return
        word, more = told
        if word == "r":
            item.read = more
            item.ready = True
            self.on_news()
            if len(self.kept) < self._wanted:
                self._plan_refill(QUIET)
            return
        self._drop(item)
        if word == "o":  # of another version than those that this was tried with
            self._failures = GIVE_UP
        if word == "f" and item.modules:
            self._leave_out(more)
        else:
            self._fail(item)

    def _leave_out(self, reasons: list[str]) -> None:
        """Go on without the modules that these are about."""
        for text in reasons:
            self._tell(text)
        names = [text.partition(":")[0] for text in reasons]
        kept = [name for name in self.modules if name not in names]
        self.modules = kept if len(kept) < len(self.modules) else []
        self._fill()

    def _check_started(self, item: Waiting) -> None:
        if not item.ready and self.kept.get(item.pid) is item:
            self._drop(item)
            self._fail(item)

    def _fade(self) -> None:
        """After a while without use, one is enough."""
        self._fading = None
        left = self._last_use + KEEP_MANY - time.monotonic()
        if left <= 0:
            self._wanted = min(1, self._wanted)
            for item in list(self.kept.values())[1:]:
                self._drop(item)
        elif self.kept:
            self._fading = self._loop.later(left, self._fade)

    def lost(self, pid: int) -> None:
        """A process that is no exec has ended; it was ours, perhaps."""
        item = self.kept.get(pid)
        if item is not None:
            self._forget(item)
            self._fail(item)

    def _fail(self, item: Waiting | None = None) -> None:
        if item is not None and item.modules and not item.ready and self.modules:
            names = " ".join(item.modules)
            self._leave_out([f"{name}: it ended while it loaded {names}" for name in self.modules])
            return
        self._failures += 1
        if self._failures >= GIVE_UP:
            self.allowed = False
            self.clear()
            self.on_news()
        else:
            self._plan_refill(PATIENCE)

    def clear(self) -> bool:
        """End them all, and wait a moment until they are gone; whether there were any."""
        found = list(self.kept.values())
        for item in found:
            self._drop(item)
        wait_for_ends([item.pid for item in found])
        return bool(found)

    def _drop(self, item: Waiting) -> None:
        end_process(item.pid)
        self._forget(item)

    def _forget(self, item: Waiting) -> None:
        self._loop.unwatch(item.control.fileno())
        item.close()
        del self.kept[item.pid]
