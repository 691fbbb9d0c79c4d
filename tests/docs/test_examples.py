"""Every example that a reader could type is typed here, and prints what the document says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.conftest import Shell
from tests.docs.documents import (
    ROOT,
    RUNNABLE,
    all_documents,
    blocks,
    in_reading_order,
    matches,
    steps,
)

KNOWN = {*RUNNABLE, "output", "text", "toml", "json", "yaml", "proto", "ts"}  # ts: tests/sdk
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HOST_PACKAGES = Path("/usr/lib/python3/dist-packages")
FROM_THE_HOST = {"chart.py": ("pandas", "matplotlib")}
"""What examples import in sandboxes, which see the packages of the host's Python."""
WITH_EXAMPLES = [
    path for path in in_reading_order() if any(block.language in RUNNABLE for block in blocks(path))
]


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_the_document_work(document: Path, shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    # What install.sh does is tested elsewhere; here k8e is installed already.
    (folder / "install.sh").touch()
    problems = shell.follow(steps(document, tmp_path, port=shell.port), folder)
    problems += [f"it leaves {item}" for item in shell.left()]
    assert not problems, f"{document.relative_to(ROOT)}: " + "\n".join(problems)


NAMES = {
    "session": r"--session-id[ =]([a-z][\w-]*)|session_id=\"([a-z][\w-]*)\"",
    "tenant": r"--tenant[ =]([a-z][\w-]*)|tenant_id=\"([a-z][\w-]*)\"",
    "key": r"api-key create ([a-z][\w-]*)",
    "template": r"template apply ([a-z][\w-]*)",
    "snapshot": r"snapshot save \S+ ([a-z][\w-]*)",
}


@pytest.mark.parametrize("kind", NAMES)
def test_no_two_documents_give_the_same_name(kind: str) -> None:
    users: dict[str, set[str]] = {}
    for path in WITH_EXAMPLES:
        for block in blocks(path):
            if block.language in RUNNABLE:
                for found in re.finditer(NAMES[kind], block.text):
                    name = next(filter(None, found.groups()))
                    users.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    assert {name: pages for name, pages in users.items() if len(pages) > 1} == {}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_file_works(example: Path, shell: Shell, tmp_path: Path) -> None:
    for name in FROM_THE_HOST.get(example.name, ()):
        if not (HOST_PACKAGES / name).is_dir():
            pytest.skip(f"this host has no python3-{name}; as root, tests/packages.sh installs it")
    assert shell.python(example, tmp_path).strip()
    assert shell.left() == []
    for chart in tmp_path.glob("*.png"):
        assert chart.read_bytes().startswith(b"\x89PNG\r\n")


def test_table_of_lines_is_right_and_no_example_is_longer_than_others() -> None:
    told: dict[str, str] = {}
    for line in (ROOT / "docs/howto/sandbox.md").read_text("utf-8").splitlines():
        if found := re.match(r"\| \[examples/(\w+\.py)\].*?\| (\d+) \| (.*) \|$", line):
            name, number, others = found.groups()
            told[name] = number
            for other in re.findall(r"\d+(?=:)", others):
                assert int(number) <= int(other), name
    counted = {name: str(lines_of_code(ROOT / "examples" / name)) for name in told}
    assert told == counted
    assert len(told) == 5


def lines_of_code(program: Path) -> int:
    """How many lines a program has without empty lines, comments, imports and docstrings."""
    text = program.read_text("utf-8")
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            continue  # no docstring
        if isinstance(node, ast.Expr | ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_readme_shows_the_example_file() -> None:
    shown = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    hello = (ROOT / "examples" / "hello.py").read_text("utf-8")
    assert len(shown) == 1
    assert hello.endswith(shown[0])


def test_every_block_says_what_it_is() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{block.line}"
        for path in all_documents()
        for block in blocks(path)
        if block.language not in KNOWN
    ]
    assert not unknown


@pytest.mark.parametrize(
    ("shown", "printed", "fits"),
    [
        ("a\n", "a\n", True),
        ("a\n", "b\n", False),
        ("sess-…\n", "sess-abc\n", True),
        ("a\n…\nz\n", "a\nb\nc\nz\n", True),
        ("…\nz\n", "z\n", True),
        ("a\n", "a\nb\n", False),
        ('{"duration_ms":3}\n', '{"duration_ms":1234}\n', True),
    ],
)
def test_shown_output_is_compared(shown: str, printed: str, fits: bool) -> None:
    assert matches(shown, printed) is fits
