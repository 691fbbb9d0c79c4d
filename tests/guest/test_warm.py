"""Warm interpreters: how many wait, and that a program begins in exactly one place."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from k8e.guest import interpreters, warm
from k8e.guest.interpreters import node_conditions, start_conditions, suits
from k8e.guest.loop import Timer

MESSAGE = b"program"
PACKET = len(MESSAGE).to_bytes(4, "big") + MESSAGE + warm.TOKEN
SPEC: dict[str, Any] = {"code": b"print(1)", "language": "python"}
ENV = {"PATH": "/usr/bin", "HOME": "/home/user", "LANG": "C.UTF-8"}


class Stand(warm.WaitingInterpreter):
    """One without a process: the test is at the other end."""

    def __init__(self) -> None:
        self.control, self._theirs = socket.socketpair()
        self.control.setblocking(False)
        self.env = ENV
        self.modules: list[str] = []
        self.read: list[str] = []
        self.conditions = start_conditions(ENV)
        self.program = ""
        self.site = []
        self.ready = False
        self._said = b""
        self.pid = 0
        self.stdin, self.stdout, self.stderr = (os.open("/dev/null", os.O_RDONLY) for _ in "123")

    @property
    def theirs(self) -> socket.socket:
        return self._theirs


@pytest.fixture
def stand() -> Generator[Stand]:
    item = Stand()
    yield item
    item.close()


def test_one_that_says_that_it_begins_has_begun(stand: Stand) -> None:
    stand.theirs.send(b"b")
    assert stand.begin(MESSAGE)
    assert stand.theirs.recv(100) == PACKET


def test_one_that_refuses_has_not_begun(stand: Stand) -> None:
    stand.theirs.send(b"n")
    assert not stand.begin(MESSAGE)


def test_what_a_stopped_one_was_sent_is_taken_back(stand: Stand) -> None:
    assert not stand.begin(MESSAGE)
    stand.theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        stand.theirs.recv(1)


def test_one_that_was_stopped_while_it_read_never_gets_the_last_byte(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_all_but_the_token(_: float) -> bytes:
        assert stand.theirs.recv(len(PACKET) - 1) == PACKET[:-1]
        return b""

    monkeypatch.setattr(stand, "_hear", read_all_but_the_token)
    assert not stand.begin(MESSAGE)


def test_one_that_took_the_last_byte_but_says_nothing_has_begun(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_everything(_: float) -> bytes:
        assert stand.theirs.recv(len(PACKET)) == PACKET
        return b""

    monkeypatch.setattr(stand, "_hear", read_everything)
    assert stand.begin(MESSAGE), "its program must not run a second time"


def test_a_mailbox_without_room_is_not_used(stand: Stand) -> None:
    assert not stand.begin(bytes(10 << 20))


@pytest.mark.parametrize(
    "added",
    [{"K8E_WARM": "0"}, {"LD_PRELOAD": "/workspace/x.so"}, {"LD_LIBRARY_PATH": ""}],
)
def test_some_environments_always_get_a_new_interpreter(added: dict[str, str]) -> None:
    assert start_conditions({**ENV, **added}) is None
    assert node_conditions({**ENV, **added}) is None


@pytest.mark.parametrize("added", ["PYTHONPATH", "PYTHONUNBUFFERED"])
def test_variables_of_python_mean_a_new_one(added: str) -> None:
    assert start_conditions({**ENV, added: ""}) is None


@pytest.mark.parametrize(
    "added", ["PATH", "HOME", "LANG", "TZ", "LC_ALL", "MALLOC_ARENA_MAX", "LANGUAGE"]
)
def test_what_is_read_at_the_start_must_be_the_same(added: str) -> None:
    assert start_conditions({**ENV, added: "other"}) != start_conditions(ENV)


@pytest.mark.parametrize("added", ["USER", "TMPDIR", "K8E_WARM", "MY_PYTHON", "PYTHON_VERSION"])
def test_what_a_program_reads_itself_may_differ(added: str) -> None:
    assert start_conditions({**ENV, added: "other"}) == start_conditions(ENV)


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests looks at files as themselves."""
    monkeypatch.setattr(interpreters, "as_user", contextlib.nullcontext)
    monkeypatch.setattr(interpreters, "UID", os.getuid() + 1)


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("place", ["bin", "."])
def test_a_python_of_a_virtual_environment_does_not_wait(tmp_path: Path, place: str) -> None:
    program = tmp_path / "bin/python3"
    program.parent.mkdir()
    program.symlink_to("/usr/bin/python3")
    seen = interpreters.site_state(str(tmp_path), str(program))
    assert interpreters.is_installed(str(program))
    (tmp_path / place / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert not interpreters.is_installed(str(program))
    assert interpreters.site_changed(seen)


@pytest.mark.usefixtures("unprivileged")
def test_a_python_that_is_the_users_own_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python3"
    program.symlink_to("/usr/bin/python3")
    monkeypatch.setattr(interpreters, "UID", os.getuid())
    assert not interpreters.is_installed(str(program))
    assert not interpreters.is_installed(str(tmp_path / "missing"))


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

    def forget(self, *_: object) -> None:
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
        self.made: list[Stand] = []
        self.killed: list[int] = []
        monkeypatch.setattr(warm, "WaitingInterpreter", self._make)
        monkeypatch.setattr(warm, "end_process", self.killed.append)
        monkeypatch.setattr(warm, "wait_for_ends", answering(None))
        monkeypatch.setattr(Stand, "is_current", answering(True))
        monkeypatch.setattr(interpreters.PythonKind, "obstacle", answering(""))
        loop: Any = self.clock
        self.warmth = warm.WarmInterpreters(loop, lambda: self.busy)
        self.keeper = self.warmth.keepers["python"]
        self.keeper.allowed = True

    def _make(self, *_: object) -> Stand:
        item = Stand()
        item.pid = len(self.made) + 1
        self.made.append(item)
        return item

    def run(self) -> warm.WaitingInterpreter | None:
        return self.warmth.claim(SPEC, ENV, "/")

    def get_ready(self) -> None:
        for item in self.made:
            item.ready = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Generator[Kept]:
    kept = Kept(monkeypatch)
    yield kept
    kept.warmth.clear()


def test_none_is_started_where_each_must_start_anew(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters.PythonKind, "obstacle", answering("it starts anew"))
    monkeypatch.setattr(interpreters.PythonKind, "is_there", answering(True))
    kept.keeper.prepare(ENV, [])
    assert (kept.made, kept.keeper.left_out) == ([], ["python: it starts anew"])
    kept.keeper.bind(ENV, allowed=True)
    kept.run()
    kept.warmth.on_quiet()
    kept.clock.fire(warm.PATIENCE)
    assert kept.made == []


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
    assert len(kept.made) == kept.keeper.ready == interpreters.PythonKind.most_ready
    later = warm.time.monotonic() + warm.KEEP_MANY
    monkeypatch.setattr(warm.time, "monotonic", lambda: later)
    kept.clock.fire(warm.KEEP_MANY)
    assert kept.keeper.ready == 1
    assert kept.killed == [2, 3]


def test_interpreters_that_never_become_ready_are_given_up(kept: Kept) -> None:
    kept.run()
    for _ in range(2 * warm.GIVE_UP):
        kept.clock.fire(warm.START_SECONDS)
    assert len(kept.made) == warm.GIVE_UP
    assert not kept.keeper.allowed
    assert kept.killed == list(range(1, warm.GIVE_UP + 1))


def test_one_of_a_version_that_was_not_tried_is_the_last(kept: Kept) -> None:
    kept.run()
    kept.clock.fire(warm.PATIENCE)
    [item] = kept.made
    item.theirs.send(b"o\n")
    kept.keeper._on_word(item)  # pyright: ignore[reportPrivateUsage]
    assert not kept.keeper.allowed
    kept.run()
    kept.clock.fire(warm.START_SECONDS)
    assert kept.made == [item]


def test_one_that_ended_by_itself_is_replaced_and_not_killed(kept: Kept) -> None:
    kept.run()
    kept.clock.fire(warm.PATIENCE)
    kept.get_ready()
    kept.warmth.lost(kept.made[0].pid)
    assert kept.keeper.ready == 0
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
    assert kept.keeper.ready == 0
    assert kept.run() is None


@pytest.mark.parametrize(
    "call",
    [
        {"code": b"x" * (interpreters.CODE_MOST + 1)},
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
    assert kept.keeper.ready == 1


def test_the_boot_program_is_beside_the_guest() -> None:
    assert interpreters.boot_folder("/run/k8e/guest/guest-0123.pyc") == "/run/k8e/guest/boot-0123"


def test_those_that_were_killed_are_reaped() -> None:
    pids = [os.posix_spawn("/bin/sleep", ["sleep", "100"], {}) for _ in range(2)]
    for pid in pids:
        warm.end_process(pid)
    warm.wait_for_ends(pids)
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_nobody_waits_for_ends_that_a_tracer_holds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm.os, "waitpid", answering((0, 0)))
    began = time.monotonic()
    warm.wait_for_ends([7, 8, 9])
    assert time.monotonic() - began < 10 * warm.END_SECONDS


NOTHING_MORE: tuple[str, list[str]] = ("r", [])
NONSENSE: tuple[str, list[str]] = ("", [])


@pytest.fixture
def settled(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """One interpreter is ready before there is a session."""
    monkeypatch.setattr(interpreters.PythonKind, "is_there", answering(True))
    monkeypatch.setattr(interpreters.PythonKind, "site", answering([]))
    kept.keeper.prepare(ENV, ["json", "no name"])
    kept.get_ready()
    return kept


def test_before_a_session_one_is_started_at_once(settled: Kept) -> None:
    assert settled.keeper.ready == 1
    assert settled.keeper.modules == ["json"]
    assert settled.keeper.left_out == ["python: no name: this is not the name of a module"]


def test_a_session_has_the_one_that_waited_for_it(settled: Kept) -> None:
    settled.keeper.bind({**ENV, "MINE": "1"}, True)
    assert settled.keeper.ready == 1
    assert settled.killed == []


def test_a_session_without_room_has_none(settled: Kept) -> None:
    settled.keeper.bind(ENV, False)
    settled.keeper.on_quiet()
    settled.clock.fire(warm.PATIENCE)
    assert (settled.killed, len(settled.made)) == ([1], 1)


def test_a_session_with_another_start_has_another_one_soon(settled: Kept) -> None:
    settled.keeper.bind({**ENV, "TZ": "Asia/Tokyo"}, True)
    assert settled.killed == [1]
    settled.clock.fire(warm.QUIET)
    assert len(settled.made) == 2


def test_a_session_that_always_wants_new_ones_keeps_none(settled: Kept) -> None:
    settled.keeper.bind({**ENV, "PYTHONUTF8": "1"}, True)
    settled.clock.fire(warm.PATIENCE)
    settled.keeper.on_quiet()
    settled.clock.fire(warm.PATIENCE)
    assert (settled.killed, len(settled.made)) == ([1], 1)


@pytest.mark.parametrize(
    ("read", "env", "same"),
    [
        ([], {**ENV, "NEW": "1"}, True),
        (["NEW"], {**ENV, "NEW": "1"}, False),
        (["PATH", "MISSING"], {**ENV, "NEW": "1"}, True),
        (["*"], {**ENV, "NEW": "1"}, False),
        (["*"], dict(ENV), True),
        ([], {**ENV, "OMP_NUM_THREADS": "1"}, False),
    ],
)
def test_modules_suit_where_what_they_read_is_the_same(
    read: list[str], env: dict[str, str], same: bool
) -> None:
    assert suits(read, ENV, env) is same


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"r\n", NOTHING_MORE),
        (b"rHOME\0TZ\n", ("r", ["HOME", "TZ"])),
        (b"fnumpy: gone\n", ("f", ["numpy: gone"])),
        (b"r", None),
        (b"x" * (warm.SAID_MOST + 1), NONSENSE),
    ],
)
def test_what_one_says_is_read_when_it_is_whole(
    stand: Stand, said: bytes, told: tuple[str, list[str]] | None
) -> None:
    stand.theirs.send(said)
    found = stand.listen()
    while found is None and len(said) > warm.SAID_MOST:
        found = stand.listen()
    assert found == told


def test_modules_that_cannot_be_loaded_are_left_out(settled: Kept) -> None:
    settled.made[0].modules, settled.made[0].ready = ["json"], False
    settled.made[0].theirs.send(b"fjson: it prints\n")
    settled.keeper._on_word(settled.made[0])  # pyright: ignore[reportPrivateUsage]
    assert settled.keeper.modules == []
    assert settled.keeper.left_out[-1] == "python: json: it prints"
    assert len(settled.made) == 2


@pytest.mark.parametrize("code", [b"-1", b"import('fs')", b"crypto.randomUUID()", b"a\0b", b"\xff"])
def test_what_node_treats_differently_gets_a_new_one(code: bytes) -> None:
    assert not interpreters.NodeKind("/").takes({"code": code})


def test_a_node_that_waits_cannot_be_given_input() -> None:
    assert interpreters.NodeKind("/").takes({"code": b"1"})
    assert not interpreters.NodeKind("/").takes({"code": b"1", "stdin": True})


@pytest.mark.parametrize("added", ["NODE_PATH", "NODE_OPTIONS", "NODE_DEBUG"])
def test_variables_of_node_mean_a_new_one(added: str) -> None:
    assert node_conditions({**ENV, added: "x"}) is None


@pytest.mark.parametrize("added", ["TZ", "LC_ALL", "OPENSSL_CONF", "UV_THREADPOOL_SIZE"])
def test_what_node_reads_at_its_start_must_be_the_same(added: str) -> None:
    assert node_conditions({**ENV, added: "x"}) != node_conditions(ENV)
