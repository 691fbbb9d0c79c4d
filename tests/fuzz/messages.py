"""gRPC messages made of their own descriptions, so that a new call or field is tried by itself."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor, message
from hypothesis import strategies as st

from k8e._generated import sandbox_pb2 as pb

Field = descriptor.FieldDescriptor
SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
METHODS = {method.name: method for method in SERVICE.methods}
TEXTS = st.sampled_from(
    ["", "x", "../x", "/", "\0", "é" * 30, "a" * 5000, "none", "*.example", "python", "default"]
) | st.text(st.characters(codec="utf-8"), max_size=12)
_SPANS = {
    Field.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    Field.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    Field.TYPE_UINT32: (0, (1 << 32) - 1),
    Field.TYPE_UINT64: (0, (1 << 64) - 1),
}


def of_field(field: Any, texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """One value of a field."""
    match field.type:
        case Field.TYPE_STRING:
            return texts
        case Field.TYPE_BYTES:
            return st.binary(max_size=30)
        case Field.TYPE_BOOL:
            return st.booleans()
        case Field.TYPE_DOUBLE | Field.TYPE_FLOAT:
            return st.floats(width=32)
        case Field.TYPE_ENUM:
            return st.integers(-1, 9)
        case Field.TYPE_MESSAGE:
            return of_message(field.message_type, texts)
        case kind:
            low, high = _SPANS[kind]
            return st.sampled_from([0, 1, low, high]) | st.integers(low, high)


@st.composite
def of_message(draw: st.DrawFn, kind: Any, texts: st.SearchStrategy[str]) -> dict[str, Any]:
    """Some of the fields of a message."""
    made: dict[str, Any] = {}
    for field in kind.fields:
        if not draw(st.booleans()):
            continue
        one = of_field(field, texts)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = of_field(field.message_type.fields_by_name["value"], texts)
            made[field.name] = draw(st.dictionaries(texts, values, max_size=3))
        elif field.is_repeated:
            made[field.name] = draw(st.lists(one, max_size=3))
        elif field.name in ("session_id", "parent_session_id", "terminal_id", "run_id"):
            made[field.name] = draw(texts)
        else:
            made[field.name] = draw(one)
    return made


def build(name: str, fields: dict[str, Any]) -> message.Message:
    """The message ``name`` with these fields."""
    return getattr(pb, name)(**fields)
