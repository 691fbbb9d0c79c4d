"""``k8e template``, and sessions that are made from templates, against a real gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from k8e.cli import templates
from k8e.client.templates import Template
from tests.cli.terminals import Terminal
from tests.places import Place


@pytest.fixture
def folder(place: Place) -> Iterator[Path]:
    """Where the shared gateway looks for files; as it was, afterwards."""
    found = place.data / "templates"
    place.json("sandbox", "status")
    found.mkdir(exist_ok=True)
    yield found
    for path in found.iterdir():
        path.unlink()


def write(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def names(place: Place) -> dict[str, str]:
    listed = place.json("template", "list")["templates"]
    return {item["name"]: item["source"] for item in listed}


def test_a_template_is_applied_used_shown_and_deleted(place: Place, runtime: str) -> None:
    name = f"small-{runtime}"
    text = f"runtime: {runtime}\nlimits: {{memory: 256M, pids: 100}}\nenv: {{A: '1', B: '2'}}\n"
    applied = place.json("template", "apply", write(place.folder / f"{name}.yaml", text))
    assert set(applied) == {"digest", "name", "ok"}
    assert names(place)[name] == "api"

    run = ["sandbox", "run", "--tenant", name, "--template", name]
    done = place.json(*run, "echo $A $B; cat /proc/meminfo | head -1")
    assert done["stdout"].startswith("1 2\n")
    told = place.json("sandbox", "get", done["session_id"])
    assert (told["template"], told["runtime"]) == (name, runtime)
    assert (told["limits"]["memory"], told["limits"]["pids"]) == (256 << 20, 100)
    assert place.json("sandbox", "status", "--tenant", name)["template"] == name
    assert place.json(*run, "--template", "", "echo again")["session_id"] == done["session_id"]
    refused = place.error("sandbox", "run", "--tenant", name, "--template", "default", "true")
    assert f"was made from template '{name}', not from 'default'" in refused
    assert f"k8e sandbox destroy {done['session_id']}" in refused

    assert place.json("template", "delete", name) == {"name": name, "ok": True}
    assert place.json(*run, "echo still")["stdout"] == "still\n"
    place.json("sandbox", "destroy", done["session_id"])
    assert f"template '{name}' not found" in place.error(*run, "true")


def test_flags_win_over_the_template(place: Place) -> None:
    text = "limits: {memory: 256M, pids: 100}\nlabels: {a: '1', b: '2'}\nlifetime: 100\n"
    place.json("template", "apply", write(place.folder / "flags.yaml", text))
    flags = ["--template", "flags", "--runtime", "container", "--memory", "128M", "--label", "b=3"]
    made = place.json("sandbox", "create", *flags, "--env", "C=4")["session_id"]
    told = place.json("sandbox", "get", made)
    assert (told["limits"]["memory"], told["limits"]["pids"]) == (128 << 20, 100)
    assert (told["labels"], told["env_keys"]) == ({"a": "1", "b": "3"}, ["C"])
    assert told["expires_at"] - told["created_at"] == pytest.approx(100, abs=1)
    place.json("sandbox", "destroy", made)
    place.json("template", "delete", "flags")


def test_what_is_shown_can_be_applied_again(place: Place) -> None:
    text = "allowed_hosts = []\n[limits]\nmemory = '64M'\n[warm]\n"
    first = place.json("template", "apply", write(place.folder / "again.toml", text))
    shown = place.cli("template", "show", "again").stdout
    assert yaml.safe_load(shown) == {
        "name": "again",
        "rootfs": "host",
        "limits": {"memory": 64 << 20},
        "allowed_hosts": [],
        "warm": {},
    }
    whole = place.json("template", "show", "--json", "again")
    place.json("template", "delete", "again")
    assert place.json("template", "apply", "-", stdin=shown) == first
    assert place.json("template", "show", "--json", "again") == whole
    place.json("template", "delete", "again")


def test_files_are_noticed_without_a_word_and_broken_ones_are_told(
    place: Place, folder: Path
) -> None:
    write(folder / "good.yaml", "description: from a file\n")
    write(folder / "bad.yaml", "limits: {memroy: 1G}\n")
    assert {"good": "file", "bad": "file"}.items() <= names(place).items()
    known = "cpus, memory, pids, disk, inodes, open_files, output"
    told = f"bad.yaml: limits.memroy is no key (known are {known})"
    assert told in place.error("sandbox", "create", "--template", "bad")
    assert told in place.error("template", "show", "bad")
    assert place.json("template", "show", "--json", "bad")["error"] == told
    assert {"name": "bad", "error": told} in place.json("doctor", "--json")["broken_templates"]
    assert b"template bad" in place.cli("doctor").stdout
    for command in (["delete", "good"], ["apply", write(place.folder / "good.yaml", "{}")]):
        assert "kept in the file good.yaml" in place.error("template", *command)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "nothing"], "template 'nothing' not found"),
        (["delete", "nothing"], "template 'nothing' not found"),
        (["delete", "default"], "built in"),
        (["apply", "/nowhere/x.yaml"], "No such file"),
        (["apply", "notes.txt"], "none of the endings"),
        ([], "COMMAND"),
    ],
)
def test_what_cannot_be_done_is_told(place: Place, arguments: list[str], said: str) -> None:
    assert said in place.error("template", *arguments)


def test_mistakes_in_a_file_are_told_before_anything_is_sent(place: Place) -> None:
    path = write(place.folder / "wrong.yaml", "limits: {memory: 512M\n")
    nobody = "127.0.0.1:9"
    told = place.error("template", "apply", path, K8E_SANDBOX_ENDPOINT=nobody)
    assert "wrong.yaml: it is not YAML" in told
    told = place.error("template", "apply", "-", stdin=b"[]", K8E_SANDBOX_ENDPOINT=nobody)
    assert "stdin: a template is a mapping" in told


def test_a_template_is_for_a_session_that_is_made_for_the_run(place: Place) -> None:
    refused = place.error("sandbox", "run", "--session-id", "s", "--template", "x", "true")
    assert "--template is for a session that is made for the run" in refused


def test_names_are_completed(place: Place, folder: Path) -> None:
    write(folder / "tabbed.yaml", "{}")
    done = place.cli("completion", "--ids", "templates")
    assert {"default", "tabbed"} <= set(done.stdout.decode().split())


def test_a_terminal_gets_a_table(place: Place) -> None:
    with Terminal(place, "template", "list") as terminal:
        terminal.until(b"built-in")
        assert terminal.end() == 0


def test_nothing_that_a_template_says_acts_on_the_terminal() -> None:
    found = [
        Template("a", "api", description="red \x1b[31m", rootfs="host"),
        Template("b", "file", error="b.yaml: wrong\n"),
    ]
    head, *rows = templates.template_table(found)
    assert head.split() == ["NAME", "FROM", "ROOTFS", "DESCRIPTION"]
    assert rows == [
        "a     api   host    red \\x1b[31m",
        "b     file  -       cannot be used: b.yaml: wrong\\n",
    ]
