"""Holders as they are made: whoever is killed in the middle leaves nothing that is in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.places import COMMAND, eventually, wait_readable
from tests.rootless.users import UserPlace

# A process that makes a holder, and stops for good at one step of it.
MAKE = """
import os, select, signal, sys
from pathlib import Path
from k8e.rootless import holder
place, step = Path(sys.argv[1]), sys.argv[2]
def stop(*_):
    os.write(1, b'here\\n')
    signal.pause()
fork = os.fork
def fork_slowly():
    pid = fork()
    if pid and os.geteuid() == 0:  # the one who is to tell the holder's pid
        select.select([], [], [], 0.5)
    return pid
if step == 'slow':
    os.fork = fork_slowly
if step in ('nothing', 'slow'):
    found, use = holder.ensure(place)
    told = Path(f'/proc/{found.pid}/cmdline').read_bytes().split(b'\\0')[0].decode()
    print(told, *sorted(map(int, os.listdir(f'/proc/{found.pid}/fd'))), flush=True)
    holder.leave(place, use)
else:
    setattr(holder, step, stop)
    holder.ensure(place)
"""


def make(place: UserPlace, step: str, *inherited: int) -> subprocess.Popen[bytes]:
    place.run_dir.mkdir(exist_ok=True)
    os.chown(place.run_dir, *[place.folder.stat().st_uid] * 2)
    words = [*place.command[: -len(COMMAND)], sys.executable, "-P", "-c", MAKE]
    return subprocess.Popen(
        [*words, str(place.run_dir), step],
        env=place.environ,
        stdout=subprocess.PIPE,
        pass_fds=inherited,
    )


@pytest.mark.parametrize("step", ["_map", "_write_down", "_await_end"])
def test_a_holder_can_be_made_after_its_maker_was_killed(user_place: UserPlace, step: str) -> None:
    maker = make(user_place, step)
    assert maker.stdout is not None
    assert wait_readable(maker.stdout.fileno())
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=10)
    again = make(user_place, "nothing")
    told, _ = again.communicate(timeout=20)
    assert told.split()[0] == b"k8e-holder"
    eventually(lambda: not user_place._left())  # pyright: ignore[reportPrivateUsage]


def test_a_holder_has_its_name_and_no_descriptor_of_whoever_made_it(user_place: UserPlace) -> None:
    high = os.dup2(os.open(os.devnull, os.O_RDONLY), 1500)
    try:
        told, _ = make(user_place, "nothing", high).communicate(timeout=20)
    finally:
        os.close(high)
    assert told.decode().split() == ["k8e-holder", "0", "1", "2"]


def test_the_order_in_which_two_processes_run_does_not_matter(user_place: UserPlace) -> None:
    told, _ = make(user_place, "slow").communicate(timeout=20)
    assert told.split()[0] == b"k8e-holder"
