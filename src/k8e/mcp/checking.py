"""Arguments of a tool against its schema, with messages that a model can act on. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, cast

from k8e import errors
from k8e.mcp import catalog

MAX_COMPARED = 80  # characters; to compare megabytes would hold everybody up
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def tool(name: str) -> dict[str, Any]:
    """The tool of this name."""
    found = catalog.TOOLS.get(name)
    if found is None:
        near = _near(name, catalog.TOOLS)
        advice = f"did you mean {near[0]}?" if near else "tools/list tells which there are"
        raise errors.InvalidRequest(f"there is no tool {name[:80]!r}", hint=advice)
    return found


def arguments(name: str, given: dict[str, Any] | None) -> dict[str, Any]:
    """What a tool was given, with its defaults.

    Nothing is also a null and, as in K8E, an empty text that need not be there and no time at all.
    """
    schema = tool(name)["inputSchema"]
    properties: dict[str, dict[str, Any]] = schema["properties"]
    needed: list[str] = schema.get("required", [])
    found = {
        key: value
        for key, value in (given or {}).items()
        if value is not None and (key not in properties or key in needed or not _empty(key, value))
    }
    for key in found:
        if key not in properties:
            raise _unknown(name, key, properties)
    missing = [key for key in needed if key not in found]
    if missing:
        raise errors.InvalidRequest(
            f"{name} needs the argument {missing[0]!r}",
            hint=f"{missing[0]}: {properties[missing[0]]['description']}",
        )
    checked = {
        key: _value(f"{name}: {key}", value, properties[key]) for key, value in found.items()
    }
    defaults = {key: one["default"] for key, one in properties.items() if "default" in one}
    return {**defaults, **checked}


def _empty(key: str, value: Any) -> bool:
    return value == "" or (key == "timeout" and type(value) in (int, float) and not value)


def _near(name: str, known: Iterable[str]) -> list[str]:
    """What may be meant; of a name that is long only its beginning is compared."""
    return difflib.get_close_matches(name[:MAX_COMPARED], known, 1, 0.5)


def _unknown(name: str, key: str, properties: dict[str, Any]) -> errors.InvalidRequest:
    near = _near(key, properties)
    known = ", ".join(properties) or "none"
    advice = f"did you mean {near[0]!r}? " if near else ""
    return errors.InvalidRequest(
        f"{name} has no argument {key[:80]!r}", hint=f"{advice}its arguments: {known}"
    )


def _value(where: str, value: Any, schema: dict[str, Any]) -> Any:
    kind, value = schema["type"], _whole(value) if schema["type"] == "integer" else value
    if not isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, bool)):
        raise errors.InvalidRequest(
            f"{where} is {_shown(value)}, not of type {kind}", hint=schema["description"]
        )
    if kind == "string":
        _text(where, value, schema)
    elif kind == "integer":
        _within(where, value, schema)
    elif kind == "array":
        _items(where, value, schema)
    elif kind == "object":
        for key, item in cast("dict[str, Any]", value).items():
            _value(f"{where}.{key}", item, {"description": "", **schema["additionalProperties"]})
    return value


def _whole(value: Any) -> Any:
    """JSON knows only numbers, and some clients write 30.0 for 30."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(where: str, value: str, schema: dict[str, Any]) -> None:
    if "enum" in schema and value not in schema["enum"]:
        choices = " or ".join(map(repr, schema["enum"]))
        raise errors.InvalidRequest(f"{where} is {_shown(value)}", hint=f"it can be {choices}")


def _within(where: str, value: int, schema: dict[str, Any]) -> None:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    if not low <= value <= high:
        bounds = [f"at least {low}"] if "minimum" in schema else []
        bounds += [f"at most {high}"] if "maximum" in schema else []
        raise errors.InvalidRequest(f"{where} is {value}", hint=f"it must be {', '.join(bounds)}")


def _items(where: str, value: list[Any], schema: dict[str, Any]) -> None:
    if len(value) < schema.get("minItems", 0):
        raise errors.InvalidRequest(f"{where} is empty", hint=schema["description"])
    for item in value:
        _value(where, item, {"description": schema["description"], **schema["items"]})


def _shown(value: Any) -> str:
    # A long text is cut before it is quoted.
    text = repr(value[:MAX_COMPARED] if isinstance(value, str) else value)
    return text if len(text) <= MAX_COMPARED else f"{text[:MAX_COMPARED]}…"
