"""The official SDK's server with our tools and resources, for every transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.lowlevel.server import NotificationOptions
from mcp.server.models import InitializationOptions
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from k8e import _version, errors
from k8e.mcp import catalog, resources, tools
from k8e.mcp.calls import InputNeeded, PersonAnswer, PersonQuestion, clean
from k8e.mcp.client import ToolClient
from k8e.mcp.connection import ClientDesks, ConnectionSessions

T = TypeVar("T")
ANSWER = "approval"
"""The key of our one question in a result that asks for input."""
CLOSE_SECONDS = 15.0
MAX_TOKEN = 1000  # characters of a progress token
LISTED_MS = 3600_000  # how long a client may keep the list of tools
NOT_FOUND = -32002  # the protocol's own, of resources
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "approve": {
            "type": "boolean",
            "title": "Allow it",
            "description": "whether the agent may do this, once",
            "default": False,
        },
        "reason": {"type": "string", "title": "Why", "description": "told to the agent"},
    },
    "required": ["approve"],
}


@dataclass(kw_only=True)
class World:
    """Everything that a server works with: a gateway's client, the sessions of all connections."""

    client: ToolClient
    allowed_hosts: tuple[str, ...] = ()
    desks: dict[str, ConnectionSessions] = field(default_factory=dict[str, ConnectionSessions])
    """By the name that the transport has for a connection; empty for the only one of stdio."""

    def __post_init__(self) -> None:
        self._clients = ClientDesks(self.client)

    @contextlib.contextmanager
    def desk(self, key: str | None, client_name: str) -> Generator[ConnectionSessions]:
        """The sessions of a connection, or of a client without one, while a request is served."""
        if key is not None:
            yield self.desks.setdefault(key, ConnectionSessions(self.client))
            return
        with self._clients.use(client_name) as desk:
            yield desk

    async def leave(self, key: str) -> None:
        """End a connection, and destroy what it made."""
        desk = self.desks.pop(key, None)
        if desk is not None:
            await desk.close()

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                left = [*self.desks.values(), self._clients]
                self.desks.clear()
                await asyncio.gather(*(desk.close() for desk in left))
        await self.client.close()


Context = ServerRequestContext[World, Any]
KeyOf = Callable[[Context], str | None]


class _Teller:
    """Progress of one request."""

    def __init__(self, ctx: Context) -> None:
        self._session = ctx.session
        token = (ctx.meta or {}).get("progress_token")
        # Each message repeats the token; one of megabytes would be sent ten times a second.
        self.heard = token is not None and len(str(token)) <= MAX_TOKEN

    async def tell(self, progress: float, message: str, total: float | None = None) -> None:
        await self._session.report_progress(progress, total, message)


class _Asker:
    """The person at the client, asked in the way of the protocol's version."""

    def __init__(self, ctx: Context, params: types.CallToolRequestParams) -> None:
        self._ctx = ctx
        self._again = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
        self.answered = _answered(params)

    @property
    def available(self) -> bool:
        session = self._ctx.session
        capabilities = session.client_capabilities
        asks = capabilities is not None and _has_forms(capabilities.elicitation)
        return asks and (self._again or session.can_send_request)

    async def ask(self, question: PersonQuestion) -> PersonAnswer:
        if self._again:
            raise InputNeeded(question)
        session, request_id = self._ctx.session, self._ctx.request_id
        try:
            found = await session.elicit_form(clean(question.message), FORM, request_id)
        except MCPError:
            return PersonAnswer("cancel")  # a client that cannot ask after all
        return _answer(found, question.state)


def _has_forms(found: types.ElicitationCapability | None) -> bool:
    """Whether the client can show a form; an empty capability means that it can."""
    return found is not None and (found.form is not None or found.url is None)


def _answered(params: types.CallToolRequestParams) -> PersonAnswer | None:
    found = (params.input_responses or {}).get(ANSWER)
    return _answer(found, params.request_state or "") if found is not None else None


def _answer(found: Any, state: str) -> PersonAnswer:
    """The person's answer in a client's message; anything unexpected does not count as a yes."""
    if not isinstance(found, types.ElicitResult):
        return PersonAnswer("cancel", state=state)
    content = found.content or {}
    reason = content.get("reason")
    return PersonAnswer(
        found.action,
        approve=content.get("approve") is True,
        reason=reason if isinstance(reason, str) else "",
        state=state,
    )


def build(world: World, key_of: KeyOf) -> Server[World]:
    """A server; ``key_of`` returns the connection that a request belongs to."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Server[World]) -> AsyncGenerator[World]:
        yield world

    async def list_tools(ctx: Context, params: Any) -> Any:
        return _complete(ctx, {"tools": catalog.listed()}, ("public", LISTED_MS))

    async def call_tool(ctx: Context, params: types.CallToolRequestParams) -> Any:
        try:
            with world.desk(key_of(ctx), _client_name(ctx)) as desk:
                done = await _apart(
                    tools.call(
                        params.name,
                        params.arguments,
                        desk=desk,
                        teller=_Teller(ctx),
                        asker=_Asker(ctx, params),
                        allowed_hosts=world.allowed_hosts,
                    )
                )
            return _complete(ctx, done)
        except InputNeeded as needed:
            return _input_required(needed.question)

    async def list_resources(ctx: Context, params: types.PaginatedRequestParams | None) -> Any:
        cursor = (params.cursor or "") if params else ""
        with world.desk(key_of(ctx), _client_name(ctx)) as desk:
            found = await _or_error(resources.listing(desk, cursor))
        return _complete(ctx, found, ("private", 0))

    async def list_templates(ctx: Context, params: Any) -> Any:
        return _complete(ctx, {"resourceTemplates": resources.TEMPLATES}, ("public", LISTED_MS))

    async def read_resource(ctx: Context, params: types.ReadResourceRequestParams) -> Any:
        with world.desk(key_of(ctx), _client_name(ctx)) as desk:
            found = await _or_error(resources.read(desk, str(params.uri)))
        return _complete(ctx, found, ("private", 0))

    return Server(
        catalog.NAME,
        version=_version.__version__,
        title=catalog.TITLE,
        instructions=catalog.INSTRUCTIONS,
        lifespan=lifespan,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )


def options(server: Server[World]) -> InitializationOptions:
    return server.create_initialization_options(NotificationOptions())


def _complete(
    ctx: Context, fields: dict[str, Any], cache: tuple[str, int] | None = None
) -> dict[str, Any]:
    """A result for the protocol's version: newer ones require more fields."""
    fields = clean(fields)
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return fields
    kept = {"cacheScope": cache[0], "ttlMs": cache[1]} if cache else {}
    return {**fields, **kept, "resultType": "complete"}


def _input_required(question: PersonQuestion) -> types.InputRequiredResult:
    message = clean(question.message)
    form = types.ElicitRequestFormParams(message=message, requested_schema=FORM)
    return types.InputRequiredResult(
        input_requests={ANSWER: types.ElicitRequest(params=form)}, request_state=question.state
    )


async def _apart(work: Awaitable[T]) -> T:
    """Work in a task of its own.

    A cancel scope of AnyIO cancels every await until it is left, and a program could not be killed
    in there. A task is cancelled once, and we wait until it has cleaned up.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
        raise


async def _or_error(work: Awaitable[T]) -> T:
    """Resources answer with errors of the protocol, tools with results."""
    try:
        return await _apart(work)
    except (errors.K8eError, OSError) as error:
        missing = isinstance(error, (errors.SessionNotFound, FileNotFoundError))
        code = NOT_FOUND if missing else types.INVALID_PARAMS
        raise MCPError(code=code, message=tools.describe(error)) from None


def _client_name(ctx: Context) -> str:
    """The client's name for itself; empty if it does not say."""
    params = ctx.session.client_params
    return params.client_info.name if params is not None else ""


def with_session(ctx: Context) -> str | None:
    """The connection of a request over HTTP, from its header, if it names one."""
    request: Any = cast("Any", ctx.request)
    if request is None or ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return None
    return request.headers.get("mcp-session-id") or None  # an empty one names no connection
