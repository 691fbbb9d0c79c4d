"""``k8e sandbox cp``: trees there and back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from k8e.cli import files
from tests.cli.terminals import Terminal
from tests.places import COMMAND, Place

MIB = 1 << 20


def make_tree(folder: Path) -> dict[str, Any]:
    """A tree with everything in it that a copy has to keep."""
    (folder / "deep/er").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "data.bin").write_bytes(os.urandom(3 * MIB))
    (folder / "deep/er/run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "deep/er/run.sh").chmod(0o755)
    (folder / "deep/secret").write_text("s")
    (folder / "deep/secret").chmod(0o600)
    Path(os.fsdecode(bytes(folder) + b"/odd \xff\n name")).write_text("odd")
    (folder / "link").symlink_to("deep/er/run.sh")
    (folder / "deep/up").symlink_to("../data.bin")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "deep/er").chmod(0o555)
    (folder / "empty").chmod(0o750)
    return look(folder)


def look(folder: Path) -> dict[str, Any]:
    """Everything in a tree, by its path."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            found[name] = ("dir", path.stat().st_mode & 0o777 | 0o700)
        else:
            found[name] = ("file", path.stat().st_mode & 0o777, path.read_bytes())
    return found


def test_a_tree_goes_in_and_comes_out_unchanged(
    place: Place, session_id: str, tmp_path: Path
) -> None:
    source = tmp_path / "project"
    made = make_tree(source)
    told = place.json("sandbox", "cp", str(source), f"{session_id}:copies")
    assert (told["files"], told["folders"], told["links"], told["skipped"]) == (4, 4, 3, 0)
    assert told["bytes"] == 3 * MIB + 19 + 1 + 3
    script = "cd copies; ./link; stat -c %a deep/er deep/secret empty; readlink deep/up"
    ran = place.json("sandbox", "run", "--session-id", session_id, script)
    assert ran["stdout"] == "ran\n555\n600\n750\n../data.bin\n"

    assert (
        place.json("sandbox", "cp", f"{session_id}:copies", str(tmp_path / "back"))["failed"] == 0
    )
    assert look(tmp_path / "back") == made
    # Into a folder that is there, as a folder of its own; or only the content.
    (tmp_path / "into").mkdir()
    place.json("sandbox", "cp", f"{session_id}:/workspace/copies/", str(tmp_path / "into"))
    assert look(tmp_path / "into/copies") == made
    place.json("sandbox", "cp", f"{session_id}:copies/.", str(tmp_path / "into"))
    assert (tmp_path / "into/data.bin").exists()
    place.json("sandbox", "run", "--session-id", session_id, "chmod -R u+w copies")
    place.json("sandbox", "cp", str(source) + "/.", f"{session_id}:copies")
    place.json("sandbox", "cp", str(source), f"{session_id}:copies")
    ran = place.json("sandbox", "run", "--session-id", session_id, "ls copies copies/project")
    assert ran["stdout"].count("data.bin") == 2


def test_single_files_are_copied_both_ways(place: Place, session_id: str, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"\0\xff")
    (tmp_path / "one").chmod(0o751)
    for target in ("single/", "single", "single/two"):
        place.json("sandbox", "cp", str(tmp_path / "one"), f"{session_id}:{target}")
    ran = place.json("sandbox", "run", "--session-id", session_id, "stat -c '%n %a' single/*")
    assert ran["stdout"] == "single/one 751\nsingle/two 751\n"
    place.json("sandbox", "cp", f"{session_id}:single/two", str(tmp_path))
    place.json("sandbox", "cp", f"{session_id}:single/one", str(tmp_path / "three"))
    for name in ("two", "three"):
        assert (tmp_path / name).read_bytes() == b"\0\xff"
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o751


def test_what_is_no_file_is_skipped_and_told(place: Place, session_id: str, tmp_path: Path) -> None:
    code = "mkdir odd; cd odd; mkfifo pipe; echo x > file; ln -s /etc/passwd out; ln -s ../.. up"
    place.json("sandbox", "run", "--session-id", session_id, code)
    done = place.cli("sandbox", "cp", f"{session_id}:odd", str(tmp_path / "odd"))
    assert done.returncode == 0
    assert [path.name for path in (tmp_path / "odd").iterdir()] == ["file"]
    told = done.stderr.decode()
    assert "pipe is not copied: it is a fifo" in told
    assert "out is not copied: the link leads out" in told
    assert "up is not copied: the link leads out" in told

    (tmp_path / "local").mkdir()
    os.mkfifo(tmp_path / "local/pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "local/sock"))
    done = place.cli("sandbox", "cp", str(tmp_path / "local"), f"{session_id}:odd")
    assert done.stderr.count(b"is not copied") == 2


def test_what_cannot_be_read_is_told_and_the_rest_copied(
    place: Place, session_id: str, tmp_path: Path
) -> None:
    code = "mkdir closed; echo a > closed/a; echo b > closed/b; chmod 0 closed/a"
    place.json("sandbox", "run", "--session-id", session_id, code)
    done = place.cli("sandbox", "cp", f"{session_id}:closed", str(tmp_path / "closed"))
    assert done.returncode == 1
    assert b"closed/a is not copied: " in done.stderr
    assert [path.name for path in (tmp_path / "closed").iterdir()] == ["b"]


def test_the_standing_session_needs_no_name(place: Place, runtime: str, tmp_path: Path) -> None:
    tenant = f"cp-{runtime}"
    ran = place.json("sandbox", "run", "--tenant", tenant, "--runtime", runtime, "echo 1 > made")
    (tmp_path / "note").write_text("hello")
    told = place.json("sandbox", "cp", "--tenant", tenant, str(tmp_path / "note"), ":")
    assert told["session_id"] == ran["session_id"]
    place.json("sandbox", "cp", "--tenant", tenant, ":", str(tmp_path / "all"))
    assert {path.name for path in (tmp_path / "all").iterdir()} >= {"made", "note"}
    place.json("sandbox", "destroy", ran["session_id"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a", "b"], "SESSION:PATH"),
        (["x:a", "y:b"], "SESSION:PATH"),
        (["./a:b", "b"], "SESSION:PATH"),
        (["/no/such/file", "nobody:b"], "/no/such/file"),
        (["nobody:b", "c"], "not found"),
    ],
)
def test_mistakes_are_told(place: Place, arguments: list[str], expected: str) -> None:
    assert expected in place.error("sandbox", "cp", *arguments)


def test_a_bar_is_shown_on_a_terminal_only(place: Place, session_id: str, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(8 * MIB))
    with Terminal(place, "sandbox", "cp", str(tmp_path / "big"), f"{session_id}:big") as terminal:
        shown = terminal.until(b'"files":1')
        assert terminal.end() == 0
    assert b"MiB/s" in shown
    assert b"\r\x1b[K{" in shown, "the bar is gone in the end"


def test_paths_with_a_session_are_told_from_local_ones() -> None:
    assert files.parse("sess-1:/a:b") == files.Remote("sess-1", "/a:b")
    assert files.parse(":") == files.Remote("", ".")
    assert files.parse("s:") == files.Remote("s", ".")
    for local in ("a", "./a:b", "/a:b", "A:b", "-x:y", "a_b:c"):
        assert files.parse(local) == local


def test_a_local_file_that_cannot_be_written_is_told_as_local(
    place: Place, session_id: str, tmp_path: Path
) -> None:
    place.json("sandbox", "write", session_id, "large", stdin=bytes(100_000))
    arguments = ["sandbox", "cp", f"{session_id}:large", str(tmp_path)]
    # The kernel lets this command write no more than 8 KiB into a file.
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; exec "$@"', "-", *COMMAND, *arguments],
        env=place.environ,
        capture_output=True,
        timeout=30,
        check=False,
    )
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert told["error"] == "the local file large cannot be used: File too large"
    assert "sandbox" not in told["detail"]
    assert list(tmp_path.iterdir()) == []


def test_a_local_folder_in_the_way_and_a_missing_one_are_told_as_local(
    place: Place, session_id: str, tmp_path: Path
) -> None:
    place.json("sandbox", "write", session_id, "taken", stdin=b"x")
    (tmp_path / "taken/inner").mkdir(parents=True)
    told = place.error("sandbox", "cp", f"{session_id}:taken", str(tmp_path))
    assert "local file taken cannot be used: Is a directory" in told
    for source in ("nowhere", "nowhere/deep"):
        told = place.error("sandbox", "cp", str(tmp_path / source), f"{session_id}:x")
        assert str(tmp_path / "nowhere") in told
        assert "sandbox's own" not in told
