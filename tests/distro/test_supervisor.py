"""Components as real processes: order, restarts, adoption, logs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from k8e import errors
from k8e.distro import supervisor
from k8e.distro.layout import Layout
from k8e.distro.supervisor import Component, Supervisor

pytestmark = pytest.mark.anyio
SECONDS = 20.0
STAY = "import signal; signal.pause()"
NOTIFY = (
    "import os, socket, signal\n"
    "out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "out.connect(os.environ['NOTIFY_SOCKET'])\n"
    "out.send(b'READY=1')\n"
    "signal.pause()\n"
)


@pytest.fixture
def layout(tmp_path: Path) -> Generator[Layout]:
    found = Layout(tmp_path / "data", tmp_path / "run")
    found.make()
    yield found
    for record in supervisor.read_records(found):
        if record.is_running():
            os.kill(record.pid, signal.SIGKILL)


def program(
    name: str, text: str, *, needs: tuple[str, ...] = (), notifies: bool = False
) -> Component:
    return Component(name, (sys.executable, "-Ic", text), needs=needs, notifies=notifies)


def record(layout: Layout, name: str) -> supervisor.Record:
    return supervisor.Record(**json.loads((layout.components / f"{name}.json").read_bytes()))


def end_of(pid: int) -> int:
    """By which signal a child of ours has ended."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    assert ended is not None
    return ended.si_status


async def until(check: Callable[[], object]) -> None:
    """Wait for what a process does by itself."""
    async with asyncio.timeout(SECONDS):
        while not check():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


async def until_restarted(layout: Layout, name: str, times: int) -> supervisor.Record:
    """Wait until a component has been started again so often."""
    async with asyncio.timeout(SECONDS):
        while True:
            with contextlib.suppress(FileNotFoundError, ValueError):
                found = record(layout, name)
                if found.restarts >= times and found.is_running():
                    return found
            await asyncio.sleep(0.02)


async def test_a_component_starts_when_those_it_needs_are_ready(layout: Layout) -> None:
    mark = layout.data / "mark"
    slow = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n{NOTIFY}"
    after = f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(mark)!r}).exists() else 7)"
    found = Supervisor(layout)
    found.add(program("first", slow, notifies=True))
    found.add(program("second", f"{after} if 0 else None\n{STAY}", needs=("first",)))
    await found.ready("second", SECONDS)
    assert mark.exists()
    assert record(layout, "first").ready
    await found.stop()
    assert not list(layout.components.glob("*.json"))


async def test_what_ends_is_started_again_and_the_record_says_why(layout: Layout) -> None:
    found = Supervisor(layout)
    found.add(program("weak", "import sys; print('no disk'); sys.exit(3)"))
    await until((layout.components / "weak.json").exists)
    await until(lambda: record(layout, "weak").restarts)
    assert record(layout, "weak").last_end == "ended with 3; it said last: no disk"
    await found.stop()


async def test_a_killed_component_is_started_again(layout: Layout) -> None:
    found = Supervisor(layout)
    found.add(program("one", STAY))
    await found.ready("one", SECONDS)
    first = record(layout, "one")
    os.kill(first.pid, signal.SIGKILL)
    second = await until_restarted(layout, "one", 1)
    assert second.pid != first.pid
    assert second.last_end == "was killed by SIGKILL"
    await found.stop()


async def test_a_component_that_is_not_ready_in_time_is_told_with_what_it_says(
    layout: Layout,
) -> None:
    found = Supervisor(layout)
    found.add(program("mute", f"print('waiting for Godot', flush=True); {STAY}", notifies=True))
    await until(lambda: supervisor.last_lines(layout.logs / "mute.log"))
    with pytest.raises(errors.ToolFailed, match="waiting for Godot"):
        await found.ready("mute", 0.1)
    await found.stop()


async def test_the_next_supervisor_takes_over_what_runs(layout: Layout) -> None:
    first = Supervisor(layout)
    first.add(program("one", NOTIFY, notifies=True))
    await first.ready("one", SECONDS)
    pid = record(layout, "one").pid
    await first.leave()  # as one that was killed: nothing is told to the component
    second = Supervisor(layout)
    second.add(program("one", NOTIFY, notifies=True))
    await second.ready("one", SECONDS)
    assert record(layout, "one").pid == pid
    os.kill(pid, signal.SIGKILL)
    anew = await until_restarted(layout, "one", 1)
    assert anew.pid != pid
    await second.stop()


async def test_what_was_not_ready_when_its_supervisor_was_killed_is_started_anew(
    layout: Layout,
) -> None:
    """It tells once that it is ready, and nobody may have listened."""
    deaf = program("one", NOTIFY.replace("out.send", "0 and out.send"), notifies=True)
    first = Supervisor(layout)
    first.add(deaf)
    await until((layout.components / "one.json").exists)
    await until(lambda: record(layout, "one").is_running())
    pid = record(layout, "one").pid
    await first.leave()
    second = Supervisor(layout)
    second.add(deaf)
    await until(lambda: record(layout, "one").pid not in (0, pid))
    assert not record(layout, "one").ready
    await second.stop()


async def test_a_component_whose_state_cannot_be_written_down_is_kept_running(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mark = layout.data / "starts"
    monkeypatch.setattr(supervisor, "write_private", full)
    found = Supervisor(layout)
    found.add(program("weak", f"open({str(mark)!r}, 'a').write('x')"))
    await until(lambda: mark.exists() and len(mark.read_text()) > 1)
    await found.stop()
    assert "its state cannot be written down: [Errno 28]" in caplog.text


async def test_what_is_stopped_while_it_makes_way_for_another_configuration_ends(
    layout: Layout,
) -> None:
    slow = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
    first = Supervisor(layout)
    first.add(program("slow", f"{slow}{STAY}"))
    await until(lambda: supervisor.last_lines(layout.logs / "slow.log"))
    pid = record(layout, "slow").pid
    await first.leave()
    second = Supervisor(layout)
    second.add(
        Component("slow", (sys.executable, "-Ic", f"{slow}\n{STAY}"), stop_seconds=0.5),
    )
    await asyncio.sleep(0)  # it begins to stop the old one, which does not hear
    await second.stop()
    assert end_of(pid) == signal.SIGKILL


async def test_another_configuration_means_another_process(layout: Layout) -> None:
    file = layout.data / "config"
    file.write_text("a")
    first = Supervisor(layout)
    component = Component("one", (sys.executable, "-Ic", STAY), files=(file,))
    first.add(component)
    await first.ready("one", SECONDS)
    pid = record(layout, "one").pid
    await first.leave()
    file.write_text("b")
    second = Supervisor(layout)
    second.add(component)
    await second.ready("one", SECONDS)
    assert record(layout, "one").pid != pid
    await second.stop()


async def test_a_number_that_is_another_process_now_is_not_taken_over(layout: Layout) -> None:
    component = program("one", STAY)
    stranger = supervisor.Record("one", pid=os.getpid(), start_time=1, digest=component.digest())
    (layout.components / "one.json").write_text(json.dumps(vars(stranger)))
    found = Supervisor(layout)
    found.add(component)
    await found.ready("one", SECONDS)
    assert record(layout, "one").pid not in (0, os.getpid())
    await found.stop()


async def test_a_program_that_is_missing_is_tried_again(layout: Layout) -> None:
    found = Supervisor(layout)
    path = layout.data / "program"
    found.add(Component("late", (str(path),)))
    await until((layout.components / "late.json").exists)
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -Ic '{STAY}'\n")
    path.chmod(0o755)
    assert "No such file" in (await until_restarted(layout, "late", 1)).last_end
    await found.stop()


async def test_a_long_log_is_moved_aside_while_it_is_written(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", 1000)
    monkeypatch.setattr(supervisor, "LOG_LOOK_SECONDS", 0.05)
    text = "import signal, time\nprint('x' * 2000, flush=True)\nsignal.pause()"
    found = Supervisor(layout)
    found.add(program("loud", text))
    keeping = asyncio.create_task(found.keep_logs_short())
    await until((layout.logs / "loud.log.1").exists)
    await until(lambda: not (layout.logs / "loud.log").stat().st_size)
    assert (layout.logs / "loud.log.1").read_text() == "x" * 2000 + "\n"
    keeping.cancel()
    await found.stop()


def test_a_long_log_is_cut_where_there_is_no_room_for_a_copy(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", 1000)
    log = layout.logs / "k8e.log"
    log.write_text("x" * 2000)
    log.with_suffix(".log.1").symlink_to("/dev/full")
    supervisor.shorten_log(log)
    assert log.stat().st_size == 0
    assert not log.with_suffix(".log.1").is_symlink()
