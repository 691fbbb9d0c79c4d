"""Which command lines are started without a shell."""

from __future__ import annotations

import pytest

from k8e.guest.spawn import SHELL, plain_words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("true", ["true"]),
        ("ls -la /workspace", ["ls", "-la", "/workspace"]),
        ("  git   status ", ["git", "status"]),
        ("./run.sh --level=3 a@b:c,d 50%", ["./run.sh", "--level=3", "a@b:c,d", "50%"]),
        ("env A=1 B=2", ["env", "A=1", "B=2"]),
    ],
)
def test_a_program_and_its_arguments_need_no_shell(line: str, words: list[str]) -> None:
    assert plain_words([*SHELL, line]) == words


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   ",
        "A=1 env",
        "ls *",
        "ls ~",
        "ls | wc",
        "ls; ls",
        "ls &",
        "ls > x",
        "echo $HOME",
        "printf x",
        "true --help",
        "cd /",
        "exit 3",
        "ls\nls",
        "ls\tx",
        "ls 'x'",
        'ls "x"',
        "ls \\x",
        "ls {a,b}",
        "ls # x",
        "! ls",
        "[ a ]",
        "(ls)",
        "if",
        "ls é",
    ],
)
def test_what_a_shell_could_read_in_another_way_goes_to_the_shell(line: str) -> None:
    assert plain_words([*SHELL, line]) is None


@pytest.mark.parametrize("argv", [["true"], ["sh", "-c", "ls"], [*SHELL, "ls", "x"], SHELL])
def test_only_a_line_for_the_shell_is_looked_at(argv: list[str]) -> None:
    assert plain_words(argv) is None
