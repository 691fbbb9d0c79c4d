"""Changes one table of a TOML file and leaves every other byte as it is.

Python's own ``tomllib`` reads values; this module only finds the positions of statements. All
functions are pure: text in, text out.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

from k8e.skills.jsonc import UnreadableConfiguration, line_end, line_of, newline_of

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TRIVIA = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_AT_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)")
_QUOTES = ('"""', "'''", '"', "'")
_OPEN, _CLOSE = "[{", "]}"


class Statement(NamedTuple):
    """A header of a table, or a key with its value."""

    start: int
    end: int
    """Behind its last character; a comment on the same line is not part of it."""
    path: tuple[str, ...]
    """The table's, or that of the key with all tables around it."""
    header: bool
    value: int = -1
    """Where the value of a key begins."""


def data(text: str) -> dict[str, Any]:
    """What the file says."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        found = _AT_LINE.search(str(error))
        line = int(found[1]) if found and found[1] else line_of(text, len(text))
        raise UnreadableConfiguration(_AT_LINE.sub("", str(error)), line) from None


def read(text: str, path: tuple[str, ...], name: str) -> dict[str, Any] | None:
    """The table, if it is there."""
    here: Any = data(text)
    for key in (*path, name):
        if not isinstance(here, dict):
            raise _inline(text, path)
        here = here.get(key)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if here is None:
            return None
    if not isinstance(here, dict):
        raise _inline(text, (*path, name))
    return here  # pyright: ignore[reportUnknownVariableType]


def has(text: str, path: tuple[str, ...]) -> bool:
    return not path or read(text, path[:-1], path[-1]) is not None


def put(
    text: str, path: tuple[str, ...], name: str, entry: Mapping[str, Any], drop: Collection[str]
) -> str:
    """Set the table. Keys of it that are neither ours nor in ``drop`` stay."""
    now = read(text, path, name)
    table = (*path, name)
    if now is None:
        return _append(text, table, entry)
    if not any(item.header and item.path == table for item in statements(text)):
        raise _inline(text, table)
    for key in now:
        changed = key in entry and now[key] != entry[key]
        if changed or (key in drop and key not in entry):
            text = _without(text, (*table, key))
    added = {key: value for key, value in entry.items() if now.get(key) != value}
    return _extend(text, table, added)


def remove(text: str, path: tuple[str, ...], name: str, *, emptied: bool = False) -> str:
    """Remove the table, with the tables below it.

    There is nothing else to empty: a table around it exists only if a user wrote it.
    """
    del emptied
    table = (*path, name)
    if read(text, path, name) is None:
        return text
    if not any(item.path[: len(table)] == table for item in statements(text)):
        raise _inline(text, table)
    return _without(text, table)


def statements(text: str) -> Iterator[Statement]:
    """All statements of a TOML text."""
    at = _trivia(text, 1 if text.startswith("\ufeff") else 0)
    table: tuple[str, ...] = ()
    while at < len(text):
        if text[at] == "[":
            double = text.startswith("[[", at)
            key, end = _key(text, at + 1 + double)
            end = text.index("]", end) + 1 + double
            table = key
            yield Statement(at, end, key, header=True)
        else:
            key, end = _key(text, at)
            value = _blanks(text, text.index("=", end) + 1)
            end = _value_end(text, value)
            yield Statement(at, end, (*table, *key), header=False, value=value)
        at = _trivia(text, end)


def _trivia(text: str, at: int) -> int:
    found = _TRIVIA.match(text, at)
    return at if found is None else found.end()


def _blanks(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in " \t":
        at += 1
    return at


def _key(text: str, at: int) -> tuple[tuple[str, ...], int]:
    """A dotted key, and its end."""
    parts: list[str] = []
    while True:
        at = _blanks(text, at)
        if found := _BARE.match(text, at):
            parts.append(found[0])
            at = found.end()
        else:
            end = _string_end(text, at)
            parts.append(tomllib.loads(f"k = {text[at:end]}")["k"])
            at = end
        dot = _blanks(text, at)
        if text[dot : dot + 1] != ".":
            return tuple(parts), at
        at = dot + 1


def _string_end(text: str, at: int) -> int:
    quote = next(item for item in _QUOTES if text.startswith(item, at))
    at += len(quote)
    while not text.startswith(quote, at):
        at += 2 if quote[0] == '"' and text[at] == "\\" else 1
    at += len(quote)
    if len(quote) == 3:  # up to two quotes more belong to the text
        while text.startswith(quote[0], at):
            at += 1
    return at


def _value_end(text: str, at: int) -> int:
    depth = 0
    while at < len(text):
        char = text[at]
        if char in "\"'":
            at = _string_end(text, at)
            continue
        if char == "#":
            if not depth:
                break
            at = line_end(text, at)
        elif char == "\n" and not depth:
            break
        depth += (char in _OPEN) - (char in _CLOSE)
        at += 1
    return len(text[:at].rstrip(" \t\r"))


# Changing.


def _inline(text: str, path: tuple[str, ...]) -> UnreadableConfiguration:
    """The error for a file that cannot be extended by adding lines."""
    shown = ".".join(path)

    def likeness(item: Statement) -> int:
        pairs = zip(item.path, path, strict=False)
        return -1 if any(a != b for a, b in pairs) else min(len(item.path), len(path))

    at = max(statements(text), key=likeness).start
    return UnreadableConfiguration(
        f"{shown} is not written as a table of its own",
        line_of(text, at),
        f"write it as a table, with a line [{shown}] and one line for each key, and run this again",
    )


def _render(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return "{ " + ", ".join(f"{_name(key)} = {_render(item)}" for key, item in pairs) + " }"
    # Strings and lists of strings are written alike in both, but for DEL, which TOML forbids.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _name(key: str) -> str:
    return key if _BARE.fullmatch(key) else _render(key)


def _append(text: str, table: tuple[str, ...], entry: Mapping[str, Any]) -> str:
    newline = newline_of(text)
    block = [f"[{'.'.join(map(_name, table))}]"]
    block += [f"{_name(key)} = {_render(value)}" for key, value in entry.items()]
    begin = ""
    if text.strip("\ufeff"):
        begin = newline if text.endswith("\n") else newline * 2
    added = text + begin + newline.join(block) + newline
    try:
        data(added)
    except UnreadableConfiguration:  # a table in braces cannot get more
        raise _inline(text, table[:-1]) from None
    return added


def _extend(text: str, table: tuple[str, ...], entry: Mapping[str, Any]) -> str:
    """Add keys to a table that has a header, behind its last line."""
    if not entry:
        return text
    newline = newline_of(text)
    current: tuple[str, ...] = ()
    end = 0
    for item in statements(text):
        current = item.path if item.header else current
        if current == table:
            end = item.end
    at = line_end(text, end)
    lines = "".join(f"{newline}{_name(key)} = {_render(value)}" for key, value in entry.items())
    return text[:at] + lines + text[at:]


def _without(text: str, path: tuple[str, ...]) -> str:
    """Remove the statements at and below a path, with the comments on their lines."""
    for item in reversed(list(statements(text))):
        if item.path[: len(path)] == path:
            text = _cut(text, item)
    return text


def _cut(text: str, item: Statement) -> str:
    begin = text.rfind("\n", 0, item.start) + 1
    begin += text.startswith("\ufeff", begin)
    if item.header:
        begin = _blank_line_before(text, begin)
    stop = line_end(text, item.end)
    end = stop + (2 if text.startswith("\r\n", stop) else 1)
    return text[:begin] + text[end:]


def _blank_line_before(text: str, begin: int) -> int:
    """The beginning of an empty line right before, or ``begin``."""
    for empty in ("\r\n", "\n"):
        at = begin - len(empty)
        if text[:begin].endswith(empty) and (at == 0 or text[at - 1] == "\n"):
            return at
    return begin
