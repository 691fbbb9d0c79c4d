"""K8E's calls about runs that outlive their caller.

A run's id is ``<session>.<exec>``: the session says whose it is, and its guest keeps the output.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any, NamedTuple

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.calls import Call, GuestOSError, decode
from k8e.gateway.rpc_errors import as_text
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.model import Principal

ANSWER_SECONDS = 15.0  # that a guest may need to say what it knows already
TRANSCRIPT = 64 << 10  # bytes of a transcript, if the caller names no limit
MAX_TRANSCRIPT = 1 << 20
_STATUSES = ("running", "completed", "timed_out", "killed")


class Part(NamedTuple):
    """Some of the output of a run, and how it is; checked, because a hostile guest said it."""

    status: str
    code: int | None
    duration_ms: int
    truncated: bool
    end: int
    pieces: list[tuple[int, int, bytes]]
    """Kind, number of the first byte, bytes."""

    @property
    def lost(self) -> bool:
        """Whether there are gaps between the pieces."""
        ends = [seq + len(data) for _, seq, data in self.pieces]
        return any(piece[1] != end for piece, end in zip(self.pieces[1:], ends, strict=False))

    def stream(self, kind: int) -> str:
        data = b"".join(piece[2] for piece in self.pieces if piece[0] == kind)
        return data.decode("utf-8", "replace")


class Runs:
    """A part of the service."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions = gateway.sessions

    def _call(self, principal: Principal, session_id: str, call: dict[str, Any]) -> Call:
        return Call(self._sessions, principal, session_id, call)

    async def PollRun(self, principal: Principal, request: pb.PollRunRequest) -> pb.PollRunResponse:
        session_id, exec_id = _split(request.run_id)
        try:
            part = await self._read(principal, session_id, exec_id, start=0, limit=wire.WINDOW)
        except errors.ExecNotFound:
            return pb.PollRunResponse(run_id=request.run_id, status="not_found")
        return pb.PollRunResponse(
            run_id=request.run_id,
            status=part.status,
            stdout=part.stream(wire.OUT),
            stderr=part.stream(wire.ERR),
            exit_code=part.code or 0,
            duration_ms=part.duration_ms,
            truncated=part.truncated or part.lost or (part.pieces[:1] or [(0, 0)])[0][1] > 0,
        )

    async def GetTranscript(
        self, principal: Principal, request: pb.GetTranscriptRequest
    ) -> pb.GetTranscriptResponse:
        """The output of a run, both streams in one; for a session that of its newest run."""
        if request.offset < 0 or request.limit < 0:
            raise errors.InvalidRequest("offset and limit cannot be negative")
        session_id, _, exec_id = request.session_id.partition(".")
        exec_id = exec_id or await self._newest(principal, session_id)
        limit = min(request.limit or TRANSCRIPT, MAX_TRANSCRIPT)
        part = await self._read(principal, session_id, exec_id, start=request.offset, limit=limit)
        start = part.pieces[0][1] if part.pieces else request.offset
        data = _without_gaps(part)
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

    async def GetProcesses(
        self, principal: Principal, request: pb.GetProcessesRequest
    ) -> pb.GetProcessesResponse:
        told = await self._ask(principal, request.session_id, {"op": "processes"})
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

    async def _start(
        self, principal: Principal, session_id: str, call: dict[str, Any]
    ) -> pb.ExecResponse:
        """Start a program that goes on without its caller."""
        background = {
            "background": True,
            "kill_on_disconnect": False,
            "output": "ring",
            "limit": 0,
            "window": 1,
        }
        async with bounded(), self._call(principal, session_id, call | background) as running:
            told = await started(running)
        run_id = f"{session_id}.{as_text(str(told.get('id')))}"
        return pb.ExecResponse(session_id=session_id, run_id=run_id, status="started")

    async def _ask(
        self,
        principal: Principal,
        session_id: str,
        call: dict[str, Any],
        seconds: float = ANSWER_SECONDS,
    ) -> dict[str, Any]:
        async with bounded(seconds), self._call(principal, session_id, call) as running:
            return await running.result()

    async def _newest(self, principal: Principal, session_id: str) -> str:
        told = await self._ask(principal, session_id, {"op": "execs"})
        try:
            runs = [item["id"] for item in told["execs"] if item["background"]]
        except (KeyError, TypeError) as error:
            raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None
        if not runs:
            raise errors.ExecNotFound(f"session {session_id} has no background run")
        return str(runs[-1])

    async def _read(
        self, principal: Principal, session_id: str, exec_id: str, *, start: int, limit: int
    ) -> Part:
        """What there is of the output of a run from a byte on; never more than ``limit``."""
        call = {"op": "attach", "id": exec_id, "seq": start, "window": limit}
        pieces: list[tuple[int, int, bytes]] = []
        async with bounded(), self._call(principal, session_id, call) as running:
            described = await running.result()
            part = _part(described, pieces)
            at, room = start, limit
            while room > 0 and (part.code is not None or at < part.end):
                kind, body = await running.receive()
                if kind == wire.EXIT:
                    return _part(described | decode(body), pieces)
                if kind in (wire.OUT, wire.ERR, wire.SHOW) and len(body) >= wire.SEQ.size:
                    seq, data = wire.SEQ.unpack_from(body)[0], body[wire.SEQ.size :]
                    if kind != wire.SHOW:
                        pieces.append((kind, seq, data))
                    at, room = seq + len(data), room - len(data)
        return part


async def started(running: Call) -> dict[str, Any]:
    """Wait until the program runs; what the guest says to that."""
    try:
        return await running.result()
    except GuestOSError as error:
        if error.errno != errno.ENOENT:
            raise
        # NOT_FOUND would tell K8E's clients that the session is gone: they would make a new one.
        raise errors.InvalidRequest(f"the command cannot start: {error}") from None


class bounded:  # noqa: N801 - read as a statement: `async with bounded():`
    """Nobody waits for a guest that does not answer."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *details: Any) -> None:
        try:
            await self._timeout.__aexit__(*details)
        except TimeoutError:
            raise errors.GuestFailed("the guest did not answer in time") from None


def _split(run_id: str) -> tuple[str, str]:
    session_id, _, exec_id = run_id.partition(".")
    if not session_id or not exec_id:
        raise errors.InvalidRequest(f"{run_id[:120]!r} is not the id of a run")
    return session_id, exec_id


def _part(told: dict[str, Any], pieces: list[tuple[int, int, bytes]]) -> Part:
    code, end, duration = told.get("code"), told.get("seq"), told.get("duration_ms")
    sane = code is None or (isinstance(code, int) and 0 <= code < 1 << 16)
    if not sane or not isinstance(end, int) or not isinstance(duration, int):
        raise errors.GuestFailed("the guest described no run")
    status = str(told.get("status"))
    known = status if status in _STATUSES else "failed"
    return Part(known, code, duration, bool(told.get("truncated")), end, pieces)


def _without_gaps(part: Part) -> bytes:
    """The bytes up to the first gap, so that offsets count what was given."""
    data = b""
    start = part.pieces[0][1] if part.pieces else 0
    for _, seq, piece in part.pieces:
        if seq != start + len(data):
            break
        data += piece
    return data


def _whole_characters(data: bytes) -> bytes:
    """Without the beginning of a character whose end is still to come; but never nothing."""
    for back in range(1, min(4, len(data))):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < length else data
    return data
