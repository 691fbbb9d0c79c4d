"""Completion: the scripts know what the parser knows, and ask only a gateway that runs."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from k8e.cli import completion, parser
from tests.places import COMMAND, NewPlace, Place

COMMANDS = list(completion.walk_parser(parser.build(), "k8e"))
SHELLS = {
    "bash": completion.bash_script,
    "zsh": completion.zsh_script,
    "fish": completion.fish_script,
}


def completed(line: str, *, k8e: str = "false") -> list[str]:
    """What bash offers after ``line``; ``k8e`` is what the script runs to get ids."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    script = (
        f"{completion.bash_script(COMMANDS)}\ncompopt() {{ echo files; }}\n"
        f"COMP_WORDS=({array}) COMP_CWORD={len(words) - 1}\n_k8e '{k8e}' && "
        'for word in "${COMPREPLY[@]}"; do echo "$word"; done'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("k8e doct", ["doctor"]),
        ("k8e sandbox-install-skill c", ["claude", "codex", "cursor"]),
        ("k8e sandbox install-skill claude k", ["kiro"]),
        ("k8e gateway --data-dir ", ["files"]),
        ("k8e completion ", ["bash", "zsh", "fish"]),
        ("k8e sandbox appr", ["approve", "approvals"]),
        ("k8e sandbox --endpoint h:1 ru", ["run"]),
        ("k8e sandbox run --la", ["--lang"]),
        ("k8e sandbox run --lang ", ["bash", "python", "node", "ts"]),
        ("k8e sandbox run --raw --lang py", ["python"]),
        ("k8e sandbox run --runtime g", ["gvisor"]),
        ("k8e sandbox run --file ", ["files"]),
        ("k8e sandbox write ID path --mode ", ["w", "a"]),
        ("k8e sandbox run --timeout ", []),
        ("k8e sandbox run --timeout --", []),
        ("k8e gateway stop --", ["--help", "--destroy"]),
        ("k8e approver in", ["init"]),
        ("k8e sandbox create --session-id ", []),
        ("k8e sandbox-i", ["sandbox-install-skill"]),
        ("k8e nonsense ", [name for name in COMMANDS[0].below if "sandbox-" not in name]),
        ("k8e sandbox get one ", []),
    ],
)
def test_bash_offers_what_fits(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


@pytest.mark.parametrize("command", COMMANDS, ids=lambda item: item.path)
def test_every_command_and_flag_is_in_every_script(command: completion.CommandSyntax) -> None:
    parents = {item.path: item for item in COMMANDS}
    parent, _, name = command.path.rpartition(" ")
    assert not parent or name in parents[parent].below
    fish = completion.fish_script(COMMANDS)
    for flag in command.flags:
        assert flag in completed(f"{command.path} {flag}")
        assert f"%s\\n' {flag} " in fish


def test_ids_are_those_of_the_gateway(place: Place, session_id: str) -> None:
    asked = place.cli("sandbox", "confirm", "--no-wait", session_id, "something")
    approval_id = json.loads(asked.stdout)["approval_id"]
    found = place.cli("completion", "--ids", "approvals")
    assert approval_id in found.stdout.decode().split()
    script = place.folder / "k8e"
    environ = "".join(
        f"export {key}={value}\n" for key, value in place.environ.items() if "K8E_" in key
    )
    script.write_text(f'#!/bin/bash\n{environ}exec {" ".join(COMMAND)} "$@"\n')
    script.chmod(0o755)
    for line in ("k8e sandbox get ", "k8e sandbox run --session-id ", "k8e sandbox confirm sess-"):
        assert session_id in completed(line, k8e=str(script))
    assert completed("k8e sandbox approve approval-", k8e=str(script)) == [approval_id]
    place.cli("sandbox", "approve", "--reject", approval_id)


def test_without_a_gateway_there_are_no_ids_and_none_is_started(new_place: NewPlace) -> None:
    place = new_place()
    for what in completion.IDS:
        done = place.cli("completion", "--ids", what)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    for endpoint in ("gateway.example:1", "unix:/nonexistent", "::::"):
        done = place.cli("completion", "--ids", "sessions", K8E_SANDBOX_ENDPOINT=endpoint)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not place.socket.exists()


def test_a_gateway_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "ID_SECONDS", 0.05)
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", f"unix:{tmp_path}/s")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/s")
        silent.listen()
        assert completion.ids("sessions") == []


def test_ids_that_a_shell_would_expand_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(what: str) -> list[str]:
        return ["good-1", "$(reboot)", "`x`", "a b", "*", ""]

    monkeypatch.setattr(completion, "_ask", ask)
    assert completion.ids("sessions") == ["good-1"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_what_the_command_prints_and_its_shell_can_read_it(
    shell: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert parser.main(["completion", shell]) == 0
    printed = capfd.readouterr().out
    assert printed == SHELLS[shell](COMMANDS)
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(printed)
        done = subprocess.run([shell, "-n", path], capture_output=True, timeout=20, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_completion_for_no_shell_or_an_unknown_one_is_an_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for arguments, text in (([], "no shell is named"), (["csh"], "invalid choice")):
        assert parser.main(["completion", *arguments]) == 1
        assert text in capfd.readouterr().out
