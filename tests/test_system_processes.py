"""Ending processes that are looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e import system

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such handles")


def mentioning(word: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (folder / "cmdline").read_bytes():
                yield int(folder.name)
        except OSError:
            continue


def test_what_was_found_has_ended_and_its_memory_is_gone() -> None:
    word = f"k8e-test-{os.urandom(8).hex()}"
    code = "import sys; held = bytearray(64 << 20); print(flush=True); sys.stdin.read()"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, word], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        system.end_all(lambda: mentioning(word))
        assert list(mentioning(word)) == []
        assert [process.wait(0) for process in started] == [-9, -9, -9]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_number_that_passed_to_another_process_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        answers = iter([[bystander.pid], [], []])
        system.end_all(lambda: next(answers))
        assert bystander.poll() is None
        bystander.kill()


def test_numbers_of_nobody_are_no_error() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    system.end_all(lambda: [gone.pid])
