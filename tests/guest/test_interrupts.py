"""Interrupts of a real bash that come in the moments in which it, or its child, would lose them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from k8e.guest import context_runs, contexts, loop
from k8e.guest.wire import OUT

# The edges of a context are not public: its program is at the other end of them.
# pyright: reportPrivateUsage=false
GUEST = Path(contexts.__file__).parent
PATIENCE = 60.0
COPY = """
import ctypes, os, signal, sys
heard = open(sys.argv[1], "w")
ctypes.CDLL(None).prctl(15, b"bash", 0, 0, 0)
signal.signal(signal.SIGINT, lambda *_: print("heard", file=heard, flush=True))
print("on", flush=True)
open(sys.argv[2]).read()
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("sleep", ["sleep", "600"])
"""
"""What a child of bash is before it is a program: it hears an interrupt, and forgets it."""


class Bash(contexts.Context):
    """A context on this machine, as whoever runs the tests."""

    def __init__(self) -> None:
        super().__init__(loop.Loop(), "c", "bash", "/")
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        printed, prints = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(prints, True)
        with theirs:
            command = [*self._talk.command(0)]
            command[command.index("--rcfile") + 1] = str(GUEST / "bash.sh")
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=prints,
                stderr=subprocess.DEVNULL,  # where it tells of jobs
                start_new_session=True,
            )
        os.close(prints)
        self.pid = self.process.pid
        self._streams = {printed: OUT}
        self.state = "starting"
        self.listen()
        self._loop.watch(self._control.fileno(), contexts.READ, self._on_control)
        self.until(lambda: self.state == "ready")

    def until(self, check: Callable[[], object]) -> None:
        """Let the guest do its work until something has come true."""
        deadline = time.monotonic() + PATIENCE
        while not check():
            assert time.monotonic() < deadline
            self._loop.later(0.01, lambda: None)
            self._loop.turn()

    def begin(self, code: str) -> context_runs.CellExec:
        cell = context_runs.CellExec(self._loop, "e", {"code": code.encode()}, self)
        self.add(cell)
        return cell

    def run(self, code: str) -> str:
        """What a cell prints that ends well."""
        cell = self.begin(code)
        self.until(lambda: cell.code is not None)
        assert cell.code == 0
        return printed_by(cell)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, 9)
        self.process.wait(PATIENCE)
        for fd in self._streams:
            os.close(fd)
        if self._control is not None:
            self._control.close()


def printed_by(cell: context_runs.CellExec) -> str:
    kept = cell.output
    chunks = [kept.chunk(number) for number in range(kept.locate(kept.end - 1) + 1)]
    return b"".join(chunk[2] for chunk in chunks if chunk is not None).decode()


@pytest.fixture
def bash(monkeypatch: pytest.MonkeyPatch) -> Generator[Bash]:
    monkeypatch.setattr(context_runs, "as_user", contextlib.nullcontext)
    monkeypatch.setattr(contexts, "AGAIN_SECONDS", 1000.0)  # the first one alone must do
    monkeypatch.setattr(contexts, "LOOKS", (0.02,) * 1000)
    made = Bash()
    yield made
    made.close()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


class Copy:
    """A child of bash's that is no program until it is told to become one."""

    def __init__(self, folder: Path) -> None:
        (folder / "copy.py").write_text(COPY)
        self._heard, self._go = folder / "heard", folder / "go"
        os.mkfifo(self._go)
        self.command = f"python3 {folder}/copy.py {self._heard} {self._go}"

    def heard(self) -> bool:
        return "heard" in self._heard.read_text()

    def become_program(self) -> None:
        with open(self._go, "w", encoding="ascii"):
            pass


def test_an_interrupt_that_comes_before_a_cell_has_begun_stops_it(bash: Bash) -> None:
    bash.run("kept=1")
    bash.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, bash.pid, os.WSTOPPED)
    cell = bash.begin("sleep 600")
    bash.interrupt()
    bash.process.send_signal(signal.SIGCONT)
    bash.until(lambda: cell.code is not None)
    assert cell.code == 130
    assert bash.run("echo $kept") == "1\n"


def test_a_child_that_was_no_program_yet_is_interrupted_when_it_is_one(
    bash: Bash, copy: Copy
) -> None:
    bash.run("kept=1")
    cell = bash.begin(copy.command)
    bash.until(lambda: "on" in printed_by(cell))
    bash.interrupt()
    bash.until(copy.heard)
    assert cell.code is None
    copy.become_program()
    bash.until(lambda: cell.code is not None)
    assert cell.code == 130
    assert bash.run("echo $kept") == "1\n"


def test_a_child_that_an_interrupted_cell_has_left_behind_ends_and_others_do_not(
    bash: Bash, copy: Copy
) -> None:
    """As bash leaves one behind that it has made while it held the interrupt back."""
    job = bash.run("sleep 600 & echo $!").strip()
    # In `wait` bash is interrupted at once, whatever its children do.
    cell = bash.begin(f"{copy.command} & echo $!; wait")
    bash.until(lambda: len(printed_by(cell).split()) == 2)
    child = next(word for word in printed_by(cell).split() if word.isdigit())
    bash.interrupt()
    bash.until(lambda: cell.code is not None)
    assert cell.code == 130
    # An interactive bash may end the line of what was interrupted, as late as now.
    assert bash.run("echo next").lstrip("\n") == "next\n"
    copy.become_program()
    bash.until(lambda: not Path("/proc", child).exists())
    assert Path("/proc", job).exists()


def test_a_program_that_tidies_up_is_interrupted_once(bash: Bash, tmp_path: Path) -> None:
    script = tmp_path / "tidy.py"
    script.write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, lambda *_: os.write(1, b'heard\\n'))\n"
        "os.write(1, b'on\\n')\n"
        f"open({str(tmp_path / 'go')!r}).read()\n"
        "os.write(1, b'tidy\\n')\n"
    )
    os.mkfifo(tmp_path / "go")
    cell = bash.begin(f"python3 {script}")
    bash.until(lambda: "on" in printed_by(cell))
    bash.interrupt()
    bash.until(lambda: "heard" in printed_by(cell))
    looks = len(bash._pressed._looks) if bash._pressed is not None else 0
    bash.until(lambda: bash._pressed is not None and len(bash._pressed._looks) < looks - 10)
    with open(tmp_path / "go", "w", encoding="ascii"):
        pass
    bash.until(lambda: cell.code is not None)
    assert printed_by(cell) == "on\nheard\ntidy\n"


def test_a_byte_that_a_late_interrupt_costs_is_not_of_the_next_cell(
    bash: Bash, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bash._talk.request

    def shortened(number: int, code: bytes, env: dict[str, str]) -> bytes:
        return whole(number, code, env)[1:]

    monkeypatch.setattr(bash._talk, "request", shortened)
    assert bash.run("echo one") == "one\n"
    assert bash.run("echo two") == "two\n"
