"""The routes of the Kubernetes API that agent-sandbox's clients use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from k8e import errors
from k8e._version import __version__
from k8e.agent_sandbox import claims, objects, status
from k8e.agent_sandbox.bodies import TooLarge, whole
from k8e.agent_sandbox.claims import Claims, Event
from k8e.agent_sandbox.objects import CLAIM_GROUP, SANDBOX_GROUP, VERSION, Object
from k8e.json_size import is_too_large

MAX_BODY = 64 << 10
DEFAULT_WATCH_SECONDS, MAX_WATCH_SECONDS = 1800.0, 3600.0
KINDS = {
    (CLAIM_GROUP, "sandboxclaims"): "SandboxClaim",
    (SANDBOX_GROUP, "sandboxes"): "Sandbox",
}
VERBS = {
    "sandboxclaims": ["create", "delete", "get", "list", "watch"],
    "sandboxes": ["get", "list", "patch"],
}
TRUE = ("true", "1", "t")


class KubernetesApi:
    """Answers requests below ``/apis`` and the like, for one caller."""

    def __init__(self, held: Claims) -> None:
        self._claims = held

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(path, scope, receive, send)
        except status.ApiError as error:
            await _refuse(error, scope, receive, send)
        except errors.K8eError as error:
            await _refuse(status.of_error(error), scope, receive, send)
        except TooLarge as error:
            await _refuse(status.ApiError(413, str(error)), scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        parts = [part for part in path.split("/") if part]
        if (about := _discovery(parts)) is not None:
            await JSONResponse(about)(scope, receive, send)
            return
        if parts[:1] != ["apis"] or len(parts) < 4 or parts[2] != VERSION:
            raise status.ApiError(404, f"there is nothing at {path[:200]}")
        group, rest = parts[1], parts[3:]
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 1:
            namespace, rest = objects.check_namespace(rest[1]), rest[2:]
        if not 1 <= len(rest) <= 2 or (group, rest[0]) not in KINDS:
            raise status.ApiError(404, f"there is nothing at {path[:200]}")
        asked = {key: values[-1] for key, values in parse_qs(_query(scope)).items()}
        method = scope["method"]
        if len(rest) == 1 and method == "GET":
            await self._list(rest[0], namespace, asked, scope, receive, send)
            return
        if not namespace:
            raise status.ApiError(405, "this needs a namespace")
        body: Any = await _body(receive) if method in ("POST", "PATCH", "DELETE") else {}
        found = await self._single(method, rest, namespace, body)
        code = 201 if method == "POST" else 200
        await JSONResponse(found, code)(scope, receive, send)

    async def _single(self, method: str, rest: list[str], namespace: str, body: Any) -> Object:
        """A request about one object."""
        match method, rest:
            case "POST", ["sandboxclaims"]:
                return await self._claims.create(namespace, objects.parse_claim(body))
            case "GET", ["sandboxclaims", name]:
                return (await self._claims.get((namespace, name))).to_json()
            case "DELETE", ["sandboxclaims", name]:
                uid = _field(_field(body, "preconditions"), "uid")
                await self._claims.delete((namespace, name), uid if isinstance(uid, str) else "")
                return status.success()
            case "GET", ["sandboxes", name]:
                return await self._claims.sandbox(namespace, name)
            case "PATCH", ["sandboxes", name]:
                return await self._claims.set_mode(namespace, name, _mode(body))
            case _:
                raise status.ApiError(405, f"{method} is not served for {rest[0]} here")

    async def _list(
        self,
        plural: str,
        namespace: str,
        asked: dict[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        name = _named(asked.get("fieldSelector", ""))
        labels = asked.get("labelSelector", "")
        if asked.get("watch", "").lower() in TRUE:
            if plural != "sandboxclaims":
                raise status.ApiError(405, "watch is not served for sandboxes here; watch claims")
            await self._watch(namespace, name, labels, asked, scope, receive, send)
            return
        if plural == "sandboxclaims":
            group = CLAIM_GROUP
            found = [claim.to_json() for claim in await self._claims.list(namespace)]
        else:
            group = SANDBOX_GROUP
            found = await self._claims.sandboxes(namespace)
        chosen = [item for item in found if _is_chosen(item, name, labels)]
        kind = f"{KINDS[group, plural]}List"
        listed = claims.summary(chosen, kind, group, self._claims.version)
        await JSONResponse(listed)(scope, receive, send)

    async def _watch(
        self,
        namespace: str,
        name: str,
        labels: str,
        asked: dict[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        objects.selects(labels, {})  # a malformed one is refused before the stream begins
        since = _number(asked, "resourceVersion") or None
        seconds = min(_number(asked, "timeoutSeconds") or DEFAULT_WATCH_SECONDS, MAX_WATCH_SECONDS)
        events = self._claims.watch(namespace, since, seconds)
        async with aclosing(events):
            first = await anext(events, None)  # what is refused is refused with a status
            head = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            sending = asyncio.create_task(_send_events(first, events, name, labels, send))
            leaving = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    await sending
            finally:
                sending.cancel()
                leaving.cancel()
                await asyncio.wait({sending, leaving})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_events(
    first: Event | None,
    events: AsyncGenerator[Event | None],
    name: str,
    labels: str,
    send: Send,
) -> None:
    event = first
    # Even before the first event: clients wait for the answer's head.
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    while True:
        if event is not None and _is_chosen(event.object, name, labels):
            line = json.dumps({"type": event.type, "object": event.object}).encode() + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        try:
            event = await anext(events)
        except StopAsyncIteration:
            return


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(error: status.ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"retry-after": "1"} if error.code in (429, 503) else {}
    answer: Response = JSONResponse(error.to_json(), error.code, headers)
    await answer(scope, receive, send)


async def _body(receive: Receive) -> Any:
    """The JSON of a request, whatever type it says it has: upstream's client says none."""
    data = await whole(receive, MAX_BODY)
    if is_too_large(data):
        raise status.ApiError(413, "the object has too many values")
    try:
        return json.loads(data) if data else {}
    except (ValueError, RecursionError):
        raise status.ApiError(400, "the body is not JSON") from None


def _query(scope: Scope) -> str:
    return cast("bytes", scope["query_string"]).decode("latin-1")


def _number(asked: dict[str, str], key: str) -> int:
    text = asked.get(key, "")
    if len(text) > 18 or not ((text.isascii() and text.isdigit()) or not text):
        raise status.ApiError(400, f"{key} is not a number")
    return int(text or 0)


def _named(selector: str) -> str:
    """The name that a field selector asks for; empty if there is no selector."""
    key, sign, name = selector.replace("==", "=").partition("=")
    if selector and (key != "metadata.name" or not sign or "," in name):
        raise status.ApiError(400, f"the field selector {selector[:80]!r} is not served here")
    return name


def _is_chosen(item: Object, name: str, labels: str) -> bool:
    metadata = item["metadata"]
    return (not name or metadata["name"] == name) and objects.selects(labels, metadata["labels"])


def _field(value: Any, key: str) -> Any:
    """A field of what a client sent; None if it has none."""
    return cast("Object", value).get(key) if isinstance(value, dict) else None


def _mode(body: Any) -> str:
    mode = _field(_field(body, "spec"), "operatingMode")
    if mode not in ("Running", "Suspended"):
        raise status.invalid("only spec.operatingMode can be changed, to Running or Suspended")
    return mode


def _discovery(parts: list[str]) -> Object | None:
    """What ``kubectl`` asks for first."""
    match parts:
        case ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": f"v1.36.0+k8e-{__version__}"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": []}
        case ["apis"]:
            groups = [_group(group) for group in (CLAIM_GROUP, SANDBOX_GROUP)]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["apis", group, version] if version == VERSION:
            listed = [_resource(plural, kind) for (g, plural), kind in KINDS.items() if g == group]
            found = {"kind": "APIResourceList", "apiVersion": "v1", "resources": listed}
            return {**found, "groupVersion": f"{group}/{VERSION}"} if listed else None
        case _:
            return None


def _group(group: str) -> Object:
    version = {"groupVersion": f"{group}/{VERSION}", "version": VERSION}
    return {"name": group, "versions": [version], "preferredVersion": version}


def _resource(plural: str, kind: str) -> Object:
    return {
        "name": plural,
        "singularName": kind.lower(),
        "namespaced": True,
        "kind": kind,
        "verbs": VERBS[plural],
    }
