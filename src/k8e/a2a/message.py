"""Messages of A2A: code, its language, a time-out and files; and errors by their numbers.

A message comes from another agent; every field of it may be anything.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from k8e.guest.spawn import ALIASES

PARSE = -32700
INVALID_REQUEST = -32600
NO_METHOD = -32601
INVALID_PARAMS = -32602
INTERNAL = -32603
TASK_NOT_FOUND = -32001
NOT_CANCELABLE = -32002
NO_PUSH = -32003
UNSUPPORTED = -32004
CONTENT_TYPE = -32005
NO_EXTENDED_CARD = -32007
VERSION = -32009
BUSY = -32000  # "server error" of JSON-RPC: A2A has no number for too much at once


class Fault(Exception):
    """A call that is answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def not_found(task_id: str) -> Fault:
    """No such task of this caller."""
    return Fault(TASK_NOT_FOUND, f"there is no task {task_id!r}")


MAX_CODE = 1 << 20
MAX_FILES = 32
MAX_NAME = 255
MAX_ID = 128
DEFAULT_TIMEOUT = 30.0
HELP = (
    'Send the code to run: a data part {"code": "print(1)", "language": "python"}, or a text part '
    "with one fenced block that names its language (```python … ```), or plain text with the "
    "language in the message's metadata. Languages: bash, python, node, ts. File parts are put "
    "into /workspace. I run code; I do not write it."
)
_FENCE = re.compile(r" {0,3}(`{3,})[ \t]*([\w+-]*)[^`]*")
_ID = re.compile(r"[\w.:-]+")


class Job(NamedTuple):
    """Code to run."""

    code: str
    language: str
    timeout: float
    files: tuple[tuple[str, bytes], ...] = ()
    template: str = ""
    """What the context's sandbox is made from; empty means the gateway's default."""


class MessageRefusal(NamedTuple):
    """A message that is well-formed, but asks for nothing that can be done."""

    text: str


class TaskMessage(NamedTuple):
    """A message."""

    wants: Job | MessageRefusal
    context_id: str
    task_id: str
    blocking: bool


class Piece(NamedTuple):
    """One part of a message, the same for every dialect."""

    text: str | None = None
    data: Any = None
    file: tuple[str, bytes] | None = None
    metadata: Mapping[str, Any] = {}


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Fault(INVALID_PARAMS, f"{what} is not an object")
    return cast("Mapping[str, Any]", value)


def text(value: Any, what: str, limit: int = MAX_ID) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > limit:
        raise Fault(INVALID_PARAMS, f"{what} is not a text of at most {limit} characters")
    return value


def name_of(value: Any, what: str) -> str:
    """An id that the caller chose."""
    found = text(value, what)
    if found and not _ID.fullmatch(found):
        raise Fault(INVALID_PARAMS, f"{what} has other characters than letters, digits and .:_-")
    return found


def file_of(name: Any, content: Any) -> tuple[str, bytes]:
    """A file from its base64; only the last part of its name counts, so it stays in /workspace."""
    last = text(name, "the name of a file", MAX_NAME).replace("\\", "/").rpartition("/")[2]
    if not last or last in (".", "..") or "\0" in last:
        raise Fault(INVALID_PARAMS, "a file part has no name that a file can have")
    try:
        return last, base64.b64decode(content, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise Fault(INVALID_PARAMS, f"the content of the file {last!r} is not base64") from None


def refuse_url() -> Fault:
    # Fetching a URL of the caller's would reach hosts that only this machine can reach.
    return Fault(CONTENT_TYPE, "files come with their content, not by URL")


def job(pieces: list[Piece], metadata: Mapping[str, Any], longest: float) -> Job | MessageRefusal:
    """The job that a message describes."""
    files = tuple(piece.file for piece in pieces if piece.file is not None)
    if len(files) > MAX_FILES:
        raise Fault(INVALID_PARAMS, f"more than {MAX_FILES} files")
    found = _code(pieces, metadata)
    if found is None:
        return MessageRefusal(HELP)
    code, language = found.code, found.language
    if len(code.encode("utf-8", "surrogatepass")) > MAX_CODE:
        raise Fault(INVALID_PARAMS, f"more than {MAX_CODE >> 10} KiB of code")
    if language.lower() not in ALIASES:
        return MessageRefusal(f"I cannot run {language!r}. {HELP}")
    timeout, template = _timeout(found.timeout, longest), name_of(found.template, "template")
    return Job(code, ALIASES[language.lower()], timeout, files, template)


class _Code(NamedTuple):
    """Code, and the message's settings for it: not checked yet."""

    code: str
    language: str
    timeout: Any
    template: Any


def _code(pieces: list[Piece], metadata: Mapping[str, Any]) -> _Code | None:
    """The code of a message; None if there is none, or more than one."""
    data = [mapping(piece.data, "the data of a part") for piece in pieces if piece.data is not None]
    coded = [item for item in data if "code" in item]
    if coded:
        return _from_data(coded, metadata)
    told = [piece for piece in pieces if piece.text is not None]
    hints = [metadata, *(piece.metadata for piece in told)]
    language = next((hint["language"] for hint in hints if hint.get("language")), "")
    timeout = next((hint["timeout"] for hint in hints if hint.get("timeout") is not None), None)
    template = next((hint["template"] for hint in hints if hint.get("template")), "")
    whole = "\n".join(piece.text or "" for piece in told)
    fences = fenced(whole)
    if len(fences) == 1:
        spoken = fences[0][0] or _language(language) or "bash"
        return _Code(fences[0][1], spoken, timeout, template)
    if fences or not language or not whole.strip():
        return None
    return _Code(whole, _language(language), timeout, template)


def fenced(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a Markdown text: language and content. Each line is read once."""
    found: list[tuple[str, str]] = []
    mark, language, lines = "", "", [""]
    for line in text.splitlines(keepends=True):
        if mark:
            if line.strip() == mark and len(line) - len(line.lstrip(" ")) < 4:
                found.append((language, "".join(lines)))
                mark = ""
            else:
                lines.append(line)
        elif fence := _FENCE.fullmatch(line.rstrip("\r\n")):
            mark, language, lines = fence[1], fence[2], []
    return found


def _from_data(coded: list[Mapping[str, Any]], metadata: Mapping[str, Any]) -> _Code | None:
    if len(coded) > 1:
        return None
    item = coded[0]
    code = item["code"]
    if not isinstance(code, str):
        raise Fault(INVALID_PARAMS, "code is not a text")
    language = _language(item.get("language", metadata.get("language"))) or "bash"
    timeout = item.get("timeout", metadata.get("timeout"))
    return _Code(code, language, timeout, item.get("template", metadata.get("template")))


def _language(value: Any) -> str:
    return text(value, "language", 32)


def _timeout(value: Any, longest: float) -> float:
    if value is None:
        return min(DEFAULT_TIMEOUT, longest)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not math.isfinite(value) or not 0 < value <= longest:
        raise Fault(
            INVALID_PARAMS, f"timeout is not a number of seconds above 0 and up to {longest:g}"
        )
    return float(value)
