"""The packed guest: one file, for every Python that an image may have."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from k8e.guest import wire
from k8e.runtimes import guest_package

OLDEST = (3, 9)
START_SECONDS = 60.0


def find_python(major: int, minor: int) -> str | None:
    """An interpreter of this version on this machine."""
    name = f"python{major}.{minor}"
    homes = [os.environ.get("PYENV_ROOT"), "~/.pyenv", "/opt/python"]
    folders = [Path(home).expanduser() for home in homes if home]
    candidates = [shutil.which(name)]
    candidates += [
        str(p) for f in folders for p in f.glob(f"versions/{major}.{minor}.*/bin/{name}")
    ]
    for path in candidates:
        # A shim on PATH may stand for a version that is not there.
        if (
            path
            and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return path
    return None


@pytest.fixture(params=["ours", "oldest"])
def interpreter(request: pytest.FixtureRequest) -> str:
    if request.param == "ours":
        return sys.executable
    found = find_python(*OLDEST)
    if found is None:
        pytest.skip(f"no Python {OLDEST[0]}.{OLDEST[1]} on this machine")
    return found


def test_two_modules_that_define_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one and two both define same"):
        guest_package.join_modules({"one": "def same(): pass", "two": "same = 5"})


def test_joining_drops_imports_of_each_other_docstrings_and_annotations() -> None:
    source = guest_package.join_modules(
        {
            "one": '"""Doc."""\nfrom __future__ import annotations\nLIMIT: int = 5\nEMPTY: int\n',
            "two": "import os\nfrom typing import Any\nfrom k8e.guest.one import LIMIT\n"
            'def f(a: Any, *b: int, c: str = "x", **d: int) -> Any:\n    """Doc."""\n',
        }
    )
    assert source == "LIMIT = 5\nimport os\n\ndef f(a, *b, c='x', **d):\n    pass"


def test_the_guest_imports_nothing_but_the_standard_library_and_nothing_slow() -> None:
    tree = ast.parse(guest_package.packed_source())
    top = {
        name.name.partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import)
        for name in node.names
    }
    top |= {
        (node.module or "").partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
    }
    assert top <= set(sys.stdlib_module_names)
    slow = {"asyncio", "argparse", "dataclasses", "selectors", "subprocess", "pathlib", "json"}
    assert not top & slow
    assert "k8e" not in top


def test_packing_happens_once_and_is_readable_by_all(tmp_path: Path) -> None:
    first = guest_package.pack_guest(tmp_path, sys.executable)
    written = first.stat().st_mtime_ns
    assert guest_package.pack_guest(tmp_path, sys.executable) == first
    assert first.stat().st_mtime_ns == written
    assert first.stat().st_mode & 0o777 == 0o644


def test_the_packed_guest_starts_and_proves_itself(tmp_path: Path, interpreter: str) -> None:
    """As far as it gets outside of a sandbox: it dials, and answers our challenge."""
    compiled = guest_package.pack_guest(tmp_path, interpreter)
    (tmp_path / "key").write_bytes(b"k" * 32)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        server.listen()
        server.settimeout(START_SECONDS)
        starter = (
            "import importlib.util as u, sys, os\n"
            "spec = u.spec_from_file_location('guest', sys.argv[1]); m = u.module_from_spec(spec)\n"
            "spec.loader.exec_module(m); os.chdir(sys.argv[2])\n"
            "m.SOCKET, m.KEY = 'sock', 'key'; m.Guest._own_home = lambda self: None\n"
            "m.Guest().run()"
        )
        argv = [interpreter, "-I", "-S", "-c", starter, str(compiled), str(tmp_path)]
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(argv, stderr=log) as guest:
            try:
                with server.accept()[0] as connection:
                    connection.settimeout(START_SECONDS)
                    talk_to(connection, guest.pid)
            finally:
                guest.kill()
    assert (tmp_path / "log").read_bytes() == b""


def talk_to(connection: socket.socket, pid: int) -> None:
    """Be the host for one handshake and two calls."""
    splitter = wire.Splitter(wire.MAX_REPLY)

    def receive() -> tuple[int, int, bytes]:
        while not (frames := splitter.feed(connection.recv(1 << 16))):
            pass
        assert len(frames) == 1
        return frames[0]

    kind, _, nonce = receive()
    assert kind == wire.HELLO
    answer = b"n" * 16 + wire.proof(b"k" * 32, nonce, b"host")
    connection.sendall(wire.frame(wire.WELCOME, 0, answer))
    kind, _, body = receive()
    assert (kind, body) == (wire.PROOF, wire.proof(b"k" * 32, b"n" * 16, b"guest"))
    connection.sendall(wire.frame(wire.CALL, 5, wire.pack({"op": "execs"})))
    kind, channel, body = receive()
    waiting = {"python": 0, "node": 0}
    assert (kind, channel) == (wire.RESULT, 5)
    assert wire.unpack(body) == {"execs": [], "warm": 0, "waiting": waiting}
    assert Path(f"/proc/{pid}/fd/2").readlink().name == "log"
    connection.sendall(wire.frame(wire.CALL, 6, wire.pack({"op": "bind"})))
    assert receive() == (wire.RESULT, 6, wire.pack({}))
    for number in (1, 2):
        assert str(Path(f"/proc/{pid}/fd/{number}").readlink()) == "/dev/null", "not the log"
