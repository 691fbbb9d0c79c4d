"""The description of REST as a page for people: no script, nothing from elsewhere."""

from __future__ import annotations

import functools
import html
import json
from typing import Any, cast

from k8e.rest import openapi

CONTENT_TYPE = "text/html; charset=utf-8"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.4 ui-monospace, monospace }
pre { background: #8881; padding: .6rem; overflow-x: auto }
details { border: 1px solid #8884; border-radius: 6px; margin: .4rem 0; padding: .3rem .7rem }
summary { cursor: pointer }
summary b { display: inline-block; min-width: 4.5rem }
table { border-collapse: collapse } td, th { text-align: left; padding: .15rem .8rem .15rem 0 }
:root { color-scheme: light dark }
"""


def document(host: str) -> str:
    """The page, which is the same for everybody."""
    return _made()


@functools.cache  # anybody may ask for it, however often
def _made() -> str:
    described = openapi.describe()
    routes = [
        _route(method, path, item)
        for path, methods in described["paths"].items()
        for method, item in methods.items()
    ]
    schemas = [
        _schema(name, item) for name, item in sorted(described["components"]["schemas"].items())
    ]
    info = described["info"]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>k8e REST</title><style>{_STYLE}</style>"
        f"<h1>k8e REST {_text(info['version'])}</h1><p>{_text(info['description'])} "
        'The same for programs: <a href="/openapi.json">openapi.json</a>.'
        "<p>Send <code>Authorization: Bearer KEY</code>, with an API key, or with the token of a "
        f"sandbox for that one alone.<h2>Routes</h2>{''.join(routes)}"
        f"<h2>Values</h2>{''.join(schemas)}</html>"
    )


def _route(method: str, path: str, item: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{_text(one['name'])}</code><td>{_text(one['in'])}"
        f"<td>{'required' if one['required'] else ''}<td>{_text(one.get('description', ''))}"
        for one in item["parameters"]
    ]
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    body = item.get("requestBody", {}).get("content", {})
    takes = "".join(f"<p>Takes {_content(kind, one)}" for kind, one in body.items())
    answers = [
        f"<tr><td>{status}<td>{_text(one['description'])}"
        f"<td>{''.join(_content(kind, part) for kind, part in one.get('content', {}).items())}"
        for status, one in item["responses"].items()
    ]
    return (
        f"<details id={_text(item['operationId'])}><summary><b>{method.upper()}</b> "
        f"<code>{_text(path)}</code> — {_text(item['summary'])}</summary>"
        f"{table}{takes}<table>{''.join(answers)}</table></details>"
    )


def _content(kind: str, item: dict[str, Any]) -> str:
    name = str(item["schema"].get("$ref", "")).rpartition("/")[2]
    link = f' <a href="#{_text(name)}">{_text(name)}</a>' if name else ""
    return f"<code>{_text(kind)}</code>{link}"


def _schema(name: str, item: dict[str, Any]) -> str:
    rows: list[str] = []
    required = cast("list[str]", item.get("required", []))
    for field, one in item.get("properties", {}).items():
        told = one.get("description", "")
        kind = {key: value for key, value in one.items() if key not in ("description", "title")}
        rows.append(
            f"<tr><td><code>{_text(field)}</code><td>{'required' if field in required else ''}"
            f"<td>{_text(told)}<td><code>{_text(json.dumps(kind))}</code>"
        )
    text = _text(str(item.get("description", "")))
    return (
        f"<details id={_text(name)} open><summary><code>{_text(name)}</code> — {text}</summary>"
        f"<table>{''.join(rows)}</table></details>"
    )


def _text(value: str) -> str:
    return html.escape(str(value), quote=True)
