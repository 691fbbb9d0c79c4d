"""A real gateway for the examples in the documents: one for all of them, in the usual folders.

A reader follows one page after the other on one machine, so a page may rely on nothing that others
made, and leaves nothing that others could stumble over.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.docs.documents import Step, matches
from tests.gateway import worlds
from tests.places import Place

APART = Path(__file__).with_name("apart.py")
PATIENCE = 150
"""Seconds for one document: it bounds what hangs, also while other tests use the machine."""


class Shell:
    """Runs the steps of a document in one bash, as a reader would."""

    def __init__(self, place: Place, apart: list[str]) -> None:
        self.place = place
        self._apart = apart
        self.port = int(place.environ["K8E_LISTEN"].rpartition(":")[2])
        self.place.json("gateway", "--background")

    def python(self, script: Path, folder: Path) -> str:
        """What a program prints that must succeed, and that may write into a folder."""
        done = self._run([sys.executable, str(script)], folder=folder)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def follow(self, steps: list[Step], folder: Path) -> list[str]:
        """Run everything; what went wrong, one text for each step."""
        mark = secrets.token_hex(8)
        end = f"end() {{ local s=$?; printf '\\n{mark} %d\\n' $s; return $s; }}"
        script = [f"cd {folder}", end]
        for step in steps:
            script += [step.command, "end"]
        printed = self._run(["bash", "-c", "\n".join(script)]).stdout
        return list(_compare(steps, printed, mark))

    def _run(self, argv: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._apart, *argv],
            cwd=folder,
            env=self.place.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            timeout=PATIENCE,
            check=False,
        )

    def left(self) -> list[str]:
        """What the steps made and did not remove again; it is removed here."""
        found: list[str] = []
        for session in self.place.json("sandbox", "sessions")["sessions"]:
            # One that everybody who names none gets is no page's own.
            if not session["auto"] or session["tenant_id"] != "default":
                found.append(f"session {session['session_id']}")
                self.place.json("sandbox", "destroy", session["session_id"])
        for kind, listing, name, remove in LISTS:
            for item in self.place.json(*listing)[kind]:
                if item[name] == "default" or item.get("source") == "builtin":
                    continue
                found.append(f"{' '.join(remove)} {item[name]}")
                self.place.json(*remove, item[name])
        return found


LISTS = (
    ("keys", ("sandbox", "api-key", "list"), "name", ("sandbox", "api-key", "delete")),
    ("snapshots", ("sandbox", "snapshot", "list"), "name", ("sandbox", "snapshot", "delete")),
    ("templates", ("template", "list"), "name", ("template", "delete")),
    ("images", ("image", "list"), "name", ("image", "remove")),
)
"""What else pages make: the answer's key, the command, what names it, and how it goes."""


def _compare(steps: list[Step], printed: str, mark: str) -> Iterator[str]:
    parts = printed.split(f"\n{mark} ")
    output = parts[0]
    asked = [step.command.strip() == "echo $?" for step in steps] + [False]
    for at, step in enumerate(steps):
        if at + 1 >= len(parts):
            yield f"line {step.line}: the shell ended here, after {output!r}"
            return
        status, _, rest = parts[at + 1].partition("\n")
        if status != _status(step) and not asked[at + 1]:
            yield f"line {step.line}: {step.command!r} ended with {status}: {output}"
        elif step.shown is not None and not matches(step.shown, output):
            yield f"line {step.line}: printed\n{output}\ninstead of\n{step.shown}"
        output = rest


def _status(step: Step) -> str:
    """How a command should end, by the output that it is shown with."""
    told = re.search(r'"exit_code":(\d+)', step.shown or "")
    if told:
        return told[1]
    return "1" if '"error":' in (step.shown or "") else "0"


@pytest.fixture(scope="session")
def gateway() -> Generator[Shell]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    usual = {"K8E_ALLOWED_HOSTS": "default", "K8E_POOL_MIN": "1", "K8E_POOL_MAX": "8"}
    usual["PYTHONWARNINGS"] = "error,default::RuntimeWarning"  # what a session is warned of
    with worlds.networked(**usual, LANG="C.UTF-8", PATH=path) as place, usual_folders(place) as to:
        yield Shell(place, to)


@contextlib.contextmanager
def usual_folders(place: Place) -> Generator[list[str]]:
    """Let the gateway of a place be in /var/lib/k8e and /run/k8e, as its programs see them."""
    with subprocess.Popen(
        [sys.executable, str(APART), "make", str(place.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "ready\n"
        enter = [sys.executable, str(APART), "enter", str(keeper.pid)]
        for name in ("K8E_DATA_DIR", "K8E_RUN_DIR"):
            del place.environ[name]
        place.command = [*enter, *place.command]
        yield enter
        place.json("gateway", "stop", "--destroy")
        keeper.communicate("")


@pytest.fixture
def shell(gateway: Shell) -> Generator[Shell]:
    yield gateway
    gateway.left()  # of a text that failed half-way, or that is no page
