"""How code becomes a command, as pure data where no file is needed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.guest import spawn

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
    found = spawn.language_command(language, code.encode(), "id", "/workspace")
    assert found == ([*argv, code], None)


@pytest.fixture
def folder() -> Generator[Path]:
    """A user's folder, to which the user can pass."""
    with tempfile.TemporaryDirectory(prefix="k8e-test-", dir="/tmp") as parent:
        Path(parent).chmod(0o711)
        made = Path(parent, "workspace")
        made.mkdir()
        os.chown(made, spawn.UID, spawn.GID)
        yield made


@needs_root
def test_several_lines_of_python_are_a_script_beside_the_users_files(folder: Path) -> None:
    code = b"x = 1\nprint(x)"
    argv, made = spawn.language_command("python", code, "id", str(folder))
    assert argv == ["python3", str(folder / ".k8e_run.py")]
    assert made == argv[1]
    assert made is not None
    assert Path(made).read_bytes() == code
    assert Path(made).stat().st_uid == spawn.UID
    argv, other = spawn.language_command("py", code, "second", str(folder))
    assert other == str(folder / ".k8e_run-second.py")
    assert spawn.is_script(argv, other)
    folder.chmod(0o500)
    argv, made = spawn.language_command("python", code, "third", str(folder))
    assert (argv, made) == (["python3", "-c", code.decode()], None)
    assert not spawn.is_script(argv, made)


def _ended(argv: list[str], folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@needs_root
@pytest.mark.parametrize(
    "code",
    [
        "import os, sys\nprint(sorted(globals()), __file__, sys.argv, sys.path[0])\n",
        "from __future__ import division\nimport sys\nprint(sys.orig_argv[1:], __loader__.path)\n",
        "def f():\n    raise ValueError(1)\ntry:\n    f()\nfinally:\n    f()\n",
        "if 1:\nx\n",
        "import sys\nsys.exit('gone')\n",
        "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n",
    ],
)
def test_a_script_that_is_checked_does_what_a_script_does(folder: Path, code: str) -> None:
    raw = code.encode("latin-1")
    argv, made = spawn.language_command("python", raw, "id", str(folder), shared=True)
    assert spawn.is_script(argv, made)
    assert made is not None
    assert _ended(argv, folder) == _ended(["python3", made], folder)


@needs_root
def test_a_script_that_somebody_swaps_is_not_run(folder: Path) -> None:
    code = b"x = 1\nprint(x)"
    argv, made = spawn.language_command("python", code, "id", str(folder), shared=True)
    assert made is not None
    (folder / "other").write_text("print('theirs')\n")
    (folder / "other").rename(made)
    status, said, error = _ended(argv, folder)
    assert (status, said) == (1, "")
    assert "was changed by another program" in error


def test_code_that_is_no_text_keeps_its_bytes() -> None:
    argv, _ = spawn.language_command("bash", b"printf '\xff'", "id", "/workspace")
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
    found = spawn.language_command(language, code.encode(), "id", "/workspace")
    assert found == (argv, None)


def test_an_unknown_language_is_a_lookup_error() -> None:
    with pytest.raises(LookupError):
        spawn.language_command("cobol", b"x", "id", "/workspace")


def test_every_alias_leads_to_a_language_that_can_run() -> None:
    assert set(spawn.ALIASES.values()) == {"bash", "python", "node", "ts"}
