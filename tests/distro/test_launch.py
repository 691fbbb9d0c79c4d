"""One supervisor for each machine, and how others find it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k8e import errors, system
from k8e.distro import launch
from k8e.distro.layout import Layout

HOLD = (
    "import sys; from pathlib import Path; from k8e.distro import launch, layout\n"
    "with launch.locked(layout.Layout(Path(sys.argv[1]), Path(sys.argv[1]))):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


def test_a_supervisor_is_found_while_it_runs_and_a_second_is_refused(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path)
    assert launch.running(layout) == 0
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=pipe, stdout=pipe) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == b"held\n"
        assert launch.running(layout) == held.pid
        with (
            pytest.raises(errors.Conflict, match=f"already, as pid {held.pid}"),
            launch.locked(layout),
        ):
            pass
        held.kill()
    assert launch.running(layout) == 0, "one that was killed runs no more"
    with launch.locked(layout):
        assert launch.running(layout) == os.getpid()
    assert launch.running(layout) == 0


def test_a_number_that_is_another_process_now_is_no_supervisor(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path)
    assert system.start_time(os.getpid()) != 1
    layout.lock.write_text(f"{os.getpid()} 1")
    assert launch.running(layout) == 0
