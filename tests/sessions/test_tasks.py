"""Work that goes on by itself: to its end, waited for, and its failures told."""

from __future__ import annotations

import asyncio

import pytest

from k8e.sessions.tasks import Tasks
from tests.sessions.fakes import PATIENCE


async def fail() -> None:
    raise ValueError("it went wrong")


async def test_what_was_begun_comes_to_its_end_though_its_caller_leaves() -> None:
    tasks, gate, done = Tasks(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await gate.wait()
        done.set()

    caller = asyncio.create_task(tasks.to_the_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    gate.set()
    async with asyncio.timeout(PATIENCE):
        await tasks.wait()
    assert done.is_set()


async def test_a_failure_is_its_caller_s_and_nobody_else_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="wrong"):
        await Tasks().to_the_end(fail())
    assert caplog.text == ""


async def test_a_failure_that_nobody_waits_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tasks, gate = Tasks("nobody was served"), asyncio.Event()

    async def work() -> None:
        await gate.wait()
        await fail()

    caller = asyncio.create_task(tasks.to_the_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    gate.set()
    tasks.spawn(fail())
    async with asyncio.timeout(PATIENCE):
        await tasks.wait()
        await asyncio.sleep(0)
    assert caplog.text.count("nobody was served") == 2
