"""Completion in zsh and fish themselves; without one of them, its tests are skipped."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from k8e.cli import completion, parser
from tests.places import eventually, wait_readable

COMMANDS = list(completion.walk_parser(parser.build(), "k8e"))
PATIENCE = 60.0
LINES: list[tuple[str, list[str]]] = [
    ("k8e doct", ["doctor"]),
    ("k8e completion ", ["bash", "fish", "zsh"]),
    ("k8e sandbox appr", ["approvals", "approve"]),
    ("k8e sandbox --endpoint h:1 ru", ["run"]),
    ("k8e sandbox run --la", ["--lang"]),
    ("k8e sandbox run --lang ", ["bash", "node", "python", "ts"]),
    ("k8e sandbox run --raw --lang py", ["python"]),
    ("k8e sandbox run --runtime g", ["gvisor"]),
    ("k8e sandbox write ID path --mode ", ["a", "w"]),
    ("k8e sandbox run --timeout ", []),
    ("k8e gateway stop --", ["--destroy", "--help"]),
    ("k8e approver in", ["init"]),
    ("k8e sandbox create --session-id ", []),
    ("k8e sandbox get ", ["id-1", "id-2"]),
    ("k8e sandbox get one ", []),
    ("k8e sandbox-i", ["sandbox-install-skill"]),
    ("k8e sandbox-install-skill claude k", ["kiro"]),
    ("k8e nonsense ", sorted(name for name in COMMANDS[0].below if "sandbox-" not in name)),
]
# What zsh does with what it is offered, in so far as a script without a terminal needs it.
ZSH = """\
compdef() { :; }
compadd() {
    local one
    shift
    for one in "$@"; do [[ $one == "$k8e_now"* ]] && print -r -- $one; done
}
_files() { print files; }
source "$1"
words=("${(@s: :)2}") CURRENT=$#words
_k8e
"""


def need(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


@pytest.fixture
def fake_k8e(tmp_path: Path) -> dict[str, str]:
    """An environment with a ``k8e`` that knows two ids, and else writes down its arguments."""
    program = tmp_path / "bin/k8e"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        "case $1 in completion) printf 'id-1\\nid-2\\n' ;; *) echo \"$*\" > $HOME/ran ;; esac\n"
    )
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb", "LANG": "C.UTF-8"}


def run(environ: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(("line", "offered"), LINES)
def test_zsh_offers_what_fits(
    line: str, offered: list[str], tmp_path: Path, fake_k8e: dict[str, str]
) -> None:
    need("zsh")
    (tmp_path / "_k8e").write_text(completion.zsh_script(COMMANDS))
    (tmp_path / "main").write_text(ZSH)
    found = run(fake_k8e, "zsh", "-f", str(tmp_path / "main"), str(tmp_path / "_k8e"), line)
    assert sorted(found.split()) == offered


@pytest.mark.parametrize(("line", "offered"), LINES)
def test_fish_offers_what_fits(
    line: str, offered: list[str], tmp_path: Path, fake_k8e: dict[str, str]
) -> None:
    need("fish")
    script = tmp_path / "k8e.fish"
    script.write_text(completion.fish_script(COMMANDS))
    ask = f"source {script}; complete -C '{line}'"
    found = run(fake_k8e, "fish", "--no-config", "-c", ask)
    assert sorted(item.partition("\t")[0] for item in found.splitlines()) == offered


def test_fish_shows_what_commands_are_for(tmp_path: Path, fake_k8e: dict[str, str]) -> None:
    need("fish")
    script = tmp_path / "k8e.fish"
    script.write_text(completion.fish_script(COMMANDS))
    found = run(fake_k8e, "fish", "--no-config", "-c", f"source {script}; complete -C 'k8e doct'")
    assert found.startswith("doctor\tshow what works on this host")


def test_fish_offers_files_where_a_file_is_wanted(tmp_path: Path, fake_k8e: dict[str, str]) -> None:
    need("fish")
    script = tmp_path / "k8e.fish"
    script.write_text(completion.fish_script(COMMANDS))
    ask = f"source {script}; complete -C 'k8e sandbox run --file {tmp_path}/k8e.'"
    assert run(fake_k8e, "fish", "--no-config", "-c", ask).split("\t")[0].strip() == str(script)


@pytest.mark.parametrize("way", ["sourced", "from a folder of fpath"])
def test_a_tab_in_zsh_completes_the_line(
    way: str, tmp_path: Path, fake_k8e: dict[str, str]
) -> None:
    need("zsh")
    functions = tmp_path / "functions"
    functions.mkdir()
    (functions / "_k8e").write_text(completion.zsh_script(COMMANDS))
    load = f"fpath=({functions} $fpath); autoload -Uz compinit; compinit -D -u"
    if way == "sourced":
        load = f"autoload -Uz compinit; compinit -D -u; source {functions}/_k8e"
    ours, theirs = pty.openpty()
    command = ["setsid", "-c", "zsh", "-f", "-i"]
    with subprocess.Popen(command, env=fake_k8e, stdin=theirs, stdout=theirs, stderr=theirs) as zsh:
        try:
            os.write(ours, f"{load}; print rea''dy\n".encode())
            seen = b""
            while b"ready" not in seen:
                assert wait_readable(ours, PATIENCE), seen
                seen += os.read(ours, 65536)
            # What is the only one that fits is followed by a space.
            os.write(ours, b"k8e sandbox ru\t--lan\tpy\tx\n")
            ran = tmp_path / "ran"
            eventually(lambda: ran.exists() and ran.read_text(), PATIENCE)
            assert ran.read_text() == "sandbox run --lang python x\n"
        finally:
            zsh.kill()
            zsh.wait()
            os.close(ours)
            os.close(theirs)
