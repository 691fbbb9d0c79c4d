"""The program of Python contexts, as a process, on our Python and on the oldest that may run it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from k8e.guest import wire
from k8e.runtimes import guest_package
from tests.guest.test_package import interpreter  # noqa: F401 # pyright: ignore[reportUnusedImport]

SECONDS = 60.0
# What the kernel uses of matplotlib, which is not installed where tests run.
PYPLOT = """
from matplotlib.figure import Figure
open_figures = {}
def figure(number):
    show.__signature__ = None  # as the real one does when it makes its first figure
    return open_figures.setdefault(number, Figure())
def get_fignums(): return list(open_figures)
def close(which): open_figures.clear()
def show(): raise RuntimeError('no display')
"""
FIGURE = """
class Figure:
    def __repr__(self): return 'a figure'
    def savefig(self, file, format, bbox_inches): file.write(b'drawn as ' + format.encode())
"""


class Kernel:
    """A running kernel, and the guest's end of its socket."""

    def __init__(self, runner: str, name: str, folder: Path) -> None:
        program = folder / name
        program.write_text(guest_package.kernel_sources()[name], "utf-8")
        self._mine, theirs = socket.socketpair()
        self._mine.settimeout(SECONDS)
        command = [runner, str(program), str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        theirs.close()
        self._splitter = wire.Splitter(1 << 20)
        self._frames: list[tuple[int, int, bytes]] = []
        self._number = 0
        assert self._receive()[0] == wire.HELLO

    def _receive(self) -> tuple[int, dict[str, Any]]:
        while not self._frames:
            data = self._mine.recv(1 << 16)
            assert data, "the kernel has ended"
            self._frames += self._splitter.feed(data)
        kind, _, body = self._frames.pop(0)
        return kind, wire.unpack_dict(body)

    def begin(self, code: str, **env: str) -> None:
        self._number += 1
        body = wire.pack({"code": code.encode(), "env": env})
        self._mine.sendall(wire.frame(wire.CALL, self._number, body))

    def end(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        shown: list[dict[str, Any]] = []
        while True:
            kind, value = self._receive()
            if kind == wire.EXIT:
                return shown, value
            shown.append(value["data"])
            if value["waits"]:
                self._mine.sendall(wire.frame(wire.RESULT, self._number))

    def cancel(self) -> None:
        self._mine.sendall(wire.frame(wire.CANCEL, self._number))

    def interrupt(self) -> None:
        """As the guest does with a Python context; a Node context gets no signal."""
        self.cancel()
        self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """Let it do nothing for a while, as on a busy machine."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def run(self, code: str, **env: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self.begin(code, **env)
        return self.end()

    def close(self) -> None:
        self._mine.close()
        assert self.process.wait(SECONDS) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def kernel(interpreter: str, tmp_path: Path) -> Generator[Kernel]:  # noqa: F811
    package = tmp_path / "matplotlib"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pyplot.py").write_text(PYPLOT, "utf-8")
    (package / "figure.py").write_text(FIGURE, "utf-8")
    started = Kernel(interpreter, "python.py", tmp_path)
    yield started
    started.close()


def test_cells_share_one_namespace_and_show_their_last_value(kernel: Kernel) -> None:
    assert kernel.run("x = 1") == ([], {"code": 0})
    assert kernel.run("x + 1") == ([{"text/plain": "2"}], {"code": 0})
    assert kernel.run("import asyncio\nawait asyncio.sleep(0, x)")[0] == [{"text/plain": "1"}]
    assert kernel.run("import os; os.environ['A']", A="b")[0] == [{"text/plain": "'b'"}]
    assert kernel.run("os.environ.get('A')") == ([], {"code": 0})
    future = "from __future__ import annotations\ndef f(a: missing): pass"
    assert kernel.run(future)[1] == {"code": 0}
    assert kernel.run("def g(a: missing): pass")[1] == {"code": 0}


def test_a_traceback_has_the_lines_of_cells_and_nothing_of_ours(kernel: Kernel) -> None:
    kernel.run("def f():\n    raise ValueError('here')")
    told = kernel.run("f()")[1]
    assert (told["code"], told["name"], told["value"]) == (1, "ValueError", "here")
    assert "<cell 1>" in told["traceback"]
    assert "raise ValueError('here')" in told["traceback"]
    assert "python.py" not in told["traceback"]
    assert kernel.run("1 +")[1]["name"] == "SyntaxError"
    broken = "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E"
    assert kernel.run(broken)[1]["name"] == "E"


def test_figures_are_shown_and_closed(kernel: Kernel) -> None:
    shown = [{"image/png": b"drawn as png", "text/plain": "a figure"}]
    assert kernel.run("import matplotlib.pyplot as plt\nplt.figure(1);")[0] == shown
    assert kernel.run("plt.get_fignums()")[0] == [{"text/plain": "[]"}]
    assert kernel.run("plt.figure(2); plt.show(); print('on')") == (shown, {"code": 0})


def test_an_interrupt_stops_a_cell_and_only_that(kernel: Kernel) -> None:
    kernel.process.send_signal(signal.SIGINT)  # while nothing runs
    code = "import os, time\nos.write(1, b'on')\ntime.sleep(60)"
    kernel.begin(code)
    assert kernel.process.stdout is not None
    assert os.read(kernel.process.stdout.fileno(), 2) == b"on"
    kernel.process.send_signal(signal.SIGINT)
    told = kernel.end()[1]
    assert (told["name"], told["code"]) == ("KeyboardInterrupt", 130)
    assert "python.py" not in told["traceback"]
    assert kernel.run("1")[0] == [{"text/plain": "1"}]


def test_an_interrupt_that_comes_before_a_cell_has_begun_stops_it(kernel: Kernel) -> None:
    kernel.stop()
    kernel.begin("begun = True\nwhile True: pass")
    kernel.interrupt()
    kernel.go_on()
    told = kernel.end()[1]
    assert (told["name"], told["code"]) == ("KeyboardInterrupt", 130)
    assert "python.py" not in told["traceback"]
    assert kernel.run("'begun' in globals()")[0] == [{"text/plain": "False"}]


def test_an_interrupt_that_comes_after_a_cell_has_ended_stops_no_other(kernel: Kernel) -> None:
    kernel.begin("1;")
    kernel.end()
    kernel.stop()
    kernel.interrupt()
    kernel.begin("2")
    kernel.go_on()
    assert kernel.end() == ([{"text/plain": "2"}], {"code": 0})


@pytest.fixture
def node(tmp_path: Path) -> Generator[Kernel]:
    if shutil.which("node") is None:
        pytest.skip("Node is not installed")
    started = Kernel("node", "node.js", tmp_path)
    yield started
    started.close()


@pytest.mark.parametrize("code", ["while (true) {}", "await new Promise(() => {})"])
def test_node_stops_a_cell_that_was_interrupted_before_it_began(node: Kernel, code: str) -> None:
    node.stop()
    node.begin(f"globalThis.begun = true; {code}")
    node.cancel()
    node.go_on()
    told = node.end()[1]
    assert (told["name"], told["code"]) == ("Interrupted", 130)
    assert node.run("globalThis.begun")[0] == []


@pytest.mark.parametrize("code", ["while (true) {}", "await new Promise(() => {})"])
def test_node_stops_a_cell_that_runs_and_keeps_what_it_did(node: Kernel, code: str) -> None:
    for number in range(3):
        node.begin(f"globalThis.x = {number}; process.stdout.write('on'); {code}")
        assert node.process.stdout is not None
        assert os.read(node.process.stdout.fileno(), 2) == b"on"
        node.cancel()
        assert node.end()[1]["name"] == "Interrupted"
        assert node.run("x") == ([{"text/plain": str(number)}], {"code": 0})


def test_node_stops_no_cell_for_an_interrupt_of_an_earlier_one(node: Kernel) -> None:
    assert node.run("1;")[1] == {"code": 0}
    node.stop()
    node.cancel()
    node.begin("await new Promise((resolve) => setTimeout(resolve, 50)); 2")
    node.go_on()
    assert node.end() == ([{"text/plain": "2"}], {"code": 0})


def test_node_ends_when_the_guest_has_gone(node: Kernel) -> None:
    assert node.run("setInterval(() => {}, 1000); 1;")[1] == {"code": 0}
    # The fixture closes the socket and waits for the end.


def test_a_second_interrupt_of_a_cell_that_is_being_stopped_changes_nothing(
    kernel: Kernel,
) -> None:
    code = (
        "import os, signal\n"
        "class E(Exception):\n"
        "    def __str__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "raise E"
    )
    told = kernel.run(code)[1]
    assert (told["name"], told["code"]) == ("KeyboardInterrupt", 130)


def test_a_forked_child_ends_with_its_cell(kernel: Kernel) -> None:
    code = "import os\npid = os.fork()\nif not pid: raise SystemExit(5)\nos.waitpid(pid, 0)[1] >> 8"
    assert kernel.run(code) == ([{"text/plain": "5"}], {"code": 0})
