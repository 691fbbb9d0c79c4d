"""JSON as people write it: reads it, and changes one entry without touching another byte.

All functions are pure: text in, text out. An entry is a key of an object that is a key of the root,
such as ``mcpServers`` and ``k8e-sandbox``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from k8e import errors


class UnreadableConfiguration(errors.InvalidRequest):
    """A configuration cannot be changed safely, because of something on a line of it."""

    def __init__(self, problem: str, line: int, advice: str = "") -> None:
        super().__init__(f"line {line}: {problem}", hint=advice)
        self.problem = problem
        self.line = line


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def line_end(text: str, at: int) -> int:
    """The position of the line break that ends the line, or the end of the text."""
    found = text.find("\n", at)
    if found < 0:
        return len(text)
    return found - 1 if found > at and text[found - 1] == "\r" else found


def newline_of(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


MAX_DEPTH = 200  # deeper than any configuration, and far from Python's own limit
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
_LITERALS = {"true": True, "false": False, "null": None}
_STRING = json.JSONDecoder(strict=False).decode


class JsonNode(NamedTuple):
    """A value, and its position in the text."""

    start: int
    end: int
    value: Any
    members: list[Member] | None = None
    """The members of an object; None for other values."""

    def find(self, key: str) -> Member | None:
        return next((item for item in self.members or [] if item.key == key), None)


class Member(NamedTuple):
    """One key of an object."""

    start: int
    key: str
    node: JsonNode
    comma: int
    """Where the comma behind it stands; -1 if there is none."""


class Comment(NamedTuple):
    """A comment, without the line break that ends it."""

    start: int
    end: int


def parse_jsonc(text: str) -> JsonNode | None:
    """The value of a text; None if it has only spaces and comments."""
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

    def problem(self, at: int, what: str) -> UnreadableConfiguration:
        return UnreadableConfiguration(what, line_of(self._text, at))

    def skip(self, at: int) -> int:
        """The position of the next token that is neither space nor comment."""
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

    def value(self, at: int, depth: int) -> JsonNode:
        if depth > MAX_DEPTH:
            raise self.problem(at, f"it is nested more than {MAX_DEPTH} deep")
        first = self._text[at : at + 1]
        if first == "{":
            return self._object(at, depth)
        if first == "[":
            return self._array(at, depth)
        if first == '"':
            end, string = self._string(at)
            return JsonNode(at, end, string)
        if found := _NUMBER.match(self._text, at):
            return JsonNode(at, found.end(), json.loads(found[0]))
        if (word := _WORD.match(self._text, at)) and word[0] in _LITERALS:
            return JsonNode(at, word.end(), _LITERALS[word[0]])
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
            raise self.problem(
                at, f"the string that begins here is not valid: {error.msg}"
            ) from None

    def _array(self, at: int, depth: int) -> JsonNode:
        values: list[Any] = []
        here = self.skip(at + 1)
        while self._text[here : here + 1] != "]":
            node = self.value(here, depth + 1)
            values.append(node.value)
            here, _ = self._next(node.end, "]")
        return JsonNode(at, here + 1, values)

    def _object(self, at: int, depth: int) -> JsonNode:
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
        return JsonNode(at, here + 1, value, members)

    def _next(self, end: int, close: str) -> tuple[int, int]:
        """The position of the next element or the end, and of the comma before it."""
        here = self.skip(end)
        if self._text[here : here + 1] == ",":
            return self.skip(here + 1), here
        if self._text[here : here + 1] != close:
            raise self.problem(here, self._surprise(here, f"a comma or {close}"))
        return here, -1


_INDENT = re.compile(r"[ \t]*")
_USUAL_INDENT = "  "
_MOVE = "make it an object ({}), or remove it, and run this again"


def data(text: str) -> dict[str, Any]:
    """What the file says."""
    holder = _holder(text, ())
    return {} if holder is None else holder.value


def read(text: str, path: tuple[str, ...], name: str) -> dict[str, Any] | None:
    """The entry, if it is there."""
    holder = _holder(text, path)
    found = None if holder is None else holder.find(name)
    if found is None:
        return None
    if found.node.members is None:
        raise UnreadableConfiguration(
            f"{name!r} is not an object", line_of(text, found.start), _MOVE
        )
    return dict(found.node.value)


def has(text: str, path: tuple[str, ...]) -> bool:
    """Whether the object that holds the entries exists."""
    return _holder(text, path) is not None


def put(
    text: str, path: tuple[str, ...], name: str, entry: Mapping[str, Any], drop: Collection[str]
) -> str:
    """Set the entry. Keys of it that are neither ours nor in ``drop`` stay."""
    now = read(text, path, name)
    if now is None:
        return _insert(text, path, name, entry)
    for key in [key for key in now if key in drop and key not in entry]:
        text = _without(text, _members(text, (*path, name)), key)
    for key, value in entry.items():
        member = _members(text, (*path, name)).find(key)
        if member is None:
            text = _insert(text, (*path, name), key, value)
        elif member.node.value != value:
            shown = _render(value, _Style.of(text), _indent_at(text, member.start))
            text = text[: member.node.start] + shown + text[member.node.end :]
    return text


def remove(text: str, path: tuple[str, ...], name: str, *, emptied: bool = False) -> str:
    """Remove the entry; with ``emptied`` also the object that held it, if nothing is left."""
    holder = _holder(text, path)
    if holder is None or holder.find(name) is None:
        return text
    text = _without(text, holder, name)
    left = _members(text, path)
    if emptied and path and not left.members and not text[left.start + 1 : left.end - 1].strip():
        return remove(text, path[:-1], path[-1], emptied=True)
    return text


def _holder(text: str, path: tuple[str, ...]) -> JsonNode | None:
    node = parse_jsonc(text)
    if node is None:
        return None
    if node.members is None:
        raise UnreadableConfiguration(
            "the file's value is not an object", line_of(text, node.start), _MOVE
        )
    for key in path:
        member = node.find(key)
        if member is None:
            return None
        node = member.node
        if node.members is None:
            raise UnreadableConfiguration(
                f"{key!r} is not an object", line_of(text, member.start), _MOVE
            )
    return node


def _members(text: str, path: tuple[str, ...]) -> JsonNode:
    found = _holder(text, path)
    assert found is not None  # noqa: S101 - the callers have just seen it there
    return found


# Inserting.


class _Style:
    """The style of a file, for new lines of it."""

    def __init__(self, indent: str, newline: str, colon: str, *, lines: bool) -> None:
        self.indent, self.newline, self.colon, self.lines = indent, newline, colon, lines

    @classmethod
    def of(cls, text: str) -> _Style:
        root = parse_jsonc(text)
        lines = root is None or not root.members or "\n" in text[root.start : root.end]
        colon = '":' if re.search(r'"\s*:\S', text) and not lines else '": '
        return cls(_unit(text, root), newline_of(text), colon[1:], lines=lines)


def _unit(text: str, root: JsonNode | None) -> str:
    """The indentation of one more level."""
    for member in (root.members if root is not None else None) or []:
        if _begins_its_line(text, member.start):
            return _indent_at(text, member.start) or _USUAL_INDENT
    return _USUAL_INDENT


def _begins_its_line(text: str, at: int) -> bool:
    return not text[line_start(text, at) : at].strip(" \t\ufeff") and "\n" in text[:at]


def _indent_at(text: str, at: int) -> str:
    """The indentation of the line at a position."""
    found = _INDENT.match(text, line_start(text, at))
    return "" if found is None else found[0]


def _render(value: Any, style: _Style, indent: str) -> str:
    if not style.lines:
        comma = "," if style.colon == ":" else ", "
        return json.dumps(value, ensure_ascii=False, separators=(comma, style.colon))
    shown = json.dumps(value, ensure_ascii=False, indent=style.indent)
    return shown.replace("\n", style.newline + indent)


def _insert(text: str, path: tuple[str, ...], key: str, value: Any) -> str:
    """Add a key at the end of an object, and the objects around it that are missing."""
    if parse_jsonc(text) is None:
        newline = newline_of(text)
        before = text + newline if text and not text.endswith("\n") else text
        return _insert(before + "{}" + newline, path, key, value)
    while path and _holder(text, path) is None:
        path, key, value = path[:-1], path[-1], {key: value}
    holder = _members(text, path)
    style = _Style.of(text)
    if not holder.members:
        return _insert_first(text, holder, style, key, value)
    last = holder.members[-1]
    if not _begins_its_line(text, last.start):
        return _insert_beside(text, last, style, key, value)
    return _insert_below(text, holder, last, style, key, value)


def _insert_first(text: str, holder: JsonNode, style: _Style, key: str, value: Any) -> str:
    outer = _indent_at(text, holder.start)
    if not style.lines:
        at = holder.end - 1
        return text[:at] + _member(key, value, style, "") + text[at:]
    indent = outer + style.indent
    added = style.newline + indent + _member(key, value, style, indent)
    inside = text[holder.start + 1 : holder.end - 1]
    if "\n" not in inside:
        at = holder.end - 1
        return text[:at] + added + style.newline + outer + text[at:]
    at = _last_line_end(text, holder.start + 1, holder.end - 1)
    return text[:at] + added + text[at:]


def _insert_beside(text: str, last: Member, style: _Style, key: str, value: Any) -> str:
    """Insert into an object on one line: on the same line."""
    flat = _Style(style.indent, style.newline, style.colon, lines=False)
    space = "" if flat.colon == ":" else " "
    shown = _member(key, value, flat, "")
    if last.comma >= 0:
        at = last.comma + 1
        return f"{text[:at]}{space}{shown},{text[at:]}"
    at = last.node.end
    return f"{text[:at]},{space}{shown}{text[at:]}"


def _insert_below(
    text: str, holder: JsonNode, last: Member, style: _Style, key: str, value: Any
) -> str:
    """Insert on lines of their own, behind a comment after the last one."""
    indent = _indent_at(text, last.start)
    added = style.newline + indent + _member(key, value, style, indent)
    end = last.node.end if last.comma < 0 else last.comma + 1
    at = _end_of_remark(text, end, holder.end - 1)
    if last.comma >= 0:
        return text[:at] + added + "," + text[at:]
    return text[:end] + "," + text[end:at] + added + text[at:]


def _member(key: str, value: Any, style: _Style, indent: str) -> str:
    return json.dumps(key, ensure_ascii=False) + style.colon + _render(value, style, indent)


def _end_of_remark(text: str, start: int, end: int) -> int:
    """The position behind the comments that begin on this line."""
    at = start
    stop = line_end(text, start)
    for comment in comments(text, start, end):
        if comment.start > stop:
            break
        at = comment.end
        stop = line_end(text, at)
    return at


def _last_line_end(text: str, start: int, end: int) -> int:
    """The end of the last non-empty line between two positions, or the first's."""
    at = start
    for comment in comments(text, start, end):
        at = comment.end
    return min(line_end(text, at), end)


# Removing.


def _without(text: str, holder: JsonNode, key: str) -> str:
    members = holder.members or []
    index = next(at for at, item in enumerate(members) if item.key == key)
    member = members[index]
    end = member.node.end if member.comma < 0 else member.comma + 1
    start = member.start
    if not _begins_its_line(text, start):
        start = _space_before(text, start) if index else start
    elif text[end : line_end(text, end)].strip() and index == len(members) - 1 and index:
        last = members[index - 1]
        between = text[last.comma + 1 : start]
        if between.strip():  # a comment before it must not swallow what follows
            end = _space_after(text, end)
        else:
            start = last.comma + 1
    elif text[end : line_end(text, end)].strip():
        end = _space_after(text, end)  # a comment before it must not swallow what follows
    else:
        start = line_start(text, start) - 1  # its line break goes with it
        start -= text[:start].endswith("\r")
    before_text = text[:start]
    if member.comma < 0 and index:  # the comma before it separates nothing any more
        comma = members[index - 1].comma
        before_text = text[:comma] + text[comma + 1 : start]
    after = text[end:]
    if len(members) == 1 and before_text.endswith("{") and re.match(r"\s*\}", after):
        after = after.lstrip()  # {} and not { and } on two lines
    return before_text + after


def _space_before(text: str, at: int) -> int:
    while text[at - 1] in " \t":
        at -= 1
    return at


def _space_after(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in " \t":
        at += 1
    return at
