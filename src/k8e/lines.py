"""Values as JSON in lines that people and audits read: bounded, and ASCII alone.

Much of what is written there comes from clients and guests, who are hostile.
"""

from __future__ import annotations

import json
import math
from json.encoder import encode_basestring_ascii
from typing import Any, cast

MAX_TEXT = 1 << 10  # bytes of one text
MAX_LINE = 32 << 10
MAX_ITEMS = 32  # of a list
MAX_DEPTH = 2  # of lists in lists
# ASCII alone: no text can end a line, or do something to a terminal.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def to_json(value: Any) -> str:
    """A value as JSON, which for what most events have is no more than this."""
    if type(value) is str and len(value) <= MAX_TEXT and value.isascii():
        return encode_basestring_ascii(value)
    if type(value) is bool:
        return "true" if value else "false"
    return str(value) if type(value) is int else _encode(_checked(value))


def _checked(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it; much of it comes from clients and guests."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT and value.isascii() else cut(value)
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
    """At most ``most`` bytes of a text, without halves of characters."""
    data = text[: most + 1].encode("utf-8", "replace")
    if len(data) <= most:
        return data.decode()
    return data[: most - 3].decode("utf-8", "ignore") + "…"


def long_text(text: str, most: int) -> str:
    """A text as JSON that may be longer than others."""
    return _encode(cut(text, most))
