"""A runtime that is installed while a gateway runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.conftest import NewPlace

MACHINE = Path(os.environ.get("K8E_HOME", "/opt/k8e"))


def test_a_running_gateway_uses_a_runsc_that_was_installed_later(
    new_place: NewPlace, tmp_path: Path
) -> None:
    tools = tmp_path / "home/bin"
    tools.mkdir(parents=True)
    (tools / "runc").symlink_to(MACHINE / "bin/runc")
    warns = "error,default::RuntimeWarning"
    place = new_place(K8E_HOME=str(tmp_path / "home"), PYTHONWARNINGS=warns)

    def doctor(*flags: str) -> dict[str, Any]:
        found = place.json("doctor", "--json", *flags)["runtimes"]
        return {item["runtime"]: item for item in found}

    assert doctor()["gvisor"]["detail"] == "runsc is not installed"
    made = place.cli("sandbox", "create")
    assert b"runsc is not installed" in made.stderr
    weaker = place.cli("sandbox", "run", "uname -v")
    assert b"gVisor does not work on this host" in weaker.stderr
    pid = place.pid()

    (tools / "runsc").symlink_to(MACHINE / "bin/runsc")
    session = place.json("sandbox", "create")["session_id"]
    assert place.json("sandbox", "get", session)["runtime"] == "gvisor"
    assert doctor()["gvisor"]["usable"]
    assert place.pid() == pid
    # A session of before says what it is, and what to do.
    told = place.cli("sandbox", "run", "true").stderr.decode()
    assert "it works now, so a new session is better isolated" in told

    place.json("sandbox", "destroy", session)
    (tools / "runsc").unlink()
    assert doctor("--fresh")["gvisor"]["detail"] == "runsc is not installed"
    assert b"runsc is not installed" in place.cli("sandbox", "create").stderr
