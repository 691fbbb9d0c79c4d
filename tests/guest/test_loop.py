"""The guest's event loop, and that nothing ends it."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from k8e.guest.loop import MAX_COMPLAINTS, READ, Loop


def fail(*_: object) -> None:
    raise RuntimeError("unforeseen")


def count_turns(seen: list[str], turns: int) -> Generator[None]:
    for _ in range(turns):
        seen.append("job")
        yield None


def failing_job() -> Generator[None]:
    yield None
    fail()


def test_what_fails_ends_neither_the_loop_nor_what_else_is_due(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loop = Loop()
    seen: list[str] = []
    reading, writing = os.pipe()
    os.write(writing, b"x")
    loop.watch(reading, READ, fail)
    loop.later(0, fail)
    loop.later(0, lambda: seen.append("timer"))
    loop.add_job(failing_job())
    loop.add_job(count_turns(seen, 3))
    for _ in range(5):
        loop.turn()
    assert seen == ["timer", "job", "job", "job"]
    loop.unwatch(reading)
    os.close(reading)
    os.close(writing)
    assert capfd.readouterr().err.count("RuntimeError: unforeseen") == 5 + 1 + 1


def test_complaints_are_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    for _ in range(5 * MAX_COMPLAINTS):
        loop.later(0, fail)
    loop.turn()
    assert capfd.readouterr().err.count("RuntimeError: unforeseen") == MAX_COMPLAINTS


def test_what_is_watched_soon_is_heard_from_the_next_turn_on() -> None:
    loop = Loop()
    seen: list[str] = []
    reading, writing = os.pipe()
    unheard, _ = os.pipe2(os.O_CLOEXEC), os.write(writing, b"x")
    loop.watch_soon(reading, lambda _: seen.append("read"))
    loop.watch_soon(unheard[0], fail)
    loop.unwatch(unheard[0])
    os.close(unheard[1])  # which would wake whoever still watches
    loop.turn()
    assert seen == ["read"]
    loop.unwatch(reading)
    os.write(writing, b"x")
    loop.later(0, lambda: seen.append("timer"))
    loop.turn()
    assert seen == ["read", "timer"]
    for fd in (reading, writing, unheard[0]):
        os.close(fd)


def test_what_is_closed_soon_is_heard_no_more_and_closed_after_the_turn() -> None:
    loop, heard = Loop(), list[str]()
    reader, writer = os.pipe()
    other, waker = os.pipe()

    def on_ready(_: int) -> None:
        heard.append("ready")
        loop.close_soon(reader)
        heard.append("open" if os.fstat(reader) else "")

    loop.watch(reader, READ, on_ready)
    loop.watch(other, READ, lambda _: os.read(other, 1))
    os.write(writer, b"x")
    loop.turn()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
    os.write(waker, b"x")
    loop.turn()
    assert heard == ["ready", "open"]
    for fd in (writer, other, waker):
        os.close(fd)
