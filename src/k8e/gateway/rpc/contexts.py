"""RPCs about contexts."""

from __future__ import annotations

from typing import Any, cast

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.operations import AGENT, NoRow
from k8e.gateway.rpc import egress
from k8e.gateway.rpc.errors import as_text
from k8e.gateway.rpc.method import RpcCaller, rpc
from k8e.gateway.rpc.runs import GuestCalls, limits, started, within_guest_time
from k8e.guest import wire
from k8e.guest.results import ShowRecords
from k8e.sessions.exchange import SessionCall, decode

DEFAULT_TIMEOUT = 30.0  # seconds
DEFAULT_GRACE = 5.0  # seconds
ANSWER_SECONDS = 15.0
OUTPUT_CAP = 1 << 20  # bytes of each stream
_STATUSES = ("completed", "timed_out", "killed")

StreamContext = grpc.aio.ServicerContext[pb.ExecuteCodeRequest, pb.ExecuteCodeResponse]


class ContextRpcs:
    """The RPCs about contexts. Answers of guests are checked, because guests are hostile."""

    def __init__(self, guests: GuestCalls) -> None:
        self._guests = guests

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def CreateContext(
        self, caller: RpcCaller, request: pb.CreateContextRequest
    ) -> pb.Context:
        session_id = await self._guests.resolve(caller.principal, request.session_id)
        call = {
            "op": "create_context",
            "id": request.context_id,
            "language": request.language or None,
            "cwd": request.cwd,
        }
        return _context(await self._guests.ask(caller.principal, session_id, call), session_id)

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def ListContexts(
        self, caller: RpcCaller, request: pb.ListContextsRequest
    ) -> pb.ListContextsResponse:
        told = await self._guests.ask(caller.principal, request.session_id, {"op": "list_contexts"})
        found = told.get("contexts")
        if not isinstance(found, list):
            raise errors.GuestFailed("the guest listed no contexts")
        listed = [_context(item, request.session_id) for item in cast("list[Any]", found)]
        return pb.ListContextsResponse(contexts=listed)

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def RemoveContext(
        self, caller: RpcCaller, request: pb.ContextRequest
    ) -> pb.RemoveContextResponse:
        call = {"op": "remove_context", "id": request.context_id}
        await self._guests.ask(caller.principal, request.session_id, call)
        return pb.RemoveContextResponse(ok=True)

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def RestartContext(self, caller: RpcCaller, request: pb.ContextRequest) -> pb.Context:
        call = {"op": "restart_context", "id": request.context_id}
        told = await self._guests.ask(caller.principal, request.session_id, call)
        return _context(told, request.session_id)

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def InterruptContext(
        self, caller: RpcCaller, request: pb.InterruptContextRequest
    ) -> pb.InterruptContextResponse:
        grace = request.grace or DEFAULT_GRACE
        call = {"op": "interrupt_context", "id": request.context_id, "grace": grace}
        told = await self._guests.ask(
            caller.principal, request.session_id, call, ANSWER_SECONDS + grace
        )
        return pb.InterruptContextResponse(
            interrupted=told.get("interrupted") is True, stopped=told.get("stopped") is True
        )

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def ExecuteCode(
        self, caller: RpcCaller, request: pb.ExecuteCodeRequest, context: StreamContext
    ) -> None:
        """Send output and results of code at once; written instead of yielded, as in ExecStream."""
        session_id = await self._guests.resolve(caller.principal, request.session_id)
        call = _execute_call(request)
        records = ShowRecords()
        async with self._guests.call(caller.principal, session_id, call) as running:
            async with within_guest_time():
                await started(running)
            while True:
                kind, body = await running.receive()
                if kind == wire.EXIT:
                    await context.write(pb.ExecuteCodeResponse(end=_end(decode(body))))
                    return
                await _pass_on(running, context, records, kind, body)


def _execute_call(request: pb.ExecuteCodeRequest) -> dict[str, Any]:
    return {
        "op": "exec",
        "context": request.context_id,
        "code": request.code,
        "timeout": request.timeout or DEFAULT_TIMEOUT,
        "env": dict(request.env),
        "limit": OUTPUT_CAP,
        "kill_on_disconnect": True,
        "make_context": request.make_context,
        **({"language": request.language} if request.language else {}),
        **({"cwd": request.cwd} if request.cwd else {}),
    }


async def _pass_on(
    running: SessionCall, context: StreamContext, records: ShowRecords, kind: int, body: bytes
) -> None:
    """One frame of output as messages."""
    if kind not in (wire.OUT, wire.ERR, wire.SHOW):
        return
    try:
        seq, data = wire.numbered(body)
        if kind == wire.OUT:
            await context.write(pb.ExecuteCodeResponse(stdout=data))
        elif kind == wire.ERR:
            await context.write(pb.ExecuteCodeResponse(stderr=data))
        else:
            for record in records.feed(seq, data):
                await context.write(pb.ExecuteCodeResponse(result=_result(record)))
    except wire.WireError as error:
        raise errors.GuestFailed(f"the context answered nonsense: {error}") from None
    running.consumed(len(data))


def _context(told: Any, session_id: str) -> pb.Context:
    try:
        return pb.Context(
            context_id=as_text(told["id"]),
            session_id=session_id,
            language=as_text(told["language"]),
            cwd=as_text(told["cwd"]),
            state=as_text(told["state"]),
            ended_because=as_text(told["ended_because"]),
            execution_count=told["execution_count"],
            waiting=told["waiting"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.GuestFailed(f"the guest described no context: {error}") from None


def _result(record: dict[str, Any]) -> pb.ExecutionResult:
    data = {
        as_text(kind): value if isinstance(value, bytes) else as_text(value).encode()
        for kind, value in record["data"].items()
    }
    left_out = [as_text(kind) for kind in record["left_out"]]
    return pb.ExecutionResult(data=data, is_main_result=record["main"], left_out=left_out)


def _end(told: dict[str, Any]) -> pb.ExecutionEnd:
    code, status = told.get("code"), told.get("status")
    if not isinstance(code, int) or not 0 <= code < 1 << 16:
        raise errors.GuestFailed("the guest reported no exit code")
    try:
        end = pb.ExecutionEnd(
            exit_code=code,
            status=status if status in _STATUSES else "failed",
            execution_count=told["execution_count"],
            context_state=as_text(told["context_state"]),
            duration_ms=told["duration_ms"],
            truncated=bool(told.get("truncated") or told.get("lost")),
            denials=egress.denials(told.get("denials")),
            limits=limits(told.get("limits")),
        )
        error = told.get("error")
        if error is not None:
            end.error.CopyFrom(
                pb.ExecutionError(
                    name=as_text(error["name"]),
                    value=as_text(error["value"]),
                    traceback=as_text(error["traceback"]),
                )
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.GuestFailed(f"the guest reported no end: {error}") from None
    return end
