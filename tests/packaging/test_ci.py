"""What continuous integration says at its end, by the steps that failed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/run"
# Fails as often as a file named after its step says.
MAKE = """#!/bin/sh
for step in setup check test; do case " $* " in *" $step "*) break ;; esac; done
left=$(cat "$step" 2>/dev/null || echo 0)
echo "$step: $left more failures"
if [ "$left" -gt 0 ]; then echo $((left - 1)) >"$step"; exit 2; fi
"""


@pytest.mark.parametrize(
    ("failing", "passes"),
    [
        ({}, True),
        ({"test": 1}, True),
        ({"test": 2}, False),
        ({"check": 1}, False),
        ({"setup": 1}, False),
    ],
)
def test_it_passes_if_all_steps_do_and_tests_may_fail_once(
    tmp_path: Path, failing: dict[str, int], passes: bool
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    script, make = tmp_path / ".ci/run", tmp_path / "bin/make"
    for path, text in ((script, SCRIPT.read_text("utf-8")), (make, MAKE)):
        path.parent.mkdir()
        path.write_text(text, "utf-8")
        path.chmod(0o755)
    for step, times in failing.items():
        (tmp_path / step).write_text(f"{times}\n", "ascii")
    done = subprocess.run(
        ["bash", script],
        env={"PATH": f"{make.parent}:/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode == 0) is passes, (done.stdout, done.stderr)
    assert not list(tmp_path.glob("tmp.*")), "what was kept of the checks"
