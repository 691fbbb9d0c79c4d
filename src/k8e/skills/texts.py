"""What the editors of JSON and TOML share: the error, and lines."""

from __future__ import annotations

from k8e import errors


class Unreadable(errors.InvalidRequest):
    """A configuration cannot be changed safely, because of something at a line of it."""

    def __init__(self, problem: str, line: int, advice: str = "") -> None:
        super().__init__(f"line {line}: {problem}", hint=advice)
        self.problem = problem
        self.line = line


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def line_end(text: str, at: int) -> int:
    """Where the line break is that ends the line, or the end of the text."""
    found = text.find("\n", at)
    if found < 0:
        return len(text)
    return found - 1 if found > at and text[found - 1] == "\r" else found


def newline_of(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
