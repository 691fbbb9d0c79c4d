"""Reads JSON as people write it, with comments and trailing commas, and knows where it all is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from k8e.skills.texts import Unreadable, line_of

MAX_DEPTH = 200  # deeper than any configuration, and far from Python's own limit
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
_LITERALS = {"true": True, "false": False, "null": None}
_STRING = json.JSONDecoder(strict=False).decode


class Node(NamedTuple):
    """A value, and where it stands in the text."""

    start: int
    end: int
    value: Any
    members: list[Member] | None = None
    """What an object has; None for everything that is none."""

    def find(self, key: str) -> Member | None:
        return next((item for item in self.members or [] if item.key == key), None)


class Member(NamedTuple):
    """One key of an object."""

    start: int
    key: str
    node: Node
    comma: int
    """Where the comma behind it stands; -1 if there is none."""


class Comment(NamedTuple):
    """A comment, without the line break that ends it."""

    start: int
    end: int


def parse(text: str) -> Node | None:
    """The value of a text; None if it has none, only spaces and comments."""
    reader = _Reader(text)
    at = reader.skip(1 if text.startswith("\ufeff") else 0)
    if at == len(text):
        return None
    node = reader.value(at, 0)
    rest = reader.skip(node.end)
    if rest != len(text):
        raise reader.problem(rest, f"{text[rest : rest + 10]!r} stands behind the end of the value")
    return node


def comments(text: str, start: int, end: int) -> Iterator[Comment]:
    """The comments between two values."""
    at = start
    while at < end:
        if text.startswith(("//", "/*"), at):
            close = _comment_end(text, at)
            yield Comment(at, close)
            at = close
        else:
            at += 1


def _comment_end(text: str, at: int) -> int:
    if text.startswith("//", at):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        return end - 1 if text[at:end].endswith("\r") else end
    end = text.find("*/", at + 2)
    return -1 if end < 0 else end + 2


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text

    def problem(self, at: int, what: str) -> Unreadable:
        return Unreadable(what, line_of(self._text, at))

    def skip(self, at: int) -> int:
        """Where the next thing stands that is neither space nor comment."""
        while True:
            at = self._space(at)
            if not self._text.startswith(("//", "/*"), at):
                return at
            end = _comment_end(self._text, at)
            if end < 0:
                raise self.problem(at, "the comment that begins here has no end")
            at = end

    def _space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return at if found is None else found.end()

    def value(self, at: int, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self.problem(at, f"it is nested more than {MAX_DEPTH} deep")
        first = self._text[at : at + 1]
        if first == "{":
            return self._object(at, depth)
        if first == "[":
            return self._array(at, depth)
        if first == '"':
            end, string = self._string(at)
            return Node(at, end, string)
        if found := _NUMBER.match(self._text, at):
            return Node(at, found.end(), json.loads(found[0]))
        if (word := _WORD.match(self._text, at)) and word[0] in _LITERALS:
            return Node(at, word.end(), _LITERALS[word[0]])
        raise self.problem(at, self._surprise(at, "a value"))

    def _surprise(self, at: int, wanted: str) -> str:
        if at >= len(self._text):
            return f"the file ends where {wanted} should be"
        return f"{self._text[at : at + 10].splitlines()[0]!r} stands where {wanted} should be"

    def _string(self, at: int) -> tuple[int, str]:
        end = at + 1
        while self._text[end : end + 1] != '"':
            if end >= len(self._text) or self._text[end] == "\n":
                raise self.problem(at, "the string that begins here has no end")
            end += 2 if self._text[end] == "\\" else 1
        try:
            return end + 1, _STRING(self._text[at : end + 1])
        except json.JSONDecodeError as error:
            raise self.problem(at, f"the string that begins here is none: {error.msg}") from None

    def _array(self, at: int, depth: int) -> Node:
        values: list[Any] = []
        here = self.skip(at + 1)
        while self._text[here : here + 1] != "]":
            node = self.value(here, depth + 1)
            values.append(node.value)
            here, _ = self._next(node.end, "]")
        return Node(at, here + 1, values)

    def _object(self, at: int, depth: int) -> Node:
        members: list[Member] = []
        seen: dict[str, int] = {}
        here = self.skip(at + 1)
        while self._text[here : here + 1] != "}":
            if self._text[here : here + 1] != '"':
                raise self.problem(here, self._surprise(here, "a key in quotes or }"))
            end, key = self._string(here)
            if key in seen:
                first = line_of(self._text, seen[key])
                raise self.problem(here, f"the key {key!r} is there already, at line {first}")
            seen[key] = here
            colon = self.skip(end)
            if self._text[colon : colon + 1] != ":":
                raise self.problem(colon, self._surprise(colon, "a colon"))
            node = self.value(self.skip(colon + 1), depth + 1)
            following, comma = self._next(node.end, "}")
            members.append(Member(here, key, node, comma))
            here = following
        value = {member.key: member.node.value for member in members}
        return Node(at, here + 1, value, members)

    def _next(self, end: int, close: str) -> tuple[int, int]:
        """Where the next element or the end stands, and where the comma was."""
        here = self.skip(end)
        if self._text[here : here + 1] == ",":
            return self.skip(here + 1), here
        if self._text[here : here + 1] != close:
            raise self.problem(here, self._surprise(here, f"a comma or {close}"))
        return here, -1
