"""The boot program on every Python that it is for: what it runs looks as in a new one."""

from __future__ import annotations

import hashlib
import marshal
import os
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from k8e.conformance.promises.warm import FAMILIES, Snippet
from k8e.guest import interpreters, warm
from k8e.runtimes import guest_package
from tests.guest.test_package import find_python

VERSIONS = ("3.9", "3.10", "3.11", "3.12")
SECONDS = 60.0
WORKERS = 4
# Those that touch nothing but themselves: here they run without a sandbox.
HARMLESS = ("identity", "raising", "reading")
MOST = 24  # of a family; in sandboxes, conformance runs them all
ADDRESS = re.compile(rb"0x[0-9a-f]+")


def without_addresses(seen: tuple[bytes, bytes, int]) -> tuple[bytes, bytes, int]:
    return ADDRESS.sub(b"", seen[0]), ADDRESS.sub(b"", seen[1]), seen[2]


@dataclass
class Place:
    """An interpreter, and what it is started with."""

    python: str
    boot: Path
    home: Path

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "LANG": "C.UTF-8"}

    def start_warm(self, *modules: str) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
        """One that waits; its control socket, and its later input."""
        ours, theirs = socket.socketpair()
        ours.settimeout(SECONDS)
        source, target = os.pipe()
        passed = (theirs.fileno(), source)
        env = {**self.env, "PYTHONPATH": str(self.boot)}
        env["K8E_BOOT"] = " ".join([str(self.boot), *map(str, passed), *modules])
        process = subprocess.Popen(
            [self.python, interpreters.BOOT_FILE],
            env=env,
            cwd="/",
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        os.close(source)
        return process, ours, target

    def script(self, snippet: Snippet) -> str:
        """The file that several lines are in; of one line none."""
        if "\n" not in snippet.code:
            return ""
        path = self.home / f"script-{hashlib.sha256(snippet.code.encode()).hexdigest()[:8]}.py"
        path.write_text(snippet.code, "utf-8", newline="")
        return str(path)

    def run_warm(self, snippet: Snippet, *, deaf: bool = False) -> tuple[bytes, bytes, int] | None:
        """What came of it; None if it wants a new interpreter. Who is ``deaf`` hears no answer."""
        process, control, stdin = self.start_warm()
        os.write(stdin, snippet.stdin or b"")
        os.close(stdin)
        with process, control:
            try:
                assert control.recv(100) == b"r\n"
                env = [(os.fsencode(k), os.fsencode(v)) for k, v in self.env.items()]
                cwd = os.fsencode(self.home)
                wants = snippet.stdin is not None
                what = (snippet.code.encode(), self.script(snippet), cwd, env, wants)
                message = marshal.dumps(what, 2)
                if deaf:
                    control.shutdown(socket.SHUT_RD)
                control.sendall(len(message).to_bytes(4, "big") + message + warm.TOKEN)
                answer = control.recv(1) if not deaf else b"b"
                out, err = process.communicate(timeout=SECONDS)
            finally:
                process.kill()
        return (out, err, process.returncode) if answer == b"b" else None

    def run_new(self, snippet: Snippet) -> tuple[bytes, bytes, int]:
        one_line = [self.python, "-c", snippet.code]
        process = subprocess.Popen(
            [self.python, script] if (script := self.script(snippet)) else one_line,
            env=self.env,
            cwd=self.home,
            stdin=subprocess.DEVNULL if snippet.stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with process:
            try:
                out, err = process.communicate(snippet.stdin, timeout=SECONDS)
            finally:
                process.kill()
        return out, err, process.returncode


@pytest.fixture(params=VERSIONS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    major, minor = map(int, request.param.split("."))
    python = find_python(major, minor)
    if python is None:
        pytest.skip(f"no Python {request.param} on this machine")
    boot = tmp_path / "boot"
    boot.mkdir()
    (boot / "sitecustomize.py").write_text(guest_package.boot_source(), "utf-8")
    home = tmp_path / "home"
    home.mkdir()
    return Place(python, boot, home)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", HARMLESS)
def test_a_warm_interpreter_shows_what_a_new_one_shows(place: Place, family: str) -> None:
    def compare(snippet: Snippet) -> str:
        seen = place.run_warm(snippet)
        wanted = place.run_new(snippet)
        if seen is None:
            return f"{snippet.code!r} was refused"
        same = without_addresses(seen) == without_addresses(wanted)
        return "" if same else f"{snippet.code!r}: {seen} and not {wanted}"

    with ThreadPoolExecutor(WORKERS) as pool:
        differences = [text for text in pool.map(compare, FAMILIES[family][-MOST:]) if text]
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("code", ["print(1)", "x = 1\nprint(x)"])
def test_a_program_that_has_begun_runs_though_the_guest_no_longer_listens(
    place: Place, code: str
) -> None:
    assert place.run_warm(Snippet(code), deaf=True) == (b"1\n", b"", 0)


def test_what_does_not_compile_is_refused_before_it_begins(place: Place) -> None:
    assert place.run_warm(Snippet("x = = 1")) is None
    assert place.run_warm(Snippet("print(")) is None


def test_one_whose_guest_is_gone_ends(place: Place) -> None:
    process, control, stdin = place.start_warm()
    with process:
        assert control.recv(100) == b"r\n"
        control.close()
        os.close(stdin)
        assert process.wait(SECONDS) == 1


def test_without_its_last_byte_a_program_does_not_begin(place: Place) -> None:
    process, control, stdin = place.start_warm()
    with process:
        assert control.recv(100) == b"r\n"
        env = [(b"PATH", b"/usr/bin")]
        message = marshal.dumps((b"print('began')", b"/", env, False), 2)
        control.sendall(len(message).to_bytes(4, "big") + message)
        control.close()
        os.close(stdin)
        assert process.communicate(timeout=SECONDS) == (b"", b"")
        assert process.returncode == 1


def test_a_python_that_it_was_not_tried_on_ends_at_once(place: Place) -> None:
    source = guest_package.boot_source()
    assert "TESTED = ((3, 9), (3, 12))" in source
    untried = source.replace("TESTED = ((3, 9), (3, 12))", "TESTED = ((2, 0), (2, 7))")
    (place.boot / "sitecustomize.py").write_text(untried, "utf-8")
    process, control, stdin = place.start_warm()
    with process, control:
        os.close(stdin)
        assert process.communicate(timeout=SECONDS) == (b"", b"")
        assert process.returncode == 3
        assert control.recv(16) == b"o\n"


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (("json", "fractions"), b"r\n"),
        (("watching",), b"rCOLOUR\n"),
        (("copying",), b"r*\n"),
        (("this", "json"), b"fthis: it prints something when it is imported\n"),
        (("no_such",), b"fno_such: ModuleNotFoundError: No module named 'no_such'\n"),
        (("threading_on",), b"fthreading_on: it starts a thread when it is imported\n"),
    ],
)
def test_modules_are_imported_before_there_is_code(
    place: Place, modules: tuple[str, ...], said: bytes
) -> None:
    sources = {
        "watching": "import os\nos.environ.get('COLOUR')",
        "copying": "import os\ndict(os.environ)",
        "threading_on": "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    }
    done = subprocess.run(
        [place.python, "-c", "import site; print(site.getusersitepackages())"],
        env=place.env,
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    packages = Path(done.stdout.decode().strip())
    packages.mkdir(parents=True)
    for name, source in sources.items():
        (packages / f"{name}.py").write_text(source, "utf-8")
    process, control, stdin = place.start_warm(*modules)
    with process, control:
        assert control.recv(1000) == said
        os.close(stdin)
        process.kill()
