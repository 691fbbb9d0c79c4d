"""The documents as the tests see them: fenced blocks, commands with their output, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RUNNABLE = ("bash", "console", "python")
USUAL_PORT = "50051"
_ANY = "…"
_DURATION = re.compile(r'("?duration_ms"?[:=] ?)\d+')


def all_documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def in_reading_order() -> list[Path]:
    """All documents as somebody reads them who begins with the README and follows the index."""
    index = ROOT / "docs" / "index.md"
    linked = [(index.parent / target.partition("#")[0]).resolve() for _, target in links(index)]
    found = [ROOT / "README.md", *linked, *all_documents()]
    return [path for path in dict.fromkeys(found) if path in set(all_documents())]


class Block(NamedTuple):
    """What stands between two fences."""

    line: int
    language: str
    text: str


class Step(NamedTuple):
    """Something to run. ``shown`` is the output that the document shows, if it shows any."""

    line: int
    command: str
    shown: str | None


def blocks(document: Path) -> Iterator[Block]:
    opening: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(document.read_text("utf-8").splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif opening is None:
            opening, lines = (number, line[3:].strip()), []
        else:
            yield Block(opening[0], opening[1], "".join(f"{text}\n" for text in lines))
            opening = None
    assert opening is None, f"{document}: the fence of line {opening} is not closed"


def steps(document: Path, scripts: Path, *, port: int) -> list[Step]:
    """What a document says can be run, in order. Python blocks become files in ``scripts``.

    The usual port may be taken on this machine, so ``port`` stands in for it.
    """
    found: list[Step] = []
    for block in blocks(document):
        block = block._replace(text=block.text.replace(USUAL_PORT, str(port)))
        if block.language == "console":
            found += _console(block)
        elif block.language == "bash":
            found.append(Step(block.line, block.text, None))
        elif block.language == "python":
            script = scripts / f"line_{block.line}.py"
            script.write_text(block.text, "utf-8")
            found.append(Step(block.line, f"python {script}\n", None))
        elif block.language == "output":
            assert found, f"{document}:{block.line}: output of nothing"
            found[-1] = found[-1]._replace(shown=block.text)
    return found


def _console(block: Block) -> Iterator[Step]:
    """Commands stand after ``$``, their further lines after ``>``, all else is output."""
    step: Step | None = None
    for number, line in enumerate(block.text.splitlines(keepends=True), block.line + 1):
        if line.startswith("$ "):
            if step is not None:
                yield step
            step = Step(number, line[2:], "")
        elif step is None:
            raise AssertionError(f"line {number}: output before the first command")
        elif line.startswith("> ") and not step.shown:
            step = step._replace(command=step.command + line[2:])
        else:
            step = step._replace(shown=(step.shown or "") + line)
    if step is not None:
        yield step


def matches(shown: str, printed: str) -> bool:
    """Whether a program printed what is shown; ``…`` stands for anything."""
    shown, printed = (_DURATION.sub(r"\1N", text).rstrip() for text in (shown, printed))
    pattern = ""
    for line in shown.split("\n"):
        if line.strip() == _ANY:
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(map(re.escape, line.split(_ANY))) + "\n"
    return re.fullmatch(pattern, printed + "\n") is not None


def links(document: Path) -> Iterator[tuple[int, str]]:
    """Targets of the links outside of fenced blocks, with their lines."""
    fenced = False
    for number, line in enumerate(document.read_text("utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            for found in re.finditer(r"\[[^\]]*\]\(([^)\s]+)\)", line):
                yield number, found[1]


def anchors(document: Path) -> set[str]:
    """What the headings of a document can be linked as."""
    fenced = False
    found: set[str] = set()
    for line in document.read_text("utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and line.startswith("#"):
            title = line.lstrip("#").strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found
