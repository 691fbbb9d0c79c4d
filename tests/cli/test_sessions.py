"""Every command but ``run``: sessions, files, the gateway, the host."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import time
from typing import Any

import pytest

from k8e import __version__
from k8e.cli import gateway, parser
from tests.places import COMMAND, Place


def test_create_prints_k8e_s_keys_and_get_shows_what_was_asked_for(
    place: Place, runtime: str
) -> None:
    flags = "--memory 128M --cpus 0.5 --pids 64 --disk 64M --lifetime 600 --idle-timeout 300"
    created = place.json(
        *["sandbox", "create", "--runtime", runtime, "--tenant", "acme", *flags.split()],
        *[
            "--env",
            "A=1",
            "--env",
            "B=x=y",
            "--label",
            "team=blue",
            "--session-id",
            f"mine-{runtime}",
        ],
    )
    session_id = f"mine-{runtime}"
    assert created == {"entries_materialized": 0, "pod_ip": "", "session_id": session_id}
    found = place.json("sandbox", "get", session_id)
    assert found["runtime"] == runtime
    assert found["tenant_id"] == "acme"
    assert found["labels"] == {"team": "blue"}
    assert found["env_keys"] == ["A", "B"]
    asked = {"cpus": 0.5, "disk": 64 << 20, "memory": 128 << 20, "pids": 64}
    usual = {"inodes": 0, "open_files": 65536, "output": 1 << 30}
    assert found["limits"] == asked | usual
    assert found["idle_timeout"] == 300
    assert 0 < found["expires_at"] - time.time() <= 600

    extended = place.json("sandbox", "extend", session_id, "--lifetime", "3000")
    assert extended["expires_at"] > found["expires_at"] + 2000
    ran = place.json("sandbox", "run", "--session-id", session_id, "echo $A$B")
    assert ran["stdout"] == "1x=y\n"

    assert place.json("sandbox", "destroy", session_id) == {"ok": True}
    assert place.json("sandbox", "get", session_id)["phase"] == "ended"


def test_sessions_lists_the_living_and_with_all_the_ended(place: Place) -> None:
    living, ended = (
        place.json("sandbox", "create", "--runtime", "container", "--tenant", "lists")["session_id"]
        for _ in range(2)
    )
    place.json("sandbox", "destroy", ended)
    found = place.json("sandbox", "sessions", "--tenant", "lists")["sessions"]
    assert [item["session_id"] for item in found] == [living]
    found = place.json("sandbox", "sessions", "--all", "--tenant", "lists")["sessions"]
    assert {item["session_id"]: item["phase"] for item in found} == {
        living: "active",
        ended: "ended",
    }
    place.json("sandbox", "destroy", living)


def test_files_are_written_appended_read_and_listed(place: Place, session_id: str) -> None:
    data = bytes(range(256)) * 20_000
    name = "/workspace/folder/data.bin"
    assert place.json("sandbox", "write", session_id, name, stdin=data) == {
        "ok": True,
        "path": name,
    }
    assert place.cli("sandbox", "read", "--raw", session_id, name).stdout == data

    place.json("sandbox", "write", session_id, "note", stdin=b"one\xff")
    place.json("sandbox", "write", session_id, "note", "--mode", "a", stdin=b" two")
    found = place.json("sandbox", "read", session_id, "note")
    assert found == {"content": "one\ufffd two", "path": "note"}

    files = place.json("sandbox", "list", session_id)["files"]
    assert all(set(item) == {"modified", "path"} for item in files)
    by_path = {item["path"]: item["modified"] for item in files}
    assert abs(by_path[name] - time.time()) < 60
    assert "/workspace/folder" not in by_path, "folders are not files"
    since = str(int(time.time()) + 1000)
    assert place.json("sandbox", "list", session_id, "--since", since) == {"files": []}


def test_a_file_outside_the_workspace_is_the_sandbox_s_own(place: Place, session_id: str) -> None:
    place.json("sandbox", "write", session_id, "/tmp/../tmp/elsewhere", stdin=b"here")
    found = place.json("sandbox", "run", "--session-id", session_id, "cat /tmp/elsewhere")
    assert found["stdout"] == "here"


def test_status_tells_the_standing_session_if_it_lives(place: Place) -> None:
    ran = place.json("sandbox", "run", "--tenant", "st", "--runtime", "container", "true")
    expected = {"available": True, "session_id": ran["session_id"], "tenant_id": "st"}
    told = place.json("sandbox", "status", "--tenant", "st")
    assert told == {**expected, "template": "default"}
    place.json("sandbox", "destroy", ran["session_id"])
    told = place.json("sandbox", "status", "--tenant", "st")
    assert told == {**expected, "session_id": "", "template": ""}


def test_status_without_a_gateway_says_why(place: Place) -> None:
    done = place.cli("sandbox", "status", K8E_SANDBOX_ENDPOINT="unix:/nonexistent/gateway.sock")
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert told["available"] is False
    assert "/nonexistent/gateway.sock" in told["error"]


def test_doctor_shows_every_runtime_in_a_table_and_in_json(place: Place) -> None:
    found = place.json("doctor", "--json")
    assert {item["runtime"] for item in found["runtimes"]} == {"gvisor", "container"}
    done = place.cli("doctor")
    assert done.returncode == 0
    table = done.stdout.decode()
    assert table.splitlines()[0].split() == ["RUNTIME", "FEATURE", "USABLE", "DETAIL"]
    assert "\033" not in table, "colours are for terminals"
    for item in found["runtimes"]:
        assert f"\n{item['runtime']} " in table
        assert all(feature["name"] in table for feature in item["features"])


def test_doctor_has_colours_on_a_terminal(place: Place) -> None:
    place.json("doctor", "--json")
    ours, theirs = pty.openpty()
    subprocess.run([*COMMAND, "doctor"], env=place.environ, stdout=theirs, timeout=30, check=False)
    os.close(theirs)
    printed = os.read(ours, 100_000)
    os.close(ours)
    assert b"\033[32myes" in printed


def test_doctor_shows_what_is_left_of_sandboxes_that_have_ended() -> None:
    left = {"sandbox_id": "sb-x", "what": "1 process (sh) that did not end", "tries": 3}
    table = list(gateway.doctor_report({"runtimes": [], "removals": [left]}, colours=False))
    assert table[1].startswith("sb-x")
    assert "not removed yet: 1 process (sh)" in table[1]


def test_doctor_says_how_to_fix_what_does_not_work() -> None:
    feature = {"name": "runsc", "usable": False, "detail": "not found", "fix": "sh install.sh"}
    gvisor = {"runtime": "gvisor", "usable": False, "detail": "", "fix": "", "features": [feature]}
    table = list(gateway.doctor_report({"runtimes": [gvisor], "warning": "weaker"}, colours=False))
    assert table[1].split() == ["gvisor", "no"]
    assert table[2].split("  ")[-1] == "not found → sh install.sh"
    assert table[-1] == "warning: weaker"
    coloured = "".join(gateway.doctor_report({"runtimes": [gvisor], "warning": ""}, colours=True))
    assert "\033[31mno" in coloured


def test_version_is_the_package_s_own(place: Place) -> None:
    assert place.json("version") == {"version": __version__}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["server", "--cni", "flannel"], "not one of cilium, basic, none"),
        (["agent"], "no server given"),
        (["agent", "--server", "https://192.0.2.1:6443", "--anything"], "unrecognized"),
    ],
)
def test_what_a_cluster_cannot_be_is_refused(place: Place, command: list[str], words: str) -> None:
    assert words in place.error(*command)


ALL = parser.build()


def commands() -> list[list[str]]:
    """Every command that the parser knows."""
    found: list[list[str]] = []

    def visit(parser: Any, path: list[str]) -> None:
        found.append(path)
        for action in parser._actions:
            children: Any = action.choices
            if hasattr(children, "items"):
                for name, child in children.items():
                    visit(child, [*path, name])

    visit(ALL, [])
    return found


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_explains_itself_with_an_example(
    path: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert parser.main([*path, "--help"]) == 0
    assert "example: " in capfd.readouterr().out


def flags_of(parser: Any, path: list[str]) -> list[str]:
    """The usage and the arguments of a command, without its list of others."""
    for name in path:
        (group,) = [item for item in parser._actions if hasattr(item.choices, "items")]
        parser = group.choices[name]
    return [repr(item) for item in parser._actions if not hasattr(item.choices, "items")] + [
        repr(parser._defaults)
    ]


@pytest.mark.parametrize("path", [path for path in commands() if path], ids=" ".join)
def test_a_command_that_is_built_alone_has_all_of_its_arguments(path: list[str]) -> None:
    alone = parser.build(named=frozenset(path))
    assert flags_of(alone, path) == flags_of(ALL, path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sandbox", "no-such"], "'run', 'shell'"),
        (["no-such"], "'sandbox', 'approver'"),
        (["sandbox", "create", "--no-such"], "unrecognized arguments: --no-such"),
        (["sandbox"], "subagent"),
    ],
)
def test_mistakes_are_explained_with_all_that_could_have_been_meant(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parser.main(arguments)
    assert said in capfd.readouterr().out


def test_a_full_workspace_is_not_taken_for_a_wrong_path(place: Place) -> None:
    limits = ("--runtime", "container", "--disk", "8M")
    session = place.json("sandbox", "create", *limits)["session_id"]
    told = place.cli("sandbox", "write", session, "big", stdin=bytes(16 << 20))
    assert told.returncode == 1
    found = json.loads(told.stdout)
    assert "No space left on device" in found["error"]
    assert "make a session with more (--disk" in found["detail"]
    place.json("sandbox", "destroy", session)
