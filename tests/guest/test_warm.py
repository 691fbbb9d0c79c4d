"""Warm interpreters: how many wait, and that a program begins in exactly one place."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator
from typing import Any

import pytest

from k8e.guest import warm
from k8e.guest.loop import Timer

MESSAGE = b"program"
PACKET = len(MESSAGE).to_bytes(4, "big") + MESSAGE + warm.TOKEN
SPEC: dict[str, Any] = {"code": b"print(1)", "language": "python"}
ENV = {"PATH": "/usr/bin", "HOME": "/home/user", "LANG": "C.UTF-8"}


class Waiting(warm.WarmPython):
    """One without a process: the test is at the other end."""

    def __init__(self) -> None:
        self.control, self._theirs = socket.socketpair()
        self.control.setblocking(False)
        self.conditions = warm.start_conditions(ENV)
        self.program = ""
        self.site = []
        self.ready = False
        self.pid = 0
        self.stdin, self.stdout, self.stderr = (os.open("/dev/null", os.O_RDONLY) for _ in "123")

    @property
    def theirs(self) -> socket.socket:
        return self._theirs


@pytest.fixture
def waiting() -> Generator[Waiting]:
    item = Waiting()
    yield item
    item.close()


def test_one_that_says_that_it_begins_has_begun(waiting: Waiting) -> None:
    waiting.theirs.send(b"b")
    assert waiting.begin(MESSAGE)
    assert waiting.theirs.recv(100) == PACKET


def test_one_that_refuses_has_not_begun(waiting: Waiting) -> None:
    waiting.theirs.send(b"n")
    assert not waiting.begin(MESSAGE)


def test_what_a_stopped_one_was_sent_is_taken_back(waiting: Waiting) -> None:
    assert not waiting.begin(MESSAGE)
    waiting.theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        waiting.theirs.recv(1)


def test_one_that_was_stopped_while_it_read_never_gets_the_last_byte(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_all_but_the_token(_: float) -> bytes:
        assert waiting.theirs.recv(len(PACKET) - 1) == PACKET[:-1]
        return b""

    monkeypatch.setattr(waiting, "_hear", read_all_but_the_token)
    assert not waiting.begin(MESSAGE)


def test_one_that_took_the_last_byte_but_says_nothing_has_begun(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_everything(_: float) -> bytes:
        assert waiting.theirs.recv(len(PACKET)) == PACKET
        return b""

    monkeypatch.setattr(waiting, "_hear", read_everything)
    assert waiting.begin(MESSAGE), "its program must not run a second time"


def test_a_mailbox_without_room_is_not_used(waiting: Waiting) -> None:
    assert not waiting.begin(bytes(10 << 20))


@pytest.mark.parametrize(
    "added",
    [{"PYTHONPATH": "x"}, {"PYTHONUNBUFFERED": ""}, {"K8E_WARM": "0"}],
)
def test_some_environments_always_get_a_new_interpreter(added: dict[str, str]) -> None:
    assert warm.start_conditions({**ENV, **added}) is None


@pytest.mark.parametrize(
    "added", ["PATH", "HOME", "LANG", "TZ", "LC_ALL", "LD_PRELOAD", "MALLOC_ARENA_MAX", "LANGUAGE"]
)
def test_what_is_read_at_the_start_must_be_the_same(added: str) -> None:
    assert warm.start_conditions({**ENV, added: "other"}) != warm.start_conditions(ENV)


@pytest.mark.parametrize("added", ["USER", "TMPDIR", "K8E_WARM", "MY_PYTHON", "PYTHON_VERSION"])
def test_what_a_program_reads_itself_may_differ(added: str) -> None:
    assert warm.start_conditions({**ENV, added: "other"}) == warm.start_conditions(ENV)


class Clock:
    """A loop whose timers the test fires, and whose descriptors nobody watches."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Timer]] = []

    def later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(0, 0, callback)
        self.timers.append((seconds, timer))
        return timer

    def watch(self, *_: object) -> None:
        pass

    def unwatch(self, *_: object) -> None:
        pass

    def fire(self, most: float) -> None:
        """Whatever is due within ``most`` seconds."""
        timers, self.timers = self.timers, []
        for seconds, timer in timers:
            if seconds > most:
                self.timers.append((seconds, timer))
            elif timer.callback is not None:
                timer.callback()


def answering(value: object) -> Callable[..., object]:
    """A function that takes anything."""

    def answer(*_: object) -> object:
        return value

    return answer


class Kept:
    """A Warmth on a clock, with interpreters that have no process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.busy = False
        self.made: list[Waiting] = []
        self.killed: list[int] = []
        monkeypatch.setattr(warm, "WarmPython", self._make)
        monkeypatch.setattr(warm, "end_process", self.killed.append)
        monkeypatch.setattr(warm, "wait_for_end", answering(None))
        monkeypatch.setattr(warm, "site_changed", answering(False))
        monkeypatch.setattr(warm, "find_program", answering(""))
        loop: Any = self.clock
        self.warmth = warm.Warmth(loop, lambda: self.busy)
        self.warmth.allowed = True

    def _make(self, *_: object) -> Waiting:
        item = Waiting()
        item.pid = len(self.made) + 1
        self.made.append(item)
        return item

    def run(self) -> warm.WarmPython | None:
        return self.warmth.claim(SPEC, ENV, "/")

    def get_ready(self) -> None:
        for item in self.made:
            item.ready = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Generator[Kept]:
    kept = Kept(monkeypatch)
    yield kept
    kept.warmth.clear()


def test_nothing_waits_before_python_was_used(kept: Kept) -> None:
    kept.warmth.on_quiet()
    kept.clock.fire(warm.PATIENCE)
    assert kept.made == []


def test_after_the_first_use_one_is_started_as_soon_as_it_is_quiet(kept: Kept) -> None:
    assert kept.run() is None
    kept.clock.fire(warm.QUIET)
    assert kept.made == []
    kept.warmth.on_quiet()
    kept.clock.fire(warm.QUIET)
    assert len(kept.made) == 1


def test_while_programs_run_one_is_started_late_but_is(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(warm.time, "monotonic", lambda: now[0])
    kept.run()
    kept.busy = True
    kept.warmth.on_quiet()
    kept.clock.fire(warm.QUIET)
    assert kept.made == []
    now[0] += warm.PATIENCE
    kept.clock.fire(warm.PATIENCE)
    assert len(kept.made) == 1


def test_more_wait_where_more_are_used_and_one_after_a_while(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        kept.run()
        kept.warmth.on_quiet()
    for _ in range(5):
        kept.clock.fire(warm.PATIENCE)
        kept.get_ready()
        kept.warmth.on_quiet()
    assert len(kept.made) == kept.warmth.ready == warm.MOST_READY
    later = warm.time.monotonic() + warm.KEEP_MANY
    monkeypatch.setattr(warm.time, "monotonic", lambda: later)
    kept.clock.fire(warm.KEEP_MANY)
    assert kept.warmth.ready == 1
    assert kept.killed == [2, 3]


def test_interpreters_that_never_become_ready_are_given_up(kept: Kept) -> None:
    kept.run()
    for _ in range(2 * warm.GIVE_UP):
        kept.clock.fire(warm.START_SECONDS)
    assert len(kept.made) == warm.GIVE_UP
    assert not kept.warmth.allowed
    assert kept.killed == list(range(1, warm.GIVE_UP + 1))


def test_one_of_a_version_that_was_not_tried_is_the_last(kept: Kept) -> None:
    kept.run()
    kept.clock.fire(warm.PATIENCE)
    [item] = kept.made
    item.theirs.send(b"o")
    kept.warmth._on_word(item)  # pyright: ignore[reportPrivateUsage]
    assert not kept.warmth.allowed
    kept.run()
    kept.clock.fire(warm.START_SECONDS)
    assert kept.made == [item]


def test_one_that_ended_by_itself_is_replaced_and_not_killed(kept: Kept) -> None:
    kept.run()
    kept.clock.fire(warm.PATIENCE)
    kept.get_ready()
    kept.warmth.lost(kept.made[0].pid)
    assert kept.warmth.ready == 0
    kept.clock.fire(warm.PATIENCE)
    assert len(kept.made) == 2
    assert kept.killed == []


def test_one_is_used_once(kept: Kept) -> None:
    kept.run()
    kept.clock.fire(warm.PATIENCE)
    kept.get_ready()
    kept.made[0].theirs.send(b"b")
    assert kept.run() is kept.made[0]
    for fd in (kept.made[0].stdout, kept.made[0].stderr):
        os.close(fd)
    assert kept.warmth.ready == 0
    assert kept.run() is None


@pytest.mark.parametrize(
    "call",
    [
        {"code": b"x" * (warm.CODE_MOST + 1)},
        {"code": b"print('\0')"},
        {"code": b"print('\xff')"},
        {"language": "bash"},
        {"tty": [24, 80]},
        {"warm": False},
    ],
)
def test_what_only_a_new_interpreter_can_do_uses_none(kept: Kept, call: dict[str, Any]) -> None:
    kept.run()
    kept.clock.fire(warm.PATIENCE)
    kept.get_ready()
    assert kept.warmth.claim({**SPEC, **call}, ENV, "/") is None
    assert kept.warmth.ready == 1


def test_the_boot_program_is_beside_the_guest() -> None:
    assert warm.boot_folder("/run/k8e/guest/guest-0123.pyc") == "/run/k8e/guest/boot-0123"
