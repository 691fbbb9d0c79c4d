"""How code becomes a command, as pure data where no file is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k8e.guest import languages, spawn

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.mark.parametrize(
    ("language", "argv"),
    [
        ("python", ["python3", "-c"]),
        ("py", ["python3", "-c"]),
        ("bash", ["bash", "-c"]),
        ("sh", ["bash", "-c"]),
        ("node", ["node", "-e"]),
        ("javascript", ["node", "-e"]),
    ],
)
def test_short_code_is_one_argument_untouched(language: str, argv: list[str]) -> None:
    code = "it's \"quoted\" $HOME `x`\n\tand $(more) 'lines'"
    found = languages.language_command(language, code.encode(), "id", "/workspace")
    assert found == ([*argv, code], None)


@needs_root
def test_several_lines_of_python_are_a_script_beside_the_users_files(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    os.chown(folder, spawn.UID, spawn.GID)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o711)
    tmp_path.chmod(0o711)
    code = b"x = 1\nprint(x)"
    argv, made = languages.language_command("python", code, "id", str(folder))
    assert argv == ["python3", str(folder / ".k8e_run.py")]
    assert made == argv[1]
    assert made is not None
    assert Path(made).read_bytes() == code
    assert Path(made).stat().st_uid == spawn.UID
    argv, other = languages.language_command("py", code, "second", str(folder))
    assert other == str(folder / ".k8e_run-second.py")
    assert languages.is_script(argv, other)
    folder.chmod(0o500)
    argv, made = languages.language_command("python", code, "third", str(folder))
    assert (argv, made) == (["python3", "-c", code.decode()], None)
    assert not languages.is_script(argv, made)


def test_code_that_is_no_text_keeps_its_bytes() -> None:
    argv, _ = languages.language_command("bash", b"printf '\xff'", "id", "/workspace")
    assert argv[-1].encode("utf-8", "surrogateescape") == b"printf '\xff'"


@pytest.mark.parametrize(
    ("language", "code", "argv"),
    [
        ("python", "-1", ["python3", "-c", "-1"]),
        ("bash", "-l", ["bash", "-c", "--", "-l"]),
        ("bash", "+x", ["bash", "-c", "--", "+x"]),
        ("node", "-1+2", ["node", "-e", " -1+2"]),
        ("node", "\\-1", ["node", "-e", " \\-1"]),
    ],
)
def test_code_that_looks_like_an_option_is_none(language: str, code: str, argv: list[str]) -> None:
    found = languages.language_command(language, code.encode(), "id", "/workspace")
    assert found == (argv, None)


def test_an_unknown_language_is_a_lookup_error() -> None:
    with pytest.raises(LookupError):
        languages.language_command("cobol", b"x", "id", "/workspace")


def test_every_alias_leads_to_a_language_that_can_run() -> None:
    assert set(languages.ALIASES.values()) == {"bash", "python", "node", "ts"}
