"""Whatever a configuration looks like, changing our entry changes no other byte."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from k8e.skills import jsonc, toml
from k8e.skills.install import TextChange

PATH, NAME = ("mcpServers",), "k8e-sandbox"
ENTRIES = [
    {"command": "k8e", "args": ["sandbox-mcp"]},
    {"type": "http", "url": "http://x/mcp", "headers": {"Authorization": "Bearer 好"}},
]
DROP = ("type", "command", "args", "url", "headers")
EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True)

# JSON as people write it.

blanks = st.sampled_from(["", " ", "  ", "\t", "\n", "\n  ", "\n\n\t", "\r\n    "])
remarks = st.sampled_from(
    ["// note\n", "// a } in , it\n", "/* x */", "/* a\n b */", '// "k8e-sandbox": {}\n', "/**/"]
)
gaps = st.lists(blanks | blanks | remarks, max_size=3).map("".join)
keys = st.sampled_from(["a", "b", "c", "mcp", "k8e", "é", 'q"', "// no", "x}"])
scalars = st.one_of(
    st.integers(-5, 5).map(str),
    st.sampled_from(["true", "null", "1.5e3", '"s"', '"\\u00e9 // {"', '"\\\\"', "[]", "{}"]),
)


@st.composite
def objects(draw: st.DrawFn, depth: int = 0, holder: bool = False) -> str:
    names = draw(st.lists(keys, max_size=3, unique=True))
    if depth == 0 and draw(st.booleans()):
        names.insert(draw(st.integers(0, len(names))), "mcpServers")
    if holder and draw(st.booleans()):
        names.insert(draw(st.integers(0, len(names))), NAME)
    members: list[str] = []
    for name in names:
        if name == "mcpServers":
            value = draw(objects(depth=1, holder=True))
        elif depth < 2 and (holder or draw(st.booleans())):
            value = draw(objects(depth=depth + 1))
        else:
            value = draw(scalars)
        shown = json.dumps(name, ensure_ascii=draw(st.booleans()))
        members.append(f"{draw(gaps)}{shown}{draw(gaps)}:{draw(gaps)}{value}{draw(gaps)}")
    trailing = "," + draw(gaps) if members and draw(st.booleans()) else draw(gaps)
    return "{" + ",".join(members) + trailing + "}"


@st.composite
def documents(draw: st.DrawFn) -> str:
    body = draw(objects() | objects() | objects() | st.just(""))
    return draw(st.sampled_from(["", "\ufeff"])) + draw(gaps) + body + draw(gaps)


def outline(text: str) -> list[str]:
    """The bytes of everything that is not ours: members, and comments."""
    root = jsonc.parse_jsonc(text)
    found: list[str] = []
    if root is None or root.members is None:
        return found
    for member in root.members:
        if member.key != PATH[0]:
            found.append(text[member.start : member.node.end])
            continue
        others = [inner for inner in member.node.members or [] if inner.key != NAME]
        found += [text[inner.start : inner.node.end] for inner in others]
    return found


def rest(text: str) -> dict[str, Any]:
    found = jsonc.data(text)
    servers = dict(found.pop(PATH[0], {}))
    servers.pop(NAME, None)
    return {**found, **({PATH[0]: servers} if servers else {})}


def remarks_of(text: str) -> list[str]:
    """Comments outside of strings, in order."""
    found: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == '"':
            at += 1
            while text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        elif text.startswith(("//", "/*"), at):
            comment = next(jsonc.comments(text, at, len(text)))
            found.append(text[comment.start : comment.end])
            at = comment.end - 1
        at += 1
    return found


@EXAMPLES
@given(text=documents())
@example(text='{"a":0,"mcpServers":{// note\n"a":{}}}')
def test_json_entries_of_others_and_comments_stay_byte_for_byte(text: str) -> None:
    first, second = ENTRIES
    before = jsonc.read(text, PATH, NAME)
    added = jsonc.put(text, PATH, NAME, first, DROP)
    assert jsonc.read(added, PATH, NAME) == {**(before or {}), **first}
    changed = jsonc.put(added, PATH, NAME, second, DROP)
    assert jsonc.read(changed, PATH, NAME) == {**(before or {}), **second}
    assert jsonc.put(changed, PATH, NAME, second, DROP) == changed
    gone = jsonc.remove(changed, PATH, NAME)
    assert jsonc.read(gone, PATH, NAME) is None
    for version in (added, changed, gone):
        assert outline(version) == outline(text)
        assert rest(version) == rest(text)
        assert remarks_of(version) == (remarks_of(text) if before is None else remarks_of(version))
    if before is None and jsonc.data(text).get(PATH[0]):
        assert closed(gone) == closed(text)


def closed(text: str) -> str:
    """``text`` with brackets right after what they close, where they may move to another line."""
    return re.sub(r"\s+(?=[}\]])", "", text)


@EXAMPLES
@given(text=documents())
def test_json_change_can_be_undone_exactly(text: str) -> None:
    added = jsonc.put(text, PATH, NAME, ENTRIES[0], DROP)
    assert TextChange.between(text, added).undo(added) == text
    assert jsonc.put(added, PATH, NAME, ENTRIES[0], DROP) == added


@EXAMPLES
@given(text=documents())
def test_json_reader_agrees_with_pythons_where_both_can_read(text: str) -> None:
    try:
        plain = json.loads(text)
    except ValueError:
        return
    node = jsonc.parse_jsonc(text)
    assert node is not None
    assert node.value == plain


# TOML as people write it.

values = st.sampled_from(
    [
        "1",
        '"s # no"',
        "'lit\\'",
        '"""\n[mcp_servers.k8e-sandbox]\n"""',
        "'''a ''q'' '''",
        '""""q"""',
        '"""a"""""',
        "'''b''''",
        "[1, 2,]",
        '[ # c ]\n "]", # d\n]',
        "{ a = 1, b = [2] }",
        "2024-01-01",
        '"\\""',
    ]
)
table_names = st.sampled_from(
    [
        "[a]",
        "[ b . c ]",
        '["d.e"]',
        "[mcp_servers.x]",
        "[mcp_servers.'y z'.env]",
        "[mcp_servers]",
        "[[list]]",
    ]
)
ends = st.sampled_from(["\n", "\n", " # note\n", "\n\n", "\n# line = 1\n"])


@st.composite
def toml_documents(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(["", "# first\n", "\n", "\ufeff"]))
    headers = draw(st.lists(table_names, max_size=4, unique=True))
    for header in ["", *headers]:
        text += header + draw(ends) if header else ""
        for key in draw(
            st.lists(st.sampled_from(["k", '"q.k"', "a.b", "z"]), max_size=3, unique=True)
        ):
            text += f"{key} = {draw(values)}{draw(ends)}"
    if draw(st.booleans()):
        text = text.removesuffix("\n")
    return text.replace("\n", "\r\n") if draw(st.booleans()) else text


def toml_rest(text: str) -> dict[str, Any]:
    found = toml.data(text)
    servers = dict(found.pop("mcp_servers", {}))
    servers.pop(NAME, None)
    return {**found, **({"mcp_servers": servers} if servers else {})}


def toml_outline(text: str) -> list[str]:
    table = ("mcp_servers", NAME)
    return [
        text[item.start : item.end]
        for item in toml.statements(text)
        if item.path[:2] != table and not (item.header and item.path == table[:1])
    ]


@EXAMPLES
@given(text=toml_documents())
def test_toml_tables_of_others_stay_byte_for_byte(text: str) -> None:
    try:
        tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError:
        return
    first, second = ENTRIES
    path = ("mcp_servers",)
    added = toml.put(text, path, NAME, first, DROP)
    assert added.startswith(text)
    assert TextChange.between(text, added).undo(added) == text
    changed = toml.put(added, path, NAME, second, DROP)
    assert toml.put(changed, path, NAME, second, DROP) == changed
    assert toml.read(changed, path, NAME) == second
    gone = toml.remove(changed, path, NAME)
    assert toml.read(gone, path, NAME) is None
    for version in (added, changed, gone):
        assert toml_rest(version) == toml_rest(text)
        assert toml_outline(version) == toml_outline(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    assert gone in (text, text + newline)
