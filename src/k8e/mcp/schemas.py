"""Short ways to write the JSON Schemas of tools. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Schema = dict[str, Any]


def text(meaning: str, **more: Any) -> Schema:
    return {"type": "string", "description": meaning, **more}


def number(meaning: str, **more: Any) -> Schema:
    return {"type": "integer", "description": meaning, **more}


def flag(meaning: str, **more: Any) -> Schema:
    return {"type": "boolean", "description": meaning, **more}


def texts(meaning: str, **more: Any) -> Schema:
    return {"type": "array", "items": {"type": "string"}, "description": meaning, **more}


def table(meaning: str, **more: Any) -> Schema:
    """An object whose values are texts."""
    return {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": meaning,
        **more,
    }


def takes(*required: str, **properties: Schema) -> Schema:
    """What a tool takes: nothing else is understood, so that a misspelt name is told."""
    found: Schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**found, "required": list(required)} if required else found


def gives(*optional: str, **properties: Schema) -> Schema:
    """What a tool answers; all of it always, but for what is named."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}
