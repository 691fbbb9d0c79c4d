"""What happens on a host where gVisor does not work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k8e import settings
from tests.places import NewPlace, Place


@pytest.fixture
def weak_place(new_place: NewPlace, tmp_path: Path) -> Place:
    """A place whose K8E_HOME has runc and no runsc."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "runc").symlink_to(settings.default_home() / "bin" / "runc")
    return new_place(K8E_HOME=str(tmp_path), PYTHONWARNINGS="default")


def test_a_weaker_runtime_is_used_with_a_warning_that_says_what_is_lost(weak_place: Place) -> None:
    for command in (["run", "echo hello"], ["create"]):
        done = weak_place.cli("sandbox", *command)
        assert done.returncode == 0, done.stdout
        assert b"k8e: warning: gVisor does not work on this host" in done.stderr
        assert b"a kernel exploit would reach the host" in done.stderr
    found = json.loads(weak_place.cli("sandbox", "sessions").stdout)["sessions"]
    assert {session["runtime"] for session in found} == {"container"}


def test_a_runtime_asked_for_by_name_never_falls_back(weak_place: Place) -> None:
    told = weak_place.error("sandbox", "create", "--runtime", "gvisor")
    assert "runsc is not installed" in told
    assert "install.sh" in told


def test_the_runtime_asked_for_by_name_gives_no_warning(weak_place: Place) -> None:
    done = weak_place.cli("sandbox", "run", "--runtime", "container", "echo hello")
    assert (done.returncode, done.stderr) == (0, b"")
