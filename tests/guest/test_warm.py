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

from k8e.guest import conditions, keeping, kinds, waiting, warm
from k8e.guest.conditions import node_conditions, start_conditions, suits
from k8e.guest.loop import Timer

MESSAGE = b"program"
PACKET = len(MESSAGE).to_bytes(4, "big") + MESSAGE + waiting.TOKEN
SPEC: dict[str, Any] = {"code": b"print(1)", "language": "python"}
ENV = {"PATH": "/usr/bin", "HOME": "/home/user", "LANG": "C.UTF-8"}


class Stand(waiting.Waiting):
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
    monkeypatch.setattr(conditions, "as_user", contextlib.nullcontext)
    monkeypatch.setattr(conditions, "UID", os.getuid() + 1)


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("place", ["bin", "."])
def test_a_python_of_a_virtual_environment_does_not_wait(tmp_path: Path, place: str) -> None:
    program = tmp_path / "bin/python3"
    program.parent.mkdir()
    program.symlink_to("/usr/bin/python3")
    seen = conditions.site_state(str(tmp_path), str(program))
    assert conditions.is_installed(str(program))
    (tmp_path / place / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert not conditions.is_installed(str(program))
    assert conditions.site_changed(seen)


@pytest.mark.usefixtures("unprivileged")
def test_a_python_that_is_the_users_own_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python3"
    program.symlink_to("/usr/bin/python3")
    monkeypatch.setattr(conditions, "UID", os.getuid())
    assert not conditions.is_installed(str(program))
    assert not conditions.is_installed(str(tmp_path / "missing"))


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
        monkeypatch.setattr(keeping, "Waiting", self._make)
        monkeypatch.setattr(keeping, "end_process", self.killed.append)
        monkeypatch.setattr(keeping, "wait_for_ends", answering(None))
        monkeypatch.setattr(Stand, "is_current", answering(True))
        monkeypatch.setattr(kinds.PythonKind, "obstacle", answering(""))
        loop: Any = self.clock
        self.warmth = warm.Warmth(loop, lambda: self.busy)
        self.keeper = self.warmth.keepers["python"]
        self.keeper.allowed = True

    def _make(self, *_: object) -> Stand:
        item = Stand()
        item.pid = len(self.made) + 1
        self.made.append(item)
        return item

    def run(self) -> waiting.Waiting | None:
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
    monkeypatch.setattr(kinds.PythonKind, "obstacle", answering("it starts anew"))
    monkeypatch.setattr(kinds.PythonKind, "is_there", answering(True))
    kept.keeper.prepare(ENV, [])
    assert (kept.made, kept.keeper.left_out) == ([], ["python: it starts anew"])
    kept.keeper.bind(ENV, allowed=True)
    kept.run()
    kept.warmth.on_quiet()
    kept.clock.fire(keeping.PATIENCE)
    assert kept.made == []


def test_nothing_waits_before_python_was_used(kept: Kept) -> None:
    kept.warmth.on_quiet()
    kept.clock.fire(keeping.PATIENCE)
    assert kept.made == []


def test_after_the_first_use_one_is_started_as_soon_as_it_is_quiet(kept: Kept) -> None:
    assert kept.run() is None
    kept.clock.fire(keeping.QUIET)
    assert kept.made == []
    kept.warmth.on_quiet()
    kept.clock.fire(keeping.QUIET)
    assert len(kept.made) == 1


def test_while_programs_run_one_is_started_late_but_is(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now[0])
    kept.run()
    kept.busy = True
    kept.warmth.on_quiet()
    kept.clock.fire(keeping.QUIET)
    assert kept.made == []
    now[0] += keeping.PATIENCE
    kept.clock.fire(keeping.PATIENCE)
    assert len(kept.made) == 1


def test_more_wait_where_more_are_used_and_one_after_a_while(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        kept.run()
        kept.warmth.on_quiet()
    for _ in range(5):
        kept.clock.fire(keeping.PATIENCE)
        kept.get_ready()
        kept.warmth.on_quiet()
    assert len(kept.made) == kept.keeper.ready == kinds.PythonKind.most_ready
    later = keeping.time.monotonic() + keeping.KEEP_MANY
    monkeypatch.setattr(keeping.time, "monotonic", lambda: later)
    kept.clock.fire(keeping.KEEP_MANY)
    assert kept.keeper.ready == 1
    assert kept.killed == [2, 3]


def test_interpreters_that_never_become_ready_are_given_up(kept: Kept) -> None:
    kept.run()
    for _ in range(2 * keeping.GIVE_UP):
        kept.clock.fire(keeping.START_SECONDS)
    assert len(kept.made) == keeping.GIVE_UP
    assert not kept.keeper.allowed
    assert kept.killed == list(range(1, keeping.GIVE_UP + 1))


def test_one_of_a_version_that_was_not_tried_is_the_last(kept: Kept) -> None:
    kept.run()
    kept.clock.fire(keeping.PATIENCE)
    [item] = kept.made
    item.theirs.send(b"o\n")
    kept.keeper._on_word(item)  # pyright: ignore[reportPrivateUsage]
    assert not kept.keeper.allowed
    kept.run()
    kept.clock.fire(keeping.START_SECONDS)
    assert kept.made == [item]


def test_one_that_ended_by_itself_is_replaced_and_not_killed(kept: Kept) -> None:
    kept.run()
    kept.clock.fire(keeping.PATIENCE)
    kept.get_ready()
    kept.warmth.lost(kept.made[0].pid)
    assert kept.keeper.ready == 0
    kept.clock.fire(keeping.PATIENCE)
    assert len(kept.made) == 2
    assert kept.killed == []


def test_one_is_used_once(kept: Kept) -> None:
    kept.run()
    kept.clock.fire(keeping.PATIENCE)
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
        {"code": b"x" * (kinds.CODE_MOST + 1)},
        {"code": b"print('\0')"},
        {"code": b"print('\xff')"},
        {"language": "bash"},
        {"tty": [24, 80]},
        {"warm": False},
    ],
)
def test_what_only_a_new_interpreter_can_do_uses_none(kept: Kept, call: dict[str, Any]) -> None:
    kept.run()
    kept.clock.fire(keeping.PATIENCE)
    kept.get_ready()
    assert kept.warmth.claim({**SPEC, **call}, ENV, "/") is None
    assert kept.keeper.ready == 1


def test_the_boot_program_is_beside_the_guest() -> None:
    assert kinds.boot_folder("/run/k8e/guest/guest-0123.pyc") == "/run/k8e/guest/boot-0123"


def test_those_that_were_killed_are_reaped() -> None:
    pids = [os.posix_spawn("/bin/sleep", ["sleep", "100"], {}) for _ in range(2)]
    for pid in pids:
        waiting.end_process(pid)
    waiting.wait_for_ends(pids)
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_nobody_waits_for_ends_that_a_tracer_holds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.os, "waitpid", answering((0, 0)))
    began = time.monotonic()
    waiting.wait_for_ends([7, 8, 9])
    assert time.monotonic() - began < 10 * waiting.END_SECONDS


NOTHING_MORE: tuple[str, list[str]] = ("r", [])
NONSENSE: tuple[str, list[str]] = ("", [])


@pytest.fixture
def settled(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """One interpreter is ready before there is a session."""
    monkeypatch.setattr(kinds.PythonKind, "is_there", answering(True))
    monkeypatch.setattr(kinds.PythonKind, "site", answering([]))
    kept.keeper.prepare(ENV, ["json", "no name"])
    kept.get_ready()
    return kept


def test_before_a_session_one_is_started_at_once(settled: Kept) -> None:
    assert settled.keeper.ready == 1
    assert settled.keeper.modules == ["json"]
    assert settled.keeper.left_out == ["python: no name: this is no name of a module"]


def test_a_session_has_the_one_that_waited_for_it(settled: Kept) -> None:
    settled.keeper.bind({**ENV, "MINE": "1"}, True)
    assert settled.keeper.ready == 1
    assert settled.killed == []


def test_a_session_without_room_has_none(settled: Kept) -> None:
    settled.keeper.bind(ENV, False)
    settled.keeper.on_quiet()
    settled.clock.fire(keeping.PATIENCE)
    assert (settled.killed, len(settled.made)) == ([1], 1)


def test_a_session_with_another_start_has_another_one_soon(settled: Kept) -> None:
    settled.keeper.bind({**ENV, "TZ": "Asia/Tokyo"}, True)
    assert settled.killed == [1]
    settled.clock.fire(keeping.QUIET)
    assert len(settled.made) == 2


def test_a_session_that_always_wants_new_ones_keeps_none(settled: Kept) -> None:
    settled.keeper.bind({**ENV, "PYTHONUTF8": "1"}, True)
    settled.clock.fire(keeping.PATIENCE)
    settled.keeper.on_quiet()
    settled.clock.fire(keeping.PATIENCE)
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
        (b"x" * (waiting.SAID_MOST + 1), NONSENSE),
    ],
)
def test_what_one_says_is_read_when_it_is_whole(
    stand: Stand, said: bytes, told: tuple[str, list[str]] | None
) -> None:
    stand.theirs.send(said)
    found = stand.listen()
    while found is None and len(said) > waiting.SAID_MOST:
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
    assert not kinds.NodeKind("/").takes({"code": code})


def test_a_node_that_waits_cannot_be_given_input() -> None:
    assert kinds.NodeKind("/").takes({"code": b"1"})
    assert not kinds.NodeKind("/").takes({"code": b"1", "stdin": True})


@pytest.mark.parametrize("added", ["NODE_PATH", "NODE_OPTIONS", "NODE_DEBUG"])
def test_variables_of_node_mean_a_new_one(added: str) -> None:
    assert node_conditions({**ENV, added: "x"}) is None


@pytest.mark.parametrize("added", ["TZ", "LC_ALL", "OPENSSL_CONF", "UV_THREADPOOL_SIZE"])
def test_what_node_reads_at_its_start_must_be_the_same(added: str) -> None:
    assert node_conditions({**ENV, added: "x"}) != node_conditions(ENV)
