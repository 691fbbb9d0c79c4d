"""The description of REST in OpenAPI 3.1, made from its routes."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from k8e import _version
from k8e.rest import models
from k8e.rest.routes import ROUTES, Route

REFUSALS = {
    400: "the request is malformed; the problem says where",
    401: "no credential, a wrong one, or one that is not good for this",
    403: "the caller has not got the role",
    404: "no such sandbox or file, or it is somebody else's",
    409: "not in this state, or it is there already and different",
    413: "the body is too large",
    415: "the body is not JSON",
    421: "the sandbox is on another gateway, or the host is none of ours",
    429: "a limit was reached; Retry-After says when to try again",
    500: "a bug of k8e; its log has the request's id",
    502: "the sandbox does not answer as it must",
    503: "the gateway ends, or its database is away",
    504: "no answer in time",
}
PROBLEM = "application/problem+json"
ALWAYS = (400, 401, 403, 404, 409, 421, 429, 500, 502, 503, 504)


def document(host: str) -> str:
    """The description, which is the same for everybody."""
    return _made()


def describe() -> dict[str, Any]:
    """The description as a value."""
    bodies = {item for route in ROUTES for item in (route.body, route.query) if item is not None}
    answers = {route.answer for route in ROUTES if route.answer is not None} | {models.Problem}
    wanted: list[tuple[type[BaseModel], Any]] = [
        *((item, "validation") for item in sorted(bodies, key=lambda item: item.__name__)),
        *((item, "serialization") for item in sorted(answers, key=lambda item: item.__name__)),
    ]
    known, shared = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, known)
    schemas = shared["$defs"]
    _close(schemas)
    for item in bodies:  # a query is described parameter by parameter
        if any(route.query is item for route in ROUTES):
            schemas.pop(item.__name__, None)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "k8e",
            "version": _version.__version__,
            "description": "One sandbox per conversation. Errors are problems (RFC 9457).",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "an API key, or the token of a sandbox for that one alone",
                }
            },
        },
        "security": [{"bearer": []}],
    }


def _close(schema: Any) -> None:
    """Say that keys which fit no pattern are refused; pydantic does not."""
    if isinstance(schema, dict):
        known = cast("dict[str, Any]", schema)
        if "patternProperties" in known:
            known["additionalProperties"] = False
        for item in known.values():
            _close(item)
    elif isinstance(schema, list):
        for item in cast("list[Any]", schema):
            _close(item)


def _operation(route: Route, known: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*map(_path_parameter, route.names), *_query_parameters(route)],
        "responses": {
            **{str(status): _success(route, known) for status in route.status},
            **{str(status): _refusal(status) for status in _refusals(route)},
        },
        "x-k8e-operations": list(route.calls),
    }
    if route.body is not None:
        schema = known[route.body, "validation"]
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    elif route.raw_body:
        found["requestBody"] = {"required": True, "content": {route.raw_body: {"schema": {}}}}
    return found


def _path_parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "pattern": models.ID_PATTERN}
    if name == "port":
        schema = {"type": "integer", "minimum": 1, "maximum": 65535}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = route.query.model_json_schema()
    required = schema.get("required", ())
    return [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            "description": item.pop("description", ""),
            "schema": _without_null(item),
        }
        for name, item in schema["properties"].items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter is left out; it is never null."""
    some = [item for item in schema.get("anyOf", ()) if item.get("type") != "null"]
    return some[0] if len(some) == 1 else schema


def _success(route: Route, known: Any) -> dict[str, Any]:
    if route.answer is not None:
        content: dict[str, Any] = {
            "application/json": {"schema": known[route.answer, "serialization"]}
        }
    elif route.raw_answer:
        content = {route.raw_answer: {"schema": {}}}
    else:
        return {"description": route.summary}
    return {"description": route.summary, "content": content}


def _refusals(route: Route) -> list[int]:
    with_body = (413, 415) if route.body is not None else ()
    return sorted({*ALWAYS, *route.refusals, *with_body})


def _refusal(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": REFUSALS[status], "content": {PROBLEM: {"schema": schema}}}


def _made() -> str:
    if not _document:
        _document.append(json.dumps(describe(), ensure_ascii=False))
    return _document[0]


_document: list[str] = []
