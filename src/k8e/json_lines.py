"""Values as JSON lines for people and audits: bounded, and ASCII alone.

Much of what is written there comes from clients and guests, who are hostile.
"""

from __future__ import annotations

import bisect
import json
import math
from json.encoder import encode_basestring_ascii
from typing import Any, cast

MAX_TEXT = 1 << 10  # bytes of one text
ESCAPES = 3  # times as long a text may be as JSON: all of UTF-8 is, but for control characters
MAX_LINE = 32 << 10
MAX_ITEMS = 32  # of a list
MAX_DEPTH = 2  # of lists in lists
# ASCII alone: no text can end a line, or do something to a terminal.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def to_json(value: Any) -> str:
    """A value as JSON; for most events this function is all that runs."""
    if type(value) is str and len(value) <= MAX_TEXT and value.isascii():
        encoded = encode_basestring_ascii(value)
        return encoded if len(encoded) <= ESCAPES * MAX_TEXT else _encode(cut(value))
    if type(value) is bool:
        return "true" if value else "false"
    return str(value) if type(value) is int else _encode(_checked(value))


def _checked(value: Any, depth: int = 0) -> Any:
    """A value in a form that JSON can hold; many come from clients and guests."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (dict, list, tuple)) and depth == MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        pairs = list(cast("dict[Any, Any]", value).items())[:MAX_ITEMS]
        return {cut(str(key)): _checked(item, depth + 1) for key, item in pairs}
    if isinstance(value, (list, tuple)):
        return [_checked(item, depth + 1) for item in cast("list[Any]", value)[:MAX_ITEMS]]
    return cut(str(value))


def cut(text: str, most: int = MAX_TEXT) -> str:
    """At most ``most`` bytes of a text, and not many more as JSON; no halves of characters."""
    data = text[: most + 1].encode("utf-8", "replace")
    long = len(data) > most
    text = (data[: most - 3] if long else data).decode("utf-8", "ignore")
    if _length(text) > ESCAPES * most:
        long, text = True, _fitting(text, ESCAPES * most - _length("…"))
    return text + "…" if long else text


def _fitting(text: str, most: int) -> str:
    """The longest beginning of a text that has ``most`` bytes as JSON."""
    sizes = range(len(text))
    return text[: bisect.bisect_right(sizes, most, key=lambda size: _length(text[:size])) - 1]


def _length(text: str) -> int:
    """The number of bytes of a text as JSON."""
    return len(encode_basestring_ascii(text)) - 2


def long_text(text: str, most: int) -> str:
    """A text as JSON that may be longer than others."""
    return _encode(cut(text, most))
