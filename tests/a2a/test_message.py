"""What messages ask for, and every way in which they can be wrong."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k8e.a2a import card, dialects, message
from k8e.a2a.message import Fault, Job, MessageRefusal

NEW, OLD = dialects.DIALECTS
LONGEST = 60.0


def ask(*parts: dict[str, Any], **message: Any) -> message.TaskMessage:
    return NEW.ask({"message": {"parts": list(parts), **message}}, LONGEST)


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("```python\nprint(1)\n```", Job("print(1)\n", "python", 30)),
        ("Run:\n\n  ```js\nx\n\ny\n  ```\nthanks", Job("x\n\ny\n", "node", 30)),
        ("```\nls\n```", Job("ls\n", "bash", 30)),
        ("````sh\n```\nnot the end\n```\n````", Job("```\nnot the end\n```\n", "bash", 30)),
        ("```python title=x.py\r\na\r\n```\r\n", Job("a\r\n", "python", 30)),
    ],
)
def test_fenced_block_is_code(text: str, job: Job) -> None:
    assert ask({"text": text}).wants == job


@pytest.mark.parametrize(
    "text",
    [
        "What is 6 * 7?",
        "",
        "```python\nno end",
        "```python\na\n```\n```python\nb\n```",
        "`x`",
        "```",
    ],
)
def test_text_without_one_block_is_refused_with_help(text: str) -> None:
    found = ask({"text": text}).wants
    assert isinstance(found, MessageRefusal)
    assert "fenced block" in found.text


def test_language_that_is_not_run_is_refused_by_name() -> None:
    found = ask({"text": "```cobol\nx\n```"}).wants
    assert isinstance(found, MessageRefusal)
    assert "'cobol'" in found.text


def test_metadata_makes_plain_text_code() -> None:
    found = ask({"text": "1 + 1"}, metadata={"language": "Python", "timeout": 5.0}).wants
    assert found == Job("1 + 1", "python", 5)


def test_data_part_says_everything_itself() -> None:
    found = ask({"data": {"code": "x", "language": "ts", "timeout": 60}}, {"text": "hello"}).wants
    assert found == Job("x", "ts", 60)


@pytest.mark.parametrize("name", ["a.txt", "../../a.txt", "/etc/a.txt", "c:\\x\\a.txt"])
def test_files_keep_only_the_last_part_of_their_name(name: str) -> None:
    new = {"raw": base64.b64encode(b"\0x").decode(), "filename": name}
    found = ask(new, {"data": {"code": "x"}}).wants
    assert isinstance(found, Job)
    assert found.files == (("a.txt", b"\0x"),)
    old = {"kind": "file", "file": {"bytes": base64.b64encode(b"\0x").decode(), "name": name}}
    params = {"message": {"parts": [old, {"kind": "data", "data": {"code": "x"}}]}}
    assert OLD.ask(params, LONGEST).wants == found


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "no parts"),
    ({"parts": []}, "no parts"),
    ({"parts": "x"}, "no parts"),
    ({"parts": [3]}, "not an object"),
    ({"parts": [{}]}, "neither"),
    ({"parts": [{"text": 3}]}, "text"),
    ({"parts": [{"url": "http://169.254.169.254/"}]}, "not by URL"),
    ({"parts": [{"raw": "!!", "filename": "a"}]}, "base64"),
    ({"parts": [{"raw": "", "filename": ".."}]}, "no name"),
    ({"parts": [{"raw": "", "filename": "a/"}]}, "no name"),
    ({"parts": [{"raw": ""}]}, "no name"),
    ({"parts": [{"data": []}]}, "not an object"),
    ({"parts": [{"data": {"code": 3}}]}, "not a text"),
    ({"parts": [{"data": {"code": "x", "language": {}}}]}, "language"),
    ({"parts": [{"text": "x"}] * 65}, "more than 64 parts"),
    ({"parts": [{"raw": "", "filename": "a"}] * 33}, "more than 32 files"),
    ({"parts": [{"data": {"code": "x" * (1 << 20) + "x"}}]}, "KiB of code"),
    ({"parts": [{"text": "x"}], "contextId": "a/b"}, "contextId"),
    ({"parts": [{"text": "x"}], "contextId": "a" * 129}, "contextId"),
    ({"parts": [{"text": "x"}], "taskId": 3}, "taskId"),
    ({"parts": [{"text": "x"}], "metadata": []}, "metadata"),
    *(
        ({"parts": [{"data": {"code": "x", "timeout": value}}]}, "timeout")
        for value in (0, -1, 61, True, "5", float("nan"), float("inf"), [1])
    ),
]


@pytest.mark.parametrize(("message", "words"), WRONG)
def test_wrong_message_is_told_what_is_wrong(message: dict[str, Any], words: str) -> None:
    with pytest.raises(Fault) as caught:
        NEW.ask({"message": message}, LONGEST)
    assert words in caught.value.message


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from("parts text data code language timeout raw url file kind".split()),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(anything, st.sampled_from(dialects.DIALECTS))
def test_no_message_breaks_the_reader(value: Any, dialect: dialects.Dialect) -> None:
    try:
        found = dialect.ask({"message": value, "configuration": value}, LONGEST)
    except Fault:
        return
    assert isinstance(found.wants, Job | MessageRefusal)


def test_many_fences_without_end_take_no_time() -> None:
    began = time.monotonic()
    message.fenced("```a\n" * 200_000)
    message.fenced("`" * 1_000_000)
    assert time.monotonic() - began < 5


def test_card_is_the_same_for_both_versions() -> None:

    found = json.loads(json.dumps(card.card("http://127.0.0.1:1/")))
    assert found["url"] == found["supportedInterfaces"][0]["url"]
    assert {i["protocolVersion"] for i in found["supportedInterfaces"]} == {"1.0", "0.3"}
