"""RPCs about K8E's terminals.

A terminal is a program of the session's guest, and its id is ``<session>.<exec>``: nothing is kept
here, so terminals outlive the gateway and every one of their readers.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import signal
from collections.abc import Generator
from typing import Any

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.operations import AGENT, NoRow
from k8e.gateway.rpc.method import RpcCaller, rpc
from k8e.gateway.rpc.runs import ANSWER_SECONDS, GuestCalls, started, within_guest_time
from k8e.guest import wire
from k8e.model import Principal
from k8e.sessions.exchange import GuestOSError, decode

ROWS, COLUMNS = 24, 80
MAX_SIZE = (1 << 16) - 1
SHELLS = (["bash"], ["sh"])
GRACE_MS = 500
"""Between asking to end and killing, if the caller does not say."""
MAX_GRACE_MS = 60_000
_SIGNALS: dict[int, int] = {
    pb.TERMINAL_SIGNAL_INT: signal.SIGINT,
    pb.TERMINAL_SIGNAL_TERM: signal.SIGTERM,
    pb.TERMINAL_SIGNAL_KILL: signal.SIGKILL,
    pb.TERMINAL_SIGNAL_TSTP: signal.SIGTSTP,
    pb.TERMINAL_SIGNAL_HUP: signal.SIGHUP,
}

StreamContext = grpc.aio.ServicerContext[pb.TerminalStreamRequest, pb.TerminalStreamResponse]


class TerminalRpcs:
    """The RPCs about terminals."""

    def __init__(self, guests: GuestCalls) -> None:
        self._guests = guests

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def CreateTerminal(
        self, caller: RpcCaller, request: pb.CreateTerminalRequest
    ) -> pb.CreateTerminalResponse:
        call: dict[str, Any] = {
            "op": "exec",
            "id": secrets.token_hex(8),
            "cwd": request.workdir,
            "env": dict(request.env),
            "tty": [_size(request.rows or ROWS), _size(request.cols or COLUMNS)],
            "output": "ring",
            "window": 1,
        }
        session_id = await self._guests.resolve(caller.principal, request.session_id)
        terminal_id = f"{session_id}.{call['id']}"
        programs = [list(request.argv)] if request.argv else list(SHELLS)
        while programs:
            call["argv"] = programs.pop(0)
            async with (
                within_guest_time(),
                self._guests.call(caller.principal, session_id, call) as running,
            ):
                try:
                    await started(running)
                    break
                except errors.InvalidRequest:  # it is not there
                    if not programs:
                        raise
        told = await self._on(caller.principal, terminal_id, "foreground")
        return pb.CreateTerminalResponse(
            terminal_id=terminal_id, pid=max(0, _number(told.get("pid")))
        )

    @rpc(roles=AGENT, audit=NoRow.EVENTS, session="terminal_id")
    async def TerminalStream(
        self, caller: RpcCaller, request: pb.TerminalStreamRequest, context: StreamContext
    ) -> None:
        """Send the stored output, then new output; written instead of yielded, as in ExecStream."""
        session_id, exec_id = _split(request.terminal_id)
        call = {"op": "attach", "id": exec_id}
        with _naming(request.terminal_id):
            async with self._guests.call(caller.principal, session_id, call) as running:
                async with within_guest_time():
                    described = await running.result()
                if described.get("tty") is not True:
                    raise _missing(request.terminal_id)
                while True:
                    kind, body = await running.receive()
                    if kind == wire.EXIT:
                        break
                    data = body[wire.SEQ.size :]
                    if kind == wire.OUT and data:
                        await context.write(pb.TerminalStreamResponse(data=data))
                        running.consumed(len(data))
        await context.write(pb.TerminalStreamResponse(exit=_exit(decode(body))))

    @rpc(roles=AGENT, audit=NoRow.EVENTS, session="terminal_id")
    async def TerminalWrite(
        self, caller: RpcCaller, request: pb.TerminalWriteRequest
    ) -> pb.TerminalWriteResponse:
        """Answered when the bytes are queued for the program, not when it has read them."""
        await self._on(caller.principal, request.terminal_id, "type", data=request.data)
        return pb.TerminalWriteResponse(ok=True)

    @rpc(roles=AGENT, audit=NoRow.EVENTS, session="terminal_id")
    async def TerminalResize(
        self, caller: RpcCaller, request: pb.TerminalResizeRequest
    ) -> pb.TerminalResizeResponse:
        rows, columns = _size(request.rows), _size(request.cols)
        await self._on(caller.principal, request.terminal_id, "resize", rows=rows, cols=columns)
        return pb.TerminalResizeResponse(ok=True)

    @rpc(roles=AGENT, audit=NoRow.EVENTS, session="terminal_id")
    async def TerminalForeground(
        self, caller: RpcCaller, request: pb.TerminalForegroundRequest
    ) -> pb.TerminalForegroundResponse:
        told = await self._on(caller.principal, request.terminal_id, "foreground")
        return pb.TerminalForegroundResponse(
            process_group_id=_number(told.get("process_group_id")),
            input_waiting=told.get("input_waiting") is True,
        )

    @rpc(roles=AGENT, audit=NoRow.EVENTS, session="terminal_id")
    async def TerminalSignal(
        self, caller: RpcCaller, request: pb.TerminalSignalRequest
    ) -> pb.TerminalSignalResponse:
        number = _SIGNALS.get(request.signal)
        if number is None:
            raise errors.InvalidRequest(
                f"signal {request.signal} is not one that can be sent",
                hint="TERMINAL_SIGNAL_INT, _TERM, _KILL, _TSTP and _HUP are",
            )
        told = await self._on(
            caller.principal, request.terminal_id, "signal", signal=number, foreground=True
        )
        return pb.TerminalSignalResponse(process_group_id=_number(told.get("process_group_id")))

    @rpc(roles=AGENT, audit=NoRow.EVENTS, session="terminal_id")
    async def TerminalDestroy(
        self, caller: RpcCaller, request: pb.TerminalDestroyRequest
    ) -> pb.TerminalDestroyResponse:
        """Answered when the program has ended and the terminal is forgotten."""
        if not 0 <= request.grace_ms <= MAX_GRACE_MS:
            raise errors.InvalidRequest(f"grace_ms must be 0 to {MAX_GRACE_MS}")
        grace = (request.grace_ms or GRACE_MS) / 1000
        await self._on(
            caller.principal,
            request.terminal_id,
            "dismiss",
            grace=grace,
            patience=grace + ANSWER_SECONDS,
        )
        return pb.TerminalDestroyResponse(ok=True)

    async def _on(
        self,
        principal: Principal,
        terminal_id: str,
        op: str,
        *,
        patience: float = ANSWER_SECONDS,
        **fields: Any,
    ) -> dict[str, Any]:
        """Ask the guest something about a terminal."""
        session_id, exec_id = _split(terminal_id)
        with _naming(terminal_id):
            call = {"op": op, "id": exec_id, **fields}
            return await self._guests.ask(principal, session_id, call, patience)


def _split(terminal_id: str) -> tuple[str, str]:
    session_id, _, exec_id = terminal_id.partition(".")
    if not session_id or not exec_id:
        raise _missing(terminal_id)
    return session_id, exec_id


def _missing(terminal_id: str) -> errors.ExecNotFound:
    return errors.ExecNotFound(
        f"terminal {terminal_id[:120]} not found",
        hint="it was destroyed, or ended long ago; CreateTerminal makes another",
    )


@contextlib.contextmanager
def _naming(terminal_id: str) -> Generator[None]:
    """Report errors in terms of terminals."""
    try:
        yield
    except errors.ExecNotFound:
        raise _missing(terminal_id) from None
    except GuestOSError as error:
        if error.errno == errno.ENOTTY:
            raise _missing(terminal_id) from None
        if error.errno == errno.EAGAIN:
            raise errors.LimitExceeded(
                "the program does not read what was written before",
                hint="write less, or wait until TerminalForeground says that it waits for input",
            ) from None
        raise


def _size(number: int) -> int:
    if not 0 < number <= MAX_SIZE:
        raise errors.InvalidRequest(f"a terminal has 1 to {MAX_SIZE} rows and columns")
    return number


def _number(told: Any) -> int:
    """A process id from a guest, which may be hostile; -1 means unknown."""
    return told if isinstance(told, int) and 0 < told < 1 << 31 else -1


def _exit(told: dict[str, Any]) -> pb.TerminalExit:
    code, number = told.get("code"), told.get("signal")
    if not isinstance(code, int) or not 0 <= code < 1 << 16:
        raise errors.GuestFailed("the guest reported no exit code")
    return pb.TerminalExit(exit_code=code, signal=_signal_name(number))


def _signal_name(number: Any) -> str:
    if not isinstance(number, int) or not 0 < number < signal.NSIG:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"
