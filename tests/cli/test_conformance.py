"""``k8e conformance run``, as a user of any machine calls it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from k8e import conformance
from tests.places import COMMAND, Place

QUICK = ("conformance", "run", "--runtime", "container", "--only", "exec.exit-code")
SECONDS = 60.0


def test_the_list_has_every_promise_and_needs_no_rights(place: Place) -> None:
    told = place.cli("conformance", "run", "--list").stdout.decode().splitlines()
    assert [line.split()[0] for line in told] == list(conformance.ALL)
    found = place.json("conformance", "run", "--list", "--json", "--only", "limits")["behaviours"]
    assert {item["id"].partition(".")[0] for item in found} == {"limits"}
    gaps = {item["id"]: item["gaps"] for item in found}
    assert "gVisor" in gaps["limits.memory-alone"]["gvisor"]


def test_an_unknown_promise_or_runtime_is_an_error_that_says_what_to_do(place: Place) -> None:
    text = place.error("conformance", "run", "--only", "nonsense")
    assert "no behaviour 'nonsense'" in text
    assert "--list" in text
    assert "unknown runtime" in place.error("conformance", "run", "--runtime", "nonsense")


def test_lines_and_json_tell_the_same(place: Place) -> None:
    told = place.json(*QUICK, "--json")
    (row,) = told["results"]
    assert (row["id"], row["runtime"], row["verdict"]) == ("exec.exit-code", "container", "pass")
    assert (told["passed"], told["failed"], told["not_applicable"]) == (1, 0, 0)
    done = place.cli(*QUICK)
    assert done.returncode == 0
    assert done.stderr == b""
    runtime, line, summary = done.stdout.decode().splitlines()
    assert runtime == "container"
    assert line.split()[:2] == ["pass", "exec.exit-code"]
    assert summary == "1 passed, 0 failed, 0 not applicable"


def test_a_gap_is_not_applicable_with_its_reason(place: Place) -> None:
    arguments = ("conformance", "run", "--runtime", "gvisor", "--only", "limits.memory-alone")
    (row,) = place.json(*arguments, "--json")["results"]
    assert row["verdict"] == "not applicable"
    assert "gVisor has no limit" in row["reason"]


def test_a_broken_promise_is_told_with_its_reason_and_the_exit_code_is_one(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import k8e.conformance as c\n"
        "from k8e.conformance.behaviour import Behaviour, BrokenPromise\n"
        "async def check(stage): raise BrokenPromise('seen \\x1b[2J instead')\n"
        "c.ALL['exec.exit-code'] = Behaviour('exec.exit-code', 'It keeps its word.', check)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = place.cli(*QUICK, PYTHONPATH=path)
    assert done.returncode == 1
    text = done.stdout.decode()
    assert "fail" in text
    assert "It keeps its word." in text
    assert "seen \ufffd[2J instead" in text
    assert text.endswith("0 passed, 1 failed, 0 not applicable\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_leaves_nothing(place: Place, number: int) -> None:
    mounts = Path("/proc/self/mountinfo")
    process = subprocess.Popen(
        [*COMMAND, "conformance", "run", "--runtime", "container", "--only", "exec"],
        env=place.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    for _ in range(4):
        assert process.stdout.readline()
    folders = f"k8e-{process.pid}-*"
    assert list(Path("/tmp").glob(folders))
    process.send_signal(number)
    process.communicate(timeout=SECONDS)
    assert process.returncode in (128 + number, -number)
    assert list(Path("/tmp").glob(folders)) == []
    assert f"/tmp/k8e-{process.pid}-" not in mounts.read_text("utf-8", "surrogateescape")
