"""``make cluster``, ``make cluster-shell`` and ``make cluster-down``, as a developer uses them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import pytest

from tests.cluster.__main__ import STATE
from tests.cluster.machine_init import CLONE

pytestmark = pytest.mark.timeout(600)
CNI = "none"  # the quickest to start; what runs on a cluster is tested elsewhere


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster", *arguments],
        cwd=CLONE,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )


@pytest.fixture
def _nothing_stays() -> Generator[None]:
    if STATE.exists():
        pytest.skip("a cluster of this clone runs already")
    yield
    run("down")


@pytest.mark.usefixtures("_nothing_stays")
def test_a_cluster_of_two_nodes_is_made_entered_and_ended() -> None:
    made = run("up", "--nodes", "2", "--cni", CNI)
    assert made.returncode == 0, made.stdout
    assert "node-2: ready" in made.stdout
    second = run("up")
    assert (second.returncode, "a cluster runs already" in second.stdout) == (1, True)
    assert "node-1" in run("shell", stdin="kubectl get nodes; exit\n").stdout
    assert "node-2" in run("shell", "--node", "node-2", stdin="hostname; exit\n").stdout
    assert run("down").returncode == 0
    assert not STATE.exists()
    assert "no cluster runs" in run("down").stdout
