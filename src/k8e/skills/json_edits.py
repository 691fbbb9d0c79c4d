"""Changes one entry of a JSON file and leaves every other byte as it is.

All functions are pure: text in, text out. An entry is a key of an object that is a key of the root,
such as ``mcpServers`` and ``k8e-sandbox``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from k8e.skills import jsonc
from k8e.skills.jsonc import Member, Node
from k8e.skills.texts import Unreadable, line_end, line_of, line_start, newline_of

_INDENT = re.compile(r"[ \t]*")
_USUAL_INDENT = "  "
_MOVE = "make it an object ({}), or take it away, and run this again"


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
        raise Unreadable(f"{name!r} is no object", line_of(text, found.start), _MOVE)
    return dict(found.node.value)


def has(text: str, path: tuple[str, ...]) -> bool:
    """Whether the object is there that entries stand in."""
    return _holder(text, path) is not None


def put(
    text: str, path: tuple[str, ...], name: str, entry: Mapping[str, Any], drop: Collection[str]
) -> str:
    """Make the entry say this. Keys of it that are neither ours nor in ``drop`` stay."""
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
    """Take the entry away; with ``emptied`` also the object that held it, if nothing is left."""
    holder = _holder(text, path)
    if holder is None or holder.find(name) is None:
        return text
    text = _without(text, holder, name)
    left = _members(text, path)
    if emptied and path and not left.members and not text[left.start + 1 : left.end - 1].strip():
        return remove(text, path[:-1], path[-1], emptied=True)
    return text


def _holder(text: str, path: tuple[str, ...]) -> Node | None:
    node = jsonc.parse(text)
    if node is None:
        return None
    if node.members is None:
        raise Unreadable("the file's value is no object", line_of(text, node.start), _MOVE)
    for key in path:
        member = node.find(key)
        if member is None:
            return None
        node = member.node
        if node.members is None:
            raise Unreadable(f"{key!r} is no object", line_of(text, member.start), _MOVE)
    return node


def _members(text: str, path: tuple[str, ...]) -> Node:
    found = _holder(text, path)
    assert found is not None  # noqa: S101 - the callers have just seen it there
    return found


# Inserting.


class _Style:
    """How a file is written, as far as new lines of it should look the same."""

    def __init__(self, indent: str, newline: str, colon: str, *, lines: bool) -> None:
        self.indent, self.newline, self.colon, self.lines = indent, newline, colon, lines

    @classmethod
    def of(cls, text: str) -> _Style:
        root = jsonc.parse(text)
        lines = root is None or not root.members or "\n" in text[root.start : root.end]
        colon = '":' if re.search(r'"\s*:\S', text) and not lines else '": '
        return cls(_unit(text, root), newline_of(text), colon[1:], lines=lines)


def _unit(text: str, root: Node | None) -> str:
    """What one more level is indented by."""
    for member in (root.members if root is not None else None) or []:
        if _begins_its_line(text, member.start):
            return _indent_at(text, member.start) or _USUAL_INDENT
    return _USUAL_INDENT


def _begins_its_line(text: str, at: int) -> bool:
    return not text[line_start(text, at) : at].strip(" \t\ufeff") and "\n" in text[:at]


def _indent_at(text: str, at: int) -> str:
    """The indentation of the line that something stands on."""
    found = _INDENT.match(text, line_start(text, at))
    return "" if found is None else found[0]


def _render(value: Any, style: _Style, indent: str) -> str:
    if not style.lines:
        comma = "," if style.colon == ":" else ", "
        return json.dumps(value, ensure_ascii=False, separators=(comma, style.colon))
    shown = json.dumps(value, ensure_ascii=False, indent=style.indent)
    return shown.replace("\n", style.newline + indent)


def _insert(text: str, path: tuple[str, ...], key: str, value: Any) -> str:
    """Add a key at the end of an object, and the objects around it that are not there yet."""
    if jsonc.parse(text) is None:
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


def _insert_first(text: str, holder: Node, style: _Style, key: str, value: Any) -> str:
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
    """In an object on one line: on the same line."""
    flat = _Style(style.indent, style.newline, style.colon, lines=False)
    space = "" if flat.colon == ":" else " "
    shown = _member(key, value, flat, "")
    if last.comma >= 0:
        at = last.comma + 1
        return f"{text[:at]}{space}{shown},{text[at:]}"
    at = last.node.end
    return f"{text[:at]},{space}{shown}{text[at:]}"


def _insert_below(
    text: str, holder: Node, last: Member, style: _Style, key: str, value: Any
) -> str:
    """On lines of its own, behind a comment that stands behind the last one."""
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
    """Behind the comments that begin on this line."""
    at = start
    stop = line_end(text, start)
    for comment in jsonc.comments(text, start, end):
        if comment.start > stop:
            break
        at = comment.end
        stop = line_end(text, at)
    return at


def _last_line_end(text: str, start: int, end: int) -> int:
    """The end of the last line between two places that has something on it, or the first's."""
    at = start
    for comment in jsonc.comments(text, start, end):
        at = comment.end
    return min(line_end(text, at), end)


# Removing.


def _without(text: str, holder: Node, key: str) -> str:
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
