"""Results of contexts as a Jupyter notebook shows them.

Results from a sandbox are hostile, and a notebook's page can do whatever its user can. So HTML goes
into a frame that runs no scripts and loads nothing, SVG into a picture, and media types that a
notebook would run, load from or make links of (JavaScript, Markdown, LaTeX) are left out.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:"
FRAME_HEIGHT = 300  # pixels


def bundle(data: Mapping[str, str | bytes]) -> dict[str, Any]:
    """The content of one result that is displayed, by media type."""
    shown: dict[str, Any] = {}
    if "text/plain" in data:
        shown["text/plain"] = _text(data["text/plain"])
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            shown[kind] = _encoded(data[kind])
    if "application/json" in data:
        with contextlib.suppress(ValueError, RecursionError):
            shown["application/json"] = json.loads(data["application/json"])
    if "text/html" in data:
        shown["text/html"] = _frame(_text(data["text/html"]))
    elif "image/svg+xml" in data:
        shown["text/html"] = _picture("image/svg+xml", data["image/svg+xml"])
    return shown


def joined(printed: str, bundles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The bundle of a whole run: a notebook takes one bundle for a value."""
    texts = [printed.removesuffix("\n")] if printed else []
    texts += [one["text/plain"] for one in bundles if "text/plain" in one]
    shown: dict[str, Any] = {"text/plain": "\n".join(texts)}
    parts = [_page_part(one) for one in bundles]
    if any(part and not part.startswith("<pre>") for part in parts):
        head = [f"<pre>{html.escape(printed)}</pre>"] if printed else []
        shown["text/html"] = "\n".join([*head, *parts])
    return shown


def _page_part(one: Mapping[str, Any]) -> str:
    """A result as HTML that is safe in a notebook's page."""
    for kind in ("image/png", "image/jpeg"):
        if kind in one:
            return f'<img src="data:{kind};base64,{one[kind]}">'
    if "text/html" in one:
        return str(one["text/html"])
    return f"<pre>{html.escape(one.get('text/plain', ''))}</pre>"


def _frame(page: str) -> str:
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    inside = html.escape(policy + page, quote=True)
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
    return f'<iframe sandbox="" style="{style}" srcdoc="{inside}"></iframe>'


def _picture(kind: str, data: str | bytes) -> str:
    """A picture's own scripts do not run."""
    return f'<img src="data:{kind};base64,{_encoded(data)}">'


def _text(data: str | bytes) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else data


def _encoded(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode("ascii")
