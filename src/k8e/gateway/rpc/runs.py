"""Runs over gRPC: the ``Run`` stream, and K8E's calls about background runs.

A run's id is ``<session>.<exec>``: the session has an owner, and its guest keeps the output.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.frames import MAX_UNREAD, ClientConnection
from k8e.gateway.operations import AGENT, ANY, Limit, NoRow
from k8e.gateway.rpc.errors import as_text
from k8e.gateway.rpc.method import RpcCaller, rpc
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.model import Principal
from k8e.sessions.exchange import FrameQueue, GuestOSError, SessionCall, decode

ANSWER_SECONDS = 15.0  # that a guest may take to answer from memory
NO_TENANT = "default"
TRANSCRIPT = 64 << 10  # bytes of a transcript, if the caller names no limit
MAX_TRANSCRIPT = 1 << 20
MAX_SEQ = 1 << 62  # bytes that a program can have printed; larger numbers fit into no message
RunContext = grpc.aio.ServicerContext[pb.RunFrame, pb.RunFrame]
_STATUSES = ("running", "completed", "timed_out", "killed")


class GatheredOutput:
    """Output that came in pieces, in any number: a hostile guest may send one byte at a time."""

    def __init__(self, start: int) -> None:
        self.start = start
        """The number of the first byte, once there is one."""
        self.end = start
        self.lost = False
        """Whether there are gaps between the pieces."""
        self.whole = bytearray()
        """Both streams up to the first gap, so that offsets count the bytes that a client gets."""
        self._streams = {wire.OUT: bytearray(), wire.ERR: bytearray()}
        self._empty = True

    def add(self, kind: int, seq: int, data: bytes) -> None:
        if self._empty:
            self.start = self.end = seq
            self._empty = False
        self.lost = self.lost or seq != self.end
        self.end = seq + len(data)
        self._streams[kind] += data
        if not self.lost:
            self.whole += data

    def stream(self, kind: int) -> str:
        return self._streams[kind].decode("utf-8", "replace")


class RunPart(NamedTuple):
    """Some output of a run, and its state; checked, because it comes from a hostile guest."""

    status: str
    code: int | None
    duration_ms: int
    truncated: bool
    end: int
    output: GatheredOutput


class GuestCalls:
    """Calls of RPCs to the guests of sessions."""

    def __init__(self, gateway: Gateway) -> None:
        self._sessions = gateway.sessions

    async def resolve(self, principal: Principal, session_id: str) -> str:
        """The session that an RPC means; K8E's TypeScript SDK never sends an id."""
        if session_id:
            return session_id
        return (await self._sessions.standing(principal, {"tenant": NO_TENANT})).session_id

    def call(self, principal: Principal, session_id: str, call: dict[str, Any]) -> SessionCall:
        """An operation of the session's guest, as a block that ends it."""
        return SessionCall(self._sessions, principal, session_id, call)

    async def start(
        self, principal: Principal, session_id: str, call: dict[str, Any]
    ) -> pb.ExecResponse:
        """Start a program that runs on without its caller."""
        background = {
            "background": True,
            "kill_on_disconnect": False,
            "output": "ring",
            "limit": 0,
            "window": 1,
        }
        async with (
            within_guest_time(),
            self.call(principal, session_id, call | background) as running,
        ):
            told = await started(running)
        run_id = f"{session_id}.{as_text(str(told.get('id')))}"
        return pb.ExecResponse(session_id=session_id, run_id=run_id, status="started")

    async def ask(
        self,
        principal: Principal,
        session_id: str,
        call: dict[str, Any],
        seconds: float = ANSWER_SECONDS,
    ) -> dict[str, Any]:
        async with within_guest_time(seconds), self.call(principal, session_id, call) as running:
            return await running.result()


class RunRpcs:
    """The RPCs about background runs, and the stream ``Run``."""

    def __init__(self, gateway: Gateway, guests: GuestCalls) -> None:
        self._gateway = gateway
        self._guests = guests

    @rpc(roles=ANY, audit=NoRow.CALLS, limit=Limit.STREAMS)
    async def Run(
        self, caller: RpcCaller, frames: AsyncIterator[pb.RunFrame], context: RunContext
    ) -> None:
        """Frames of one client; each of its calls is checked by itself."""
        await run(self._gateway, caller.principal, frames, context)

    @rpc(roles=AGENT, audit=NoRow.EVENTS, session="run_id")
    async def PollRun(self, caller: RpcCaller, request: pb.PollRunRequest) -> pb.PollRunResponse:
        if not request.run_id:
            raise errors.InvalidRequest("run_id is empty")
        session_id, exec_id = _split(request.run_id)
        try:
            call = {"op": "attach", "id": exec_id}
            part = await self._read(caller.principal, session_id, call, limit=wire.WINDOW)
        except (errors.ExecNotFound, errors.SessionNotFound) as error:
            if isinstance(error, errors.SessionNotFound):
                self._gateway.refused(error)  # the session may have another owner
            return pb.PollRunResponse(run_id=request.run_id, status="not_found")
        return pb.PollRunResponse(
            run_id=request.run_id,
            status=part.status,
            stdout=part.output.stream(wire.OUT),
            stderr=part.output.stream(wire.ERR),
            exit_code=part.code or 0,
            duration_ms=part.duration_ms,
            truncated=part.truncated or part.output.lost or part.output.start > 0,
        )

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def GetTranscript(
        self, caller: RpcCaller, request: pb.GetTranscriptRequest
    ) -> pb.GetTranscriptResponse:
        """The output of a run, both streams in one; for a session, that of all its runs."""
        if request.offset < 0 or request.limit < 0:
            raise errors.InvalidRequest("offset and limit cannot be negative")
        session_id, _, exec_id = request.session_id.partition(".")
        limit = min(request.limit or TRANSCRIPT, MAX_TRANSCRIPT)
        call: dict[str, Any] = {"op": "attach", "id": exec_id} if exec_id else {"op": "transcript"}
        call["seq"] = request.offset
        try:
            part = await self._read(caller.principal, session_id, call, limit=limit)
        except errors.ExecNotFound:
            if exec_id:
                raise
            # The guest of an earlier release keeps no transcript.
            call |= {"op": "attach", "id": await self._newest(caller.principal, session_id)}
            part = await self._read(caller.principal, session_id, call, limit=limit)
        start, data = part.output.start, bytes(part.output.whole)
        if part.code is None or start + len(data) < part.end:
            data = _whole_characters(data)
        return pb.GetTranscriptResponse(
            session_id=request.session_id,
            output=data.decode("utf-8", "replace"),
            offset=start,
            next_offset=start + len(data),
            truncated_before=start > request.offset,
            eof=part.code is not None and start + len(data) >= part.end,
        )

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def GetProcesses(
        self, caller: RpcCaller, request: pb.GetProcessesRequest
    ) -> pb.GetProcessesResponse:
        told = await self._guests.ask(caller.principal, request.session_id, {"op": "processes"})
        try:
            found = [
                pb.ProcessInfo(
                    pid=item["pid"], comm=as_text(item["comm"]), state=as_text(item["state"])
                )
                for item in told["processes"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None
        return pb.GetProcessesResponse(processes=found)

    async def _newest(self, principal: Principal, session_id: str) -> str:
        told = await self._guests.ask(principal, session_id, {"op": "execs"})
        try:
            runs = [item["id"] for item in told["execs"] if item["background"]]
        except (KeyError, TypeError) as error:
            raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None
        if not runs:
            raise errors.ExecNotFound(f"session {session_id} has no background run")
        return str(runs[-1])

    async def _read(
        self, principal: Principal, session_id: str, call: dict[str, Any], *, limit: int
    ) -> RunPart:
        """The output so far from byte ``seq`` on; never more than ``limit`` bytes."""
        call = {**call, "window": limit}
        start = int(call.get("seq") or 0)
        output = GatheredOutput(start)
        async with within_guest_time(), self._guests.call(principal, session_id, call) as running:
            described = await running.result()
            part = _part(described, output)
            at, room = start, limit
            while room > 0 and (part.code is not None or at < part.end):
                kind, body = await running.receive()
                if kind == wire.EXIT:
                    return _part(described | decode(body), output)
                if kind in (wire.OUT, wire.ERR, wire.SHOW):
                    seq, data = _numbered(body)
                    if kind != wire.SHOW:
                        output.add(kind, seq, data)
                    at, room = seq + len(data), room - len(data)
        return part


async def started(running: SessionCall) -> dict[str, Any]:
    """Wait until the program runs, and return the guest's answer."""
    try:
        return await running.result()
    except GuestOSError as error:
        if error.errno != errno.ENOENT:
            raise
        # NOT_FOUND would tell K8E's clients that the session is gone: they would make a new one.
        raise errors.InvalidRequest(f"the command cannot start: {error}") from None


class within_guest_time:  # noqa: N801 - read as a statement: `async with bounded():`
    """A block that fails if the guest does not answer in time."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *details: Any) -> None:
        try:
            await self._timeout.__aexit__(*details)
        except TimeoutError:
            raise errors.GuestFailed("the guest did not answer in time") from None


def limits(told: Any) -> list[pb.ReachedLimit]:
    """The limits that a run met, in the gateway's words, which replaced the guest's."""
    return [pb.ReachedLimit(**{**item, "value": math.ceil(item["value"])}) for item in told or ()]


def _split(run_id: str) -> tuple[str, str]:
    """The two parts of a run's id; in a malformed one, the exec is empty and never found."""
    session_id, _, exec_id = run_id.partition(".")
    return session_id, exec_id


def _numbered(body: bytes) -> tuple[int, bytes]:
    try:
        seq, data = wire.numbered(body)
    except wire.WireError as error:
        raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None
    if seq >= MAX_SEQ:
        raise errors.GuestFailed("the guest numbered its output beyond what can be")
    return seq, data


def _part(told: dict[str, Any], output: GatheredOutput) -> RunPart:
    code, end, duration = told.get("code"), told.get("seq"), told.get("duration_ms")
    sane = code is None or (isinstance(code, int) and 0 <= code < 1 << 16)
    if not sane or not isinstance(end, int) or not isinstance(duration, int):
        raise errors.GuestFailed("the guest described no run")
    status = str(told.get("status"))
    known = status if status in _STATUSES else "failed"
    return RunPart(known, code, duration, bool(told.get("truncated")), end, output)


def _whole_characters(data: bytes) -> bytes:
    """The bytes without an incomplete last character, unless nothing else would be left."""
    for back in range(1, min(4, len(data))):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < length else data
    return data


TOGETHER = 32 << 10  # bytes of small frames in one message …
OVERHEAD = 64  # … where each counts as so many more: there may be one byte in each


class _Outgoing:
    """Frames that wait to be written. While they are many, the client's frames are not read.

    What guests send is limited by the credit that the client gives; what the gateway itself
    answers is not.
    """

    def __init__(self) -> None:
        self._frames = FrameQueue()
        self._ends: list[Exception | None] = []
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def send(self, kind: int, channel: int, body: bytes) -> None:
        self._frames.put(kind, channel, body)
        self._some.set()
        if self._frames.size > MAX_UNREAD:
            self._room.clear()

    def end(self, error: Exception | None) -> None:
        self._ends.append(error)
        self._some.set()

    async def get(self) -> pb.RunFrame | Exception | None:
        """The next message; the end of the stream, when all are taken."""
        while not self._frames:
            if self._ends:
                return self._ends[0]
            self._some.clear()
            await self._some.wait()
        message = self._take()
        if self._frames.size <= MAX_UNREAD:
            self._room.set()
        return message

    def _take(self) -> pb.RunFrame:
        """A frame, and the small ones behind it that wait already."""
        kind, channel, body = self._frames.take()
        message = pb.RunFrame(kind=kind, channel=channel, body=body)
        size = len(body)
        while self._frames:
            size += self._frames.next_size() + OVERHEAD
            if size > TOGETHER:
                break
            kind, channel, body = self._frames.take()
            message.rest.add(kind=kind, channel=channel, body=body)
        return message

    async def room(self) -> None:
        await self._room.wait()


async def run(
    gateway: Gateway, principal: Principal, frames: AsyncIterator[pb.RunFrame], context: RunContext
) -> None:
    """Carry one client's frames until it closes its side of the stream or goes away."""
    outgoing = _Outgoing()
    client = ClientConnection(gateway, principal, outgoing.send)
    reader = gateway.spawn(_read(frames, client, outgoing))
    try:
        while (item := await outgoing.get()) is not None:
            if isinstance(item, Exception):
                raise item
            await context.write(item)
    finally:
        reader.cancel()
        client.close()


async def _read(
    frames: AsyncIterator[pb.RunFrame],
    client: ClientConnection,
    outgoing: _Outgoing,
) -> None:
    """Read the client's frames; the writer learns how they end, and ends the call."""
    end = None
    try:
        async for frame in frames:
            if len(frame.body) > wire.MAX_REQUEST:
                raise wire.WireError(f"a frame of more than {wire.MAX_REQUEST} bytes")
            client.receive(frame.kind, frame.channel, frame.body)
            await outgoing.room()
    except wire.WireError as error:
        end = errors.InvalidRequest(str(error))
    except Exception as error:
        end = error
    outgoing.end(end)
