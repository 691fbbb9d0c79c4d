"""What scripts of K8E expect of the command: its catalog, its benchmark, its names and flags."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from k8e.cli import completion
from tests.places import Place

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from k8e.cli import sandbox_main as run; sys.exit(run())"
FLAT = [sys.executable, "-P", "-c", MAIN]


def flat(place: Place, *arguments: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``k8e-sandbox-cli`` as its entry point does."""
    return subprocess.run(
        [*FLAT, *arguments],
        env=place.environ | environ,
        capture_output=True,
        timeout=50,
        check=False,
    )


def test_the_catalog_has_every_command_with_its_flags(place: Place) -> None:
    found = place.json("sandbox", "catalog")
    assert found == completion.build()
    assert found["catalog_version"] == 1
    commands = {item["name"]: item for item in found["commands"]}
    assert {"run", "create", "destroy", "events", "catalog", "allow-hosts"} <= set(commands)
    assert all(set(item) == {"flags", "name", "usage"} for item in found["commands"])
    assert all(item["usage"] for item in found["commands"])
    flags = {item["name"]: item["usage"] for item in commands["run"]["flags"]}
    assert {"lang", "timeout", "session-id", "tenant", "raw", "background"} <= set(flags)
    assert all(flags.values())
    assert "help" not in flags
    assert "manifest" not in flags or "implemented" not in flags["manifest"]


def test_the_benchmark_prints_a_table_and_json(place: Place, runtime: str) -> None:
    flags = ["--pool-size", "2", "--iterations", "1", "--runtime", runtime]
    before = len(place.json("sandbox", "sessions")["sessions"])
    done = place.cli("sandbox", "benchmark", *flags)
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    assert (told["iterations"], told["pool_size"]) == (1, 2)
    rows = {item["name"]: item for item in told["results"]}
    assert rows["create to first result, 2 at once"]["samples"] == 2
    for row in rows.values():
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["floor_ms"] > 0
    assert rows["write 1 MiB"]["floor"] == "a file on this host"
    table = done.stderr.decode()
    assert all(f"{name}  " in table for name in rows)
    assert len(place.json("sandbox", "sessions")["sessions"]) == before, "it leaves no session"


@pytest.mark.parametrize("flags", [["--pool-size", "0"], ["--iterations", "1000"]])
def test_a_benchmark_of_nothing_or_too_much_is_refused(place: Place, flags: list[str]) -> None:
    assert flags[0] in place.error("sandbox", "benchmark", *flags)


def test_a_benchmark_that_cannot_make_its_sessions_leaves_none(place: Place) -> None:
    assert "nonsense" in place.error("sandbox", "benchmark", "--runtime", "nonsense")


def test_the_flat_name_runs_the_same_commands(place: Place, session_id: str) -> None:
    done = flat(place, "run", "--session-id", session_id, "echo flat; exit 4")
    assert (done.returncode, json.loads(done.stdout)["stdout"]) == (4, "flat\n")
    done = flat(place, "--endpoint", place.endpoint, "get", session_id)
    assert json.loads(done.stdout)["session_id"] == session_id
    done = flat(place, "no-such-command")
    assert (done.returncode, set(json.loads(done.stdout))) == (1, {"detail", "error"})
    done = flat(place, "sandbox", "run", "--session-id", session_id, "echo nested; exit 5")
    assert (done.returncode, json.loads(done.stdout)["stdout"]) == (5, "nested\n")
    done = flat(place, "--endpoint", place.endpoint, "sandbox", "get", session_id)
    assert json.loads(done.stdout)["session_id"] == session_id
    assert b"usage: k8e sandbox" in flat(place).stdout
    assert b"usage: k8e sandbox" in flat(place, "sandbox").stdout
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["k8e-sandbox"] == scripts["k8e-sandbox-cli"] == "k8e.cli:sandbox_main"


def test_doctor_is_among_the_commands_for_sandboxes_too(place: Place) -> None:
    told, same = place.json("sandbox", "doctor", "--json"), place.json("doctor", "--json")
    # Other programs fill and free the disk between the two.
    assert told.pop("disk").keys() == same.pop("disk").keys()
    assert told == same


def test_sessions_can_be_listed_by_phase(place: Place) -> None:
    living, ended = (
        place.json("sandbox", "create", "--runtime", "container", "--tenant", "ph")["session_id"]
        for _ in range(2)
    )
    place.json("sandbox", "destroy", ended)

    def listed(*flags: str) -> set[str]:
        found = place.json("sandbox", "sessions", "--tenant", "ph", *flags)["sessions"]
        return {item["session_id"] for item in found}

    assert listed() == listed("--phase", "Active") == listed("--phase", "active") == {living}
    assert listed("--phase", "Ended") == listed("--all", "--phase", "ended") == {ended}
    assert listed("--phase", "all") == listed("--all") == {living, ended}
    assert listed("--phase", "creating") == set()
    assert "unknown phase 'Warm'" in place.error("sandbox", "sessions", "--phase", "Warm")
    place.json("sandbox", "destroy", living)
