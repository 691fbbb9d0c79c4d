"""The boot program of warm Nodes: what they run looks as under ``node -e``."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from k8e.conformance.promises.warm import NODE, Snippet
from k8e.guest import interpreters, warm
from k8e.runtimes import guest_package

SECONDS = 60.0
WORKERS = 3
PIECES = 4  # so that one slow run does not meet the time limit of a test
PID = re.compile(rb"\(node:\d+\)")
NODE_PATH = shutil.which("node", path="/usr/local/bin:/usr/bin:/bin")


def is_known(node: str | None) -> bool:
    """Whether it is of a version that the boot program is for."""
    if node is None:
        return False
    done = subprocess.run([node, "--version"], capture_output=True, timeout=SECONDS, check=True)
    return done.stdout.startswith(b"v20.")


pytestmark = pytest.mark.skipif(not is_known(NODE_PATH), reason="no Node.js 20 on this machine")

Seen = tuple[bytes, bytes, int]


@dataclass
class Place:
    """Where programs are run."""

    boot: Path
    home: Path

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), "LANG": "C.UTF-8"}

    def start_warm(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(SECONDS)
        argv, variables = interpreters.NodeKind(str(self.boot)).command([theirs.fileno()], [])
        process = subprocess.Popen(
            argv,
            env={**self.env, **variables},
            cwd="/",
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        return process, ours

    def run_warm(self, code: str, cwd: Path, *, deaf: bool = False) -> Seen | None:
        """What came of it; None if it wants a new one. Who is ``deaf`` hears no answer."""
        process, control = self.start_warm()
        with process, control:
            try:
                assert control.recv(100) == b"r\n"
                spec = {"code": code.encode()}
                message = interpreters.NodeKind(str(self.boot)).message(spec, self.env, str(cwd))
                assert message is not None
                if deaf:
                    control.shutdown(socket.SHUT_RD)
                control.sendall(len(message).to_bytes(4, "big") + message + warm.TOKEN)
                answer = control.recv(1) if not deaf else b"b"
                out, err = process.communicate(timeout=SECONDS)
            finally:
                process.kill()
        return (out, err, process.returncode) if answer == b"b" else None

    def run_new(self, code: str, cwd: Path) -> Seen:
        done = subprocess.run(
            ["node", "-e", code],
            env=self.env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        return done.stdout, done.stderr, done.returncode


def without_pids(seen: Seen) -> Seen:
    return PID.sub(b"", seen[0]), PID.sub(b"", seen[1]), seen[2]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    boot, home = tmp_path / "boot", tmp_path / "home"
    for folder in (boot, home):
        folder.mkdir()
    (boot / "node.js").write_text(guest_package.node_boot_source(), "utf-8")
    return Place(boot, home)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("piece", range(PIECES))
def test_a_warm_node_shows_what_a_new_one_shows(place: Place, piece: int) -> None:
    def compare(numbered: tuple[int, Snippet]) -> str:
        code = numbered[1].code
        if not interpreters.NodeKind("").takes({"code": code.encode()}):
            return ""
        cwd = place.home / str(numbered[0])
        cwd.mkdir()
        wanted, seen = place.run_new(code, cwd), place.run_warm(code, cwd)
        if seen is None:
            no_script = b"SyntaxError" in wanted[1] or code.startswith(("export ", "await "))
            return "" if no_script else f"{code!r} was refused"
        same = without_pids(seen) == without_pids(wanted)
        return "" if same else f"{code!r}: {seen} and not {wanted}"

    with ThreadPoolExecutor(WORKERS) as pool:
        chosen = list(enumerate(NODE))[piece::PIECES]
        differences = [text for text in pool.map(compare, chosen) if text]
    assert not differences, "\n".join(differences)


def test_what_does_not_compile_is_refused_before_it_begins(place: Place) -> None:
    assert place.run_warm("foo bar", place.home) is None


def test_one_whose_guest_is_gone_ends(place: Place) -> None:
    process, control = place.start_warm()
    with process:
        assert control.recv(100) == b"r\n"
        control.close()
        assert process.wait(SECONDS) == 1


def test_a_node_that_it_was_not_tried_on_ends_at_once(place: Place) -> None:
    source = guest_package.node_boot_source()
    assert "startsWith('20.')" in source
    (place.boot / "node.js").write_text(source.replace("'20.'", "'1.'"), "utf-8")
    process, control = place.start_warm()
    with process, control:
        assert process.communicate(timeout=SECONDS) == (b"", b"")
        assert process.returncode == 3


def test_a_program_that_has_begun_runs_though_the_guest_no_longer_listens(place: Place) -> None:
    assert place.run_warm("console.log(1)", place.home, deaf=True) == (b"1\n", b"", 0)
