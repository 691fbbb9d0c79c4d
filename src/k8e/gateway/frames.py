"""Frames of one client, whatever carries them: the unix socket, or a gRPC stream.

Calls to the gateway are answered; calls to a guest are relayed, with the session id added to their
first answer and nothing else decoded on the way.
"""

# What clients send has no static type.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from k8e import database, errors
from k8e.audit import act as audit_act
from k8e.audit.act import Act, AuditCaller
from k8e.gateway.operations import USE_SESSION, BoundOperation, check_scope
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.model import Principal, Session, words_from_json
from k8e.sessions import tasks
from k8e.sessions.operations import Operation

log = logging.getLogger(__name__)

MAX_CHANNELS = 1024  # operations that one connection may have open
MAX_ATTEMPTS = 3  # to begin in a standing session that ends again and again
MAX_UNREAD = 16 << 20  # bytes for a client that does not read them, before it is heard no more
MAX_EARLY = wire.WINDOW  # bytes held for an operation whose session is still being made …
MAX_EARLY_FRAMES = 64  # … in so many pieces, where they cannot be joined …
MAX_ALL_EARLY = 64 << 20  # … and for all operations of one client
MAX_REQUEST_REF = 64  # characters of a request's id

Send = Callable[[int, int, bytes], None]


class Early:
    """How much all pending channels of a client keep."""

    def __init__(self) -> None:
        self.size = 0


class PendingChannel:
    """A channel whose operation has not begun: it keeps what the client sends meanwhile."""

    def __init__(self, early: Early) -> None:
        self.task: asyncio.Task[None] | None = None
        self._early = early
        self._size = 0
        self._frames: list[tuple[int, bytearray]] = []

    def send(self, kind: int, body: bytes) -> None:
        self._size += len(body)
        self._early.size += len(body)
        if self._size > MAX_EARLY or self._early.size > MAX_ALL_EARLY:
            raise errors.InvalidRequest("the client sent more than it had credit for")
        if kind in (wire.STDIN, wire.DATA) and self._frames and self._frames[-1][0] == kind:
            self._frames[-1][1].extend(body)
            return
        if len(self._frames) == MAX_EARLY_FRAMES:
            raise errors.InvalidRequest("the client sent too much before its operation began")
        self._frames.append((kind, bytearray(body)))

    def leave(self) -> list[tuple[int, bytes]]:
        """The frames that were held; nothing more will be."""
        self._early.size -= self._size
        self._size = 0
        return [(kind, bytes(body)) for kind, body in self._frames]

    def cancel(self) -> None:
        self.leave()
        if self.task is not None:
            self.task.cancel()


class ClientConnection:
    """All operations of one client connection. ``send(kind, channel, body)`` must not block."""

    def __init__(
        self, gateway: Gateway, principal: Principal, send: Send, caller: AuditCaller | None = None
    ) -> None:
        """``caller`` tells how we know ``principal``; by default it is who acts now."""
        act = audit_act.current()
        self._gateway = gateway
        self._sessions = gateway.sessions
        self._operations = gateway.operations
        self._principal = principal
        self._caller = caller or (
            act.caller if act is not None else AuditCaller(principal.name, "")
        )
        self._send = send
        self._channels: dict[int, Operation | PendingChannel] = {}
        self._early = Early()
        self._closed = False
        gateway.connections.add(self)

    def receive(self, kind: int, channel: int, body: bytes) -> None:
        """Take a frame from the client; WireError means that the connection must end."""
        open_channel = self._channels.get(channel)
        if kind == wire.CALL:
            if open_channel is not None or len(self._channels) >= MAX_CHANNELS:
                raise wire.WireError(f"channel {channel} cannot be opened")
            self._call(channel, wire.unpack_dict(body))
        elif open_channel is None:
            return  # it crossed with the end of the operation
        elif kind == wire.CANCEL:
            del self._channels[channel]
            open_channel.cancel()
        elif kind in (wire.STDIN, wire.STDIN_END, wire.DATA, wire.END, wire.CREDIT):
            if kind == wire.CREDIT and len(body) != wire.CREDIT_BODY.size:
                raise wire.WireError("malformed credit")
            try:
                open_channel.send(kind, body)
            except errors.InvalidRequest as error:
                raise wire.WireError(str(error)) from None
        else:
            raise wire.WireError(f"a client does not send frames of kind {kind}")

    def close(self) -> None:
        """The client is gone: cancel what it had open."""
        self._closed = True
        self._gateway.connections.discard(self)
        channels, self._channels = self._channels, {}
        for operation in channels.values():
            operation.cancel()

    # Calls.

    def _call(self, channel: int, call: dict[str, Any]) -> None:
        op = str(call.get("op"))
        request = _request_of(call)
        try:
            if "session" in call:
                session_id = _named(call)
                audit_act.begin(Act(self._caller, op, session_id, request))
                check_scope(self._principal, op, session_id)
                self._operations.admit(self._principal, USE_SESSION)
                self._call_guest(channel, call)
                return
            admitted = self._operations.begin(
                self._caller, self._principal, op, call, request=request
            )
            self._later(channel, self._answer(channel, call, admitted))
        except errors.K8eError as error:
            self._fail(channel, error)
        except (TypeError, ValueError, AttributeError) as error:
            self._fail(channel, errors.InvalidRequest(f"malformed call: {error}"))
        except Exception as error:  # one call has failed, not the connection with all others
            self._fail_unexpectedly(channel, error)

    async def _answer(self, channel: int, call: dict[str, Any], admitted: BoundOperation) -> None:
        if call.get("progress"):
            tasks.listen(partial(self._report, channel, self._channels.get(channel)))
        value = await admitted.run(self._principal, call)
        pending = self._channels.pop(channel, None)
        if isinstance(pending, PendingChannel):
            pending.leave()
        self._reply(wire.RESULT, channel, wire.pack(value))

    def _report(self, channel: int, pending: object, done: int, total: int) -> None:
        """Report the progress of a call, as long as the client waits for it."""
        if self._channels.get(channel) is pending:
            self._reply(wire.DATA, channel, wire.pack({"bytes": done, "total": total}))

    def _call_guest(self, channel: int, call: dict[str, Any]) -> None:
        """Relay to a session's guest; without a task where session and link are there already."""
        target = call.pop("session")
        if not isinstance(target, dict):
            raise errors.InvalidRequest("session must name a session")
        session_id, warning = self._find_now(target)
        if session_id:
            relay = self._relay(channel, session_id, warning)
            operation = self._sessions.open_now(self._principal, session_id, call, relay)
            if operation is not None:
                if not operation.done:
                    self._channels[channel] = operation
                return
        self._later(channel, self._open_later(channel, target, call))

    def _find_now(self, target: dict[str, Any]) -> tuple[str, str]:
        """The session that is meant, if there is one by now, and a warning about it."""
        if "auto" not in target:
            return str(target.get("id") or ""), ""
        spec: dict[str, Any] = target.get("spec") or {}
        if spec.get("snapshot") or spec.get("manifest") or spec.get("secret_refs"):
            return "", ""  # open_auto compares these with those that the session was made with
        runtime = str(spec.get("runtime") or "")
        tenant = str(target["auto"] or "default")
        asked = spec.get("allowed_hosts")
        hosts = None if asked is None else words_from_json(asked)
        template = str(spec.get("template") or "")
        known = self._sessions.auto_now(self._principal, tenant, runtime, hosts, template=template)
        return (known.session_id, self._sessions.weaker(known)) if known is not None else ("", "")

    async def _open_later(self, channel: int, target: dict[str, Any], call: dict[str, Any]) -> None:
        if "auto" in target:
            operation = await self._open_auto(channel, target, call)
        else:
            session_id = str(target.get("id") or "")
            relay = self._relay(channel, session_id)
            operation = await self._sessions.open(self._principal, session_id, call, relay)
        pending = self._channels.pop(channel, None)
        if not isinstance(pending, PendingChannel):  # cancelled while it began
            operation.cancel()
            return
        if not operation.done:
            self._channels[channel] = operation
        for kind, body in pending.leave():
            operation.send(kind, body)

    async def _open_auto(
        self, channel: int, target: dict[str, Any], call: dict[str, Any]
    ) -> Operation:
        """Open in the tenant's standing session; in a new one if that ends before anything runs."""
        attempts = 0
        while True:
            session = await self._auto(target)
            session_id, attempts = session.session_id, attempts + 1
            relay = self._relay(channel, session_id, self._sessions.warning(session))
            try:
                return await self._sessions.open(self._principal, session_id, call, relay)
            except errors.SessionNotFound:
                if attempts == MAX_ATTEMPTS:
                    raise

    async def _auto(self, target: dict[str, Any]) -> Session:
        fields = {**(target.get("spec") or {}), "tenant": str(target["auto"] or "default")}
        return await self._sessions.standing(self._principal, fields)

    def _relay(
        self, channel: int, session_id: str, warning: str = ""
    ) -> Callable[[int, bytes], None]:
        first = True

        def on_frame(kind: int, body: bytes) -> None:
            nonlocal first
            if first and kind == wire.RESULT:
                first = False
                body = _add_session(body, session_id, warning)
            current = self._channels.get(channel)
            if isinstance(current, Operation) and current.done:
                del self._channels[channel]
            self._reply(kind, channel, body)

        return on_frame

    def _later(self, channel: int, work: Awaitable[None]) -> None:
        pending = self._channels[channel] = PendingChannel(self._early)

        async def run() -> None:
            try:
                await work
            except errors.K8eError as error:
                self._fail(channel, error)
            except Exception as error:  # the client waits for an answer, whatever went wrong
                self._fail_unexpectedly(channel, error)

        pending.task = self._gateway.spawn(run())

    def _fail_unexpectedly(self, channel: int, error: Exception) -> None:
        """Answer an unexpected failure; only our log gets its details."""
        if database.is_full(error):
            self._fail(channel, database.full())
            return
        log.error("operation failed", exc_info=error)
        self._fail(channel, errors.K8eError(errors.INTERNAL))

    def _fail(self, channel: int, error: errors.K8eError) -> None:
        self._gateway.refused(error)
        begun = self._channels.pop(channel, None)
        if isinstance(begun, Operation):
            begun.cancel()
        elif begun is not None:
            begun.leave()
        self._reply(wire.ERROR, channel, wire.pack(error.to_wire()))

    def _reply(self, kind: int, channel: int, body: bytes) -> None:
        if not self._closed:
            self._send(kind, channel, body)


def _named(call: dict[str, Any]) -> str:
    """The session that a call to a guest names; none where the gateway chooses the session."""
    target = call["session"]
    by_id = isinstance(target, dict) and "auto" not in target
    return USE_SESSION.session_of(call) if by_id else ""


def _request_of(call: dict[str, Any]) -> str:
    """The id of the request that a call belongs to, which is for the audit trail alone."""
    told = call.pop("request_ref", "")
    fits = isinstance(told, str) and len(told) <= MAX_REQUEST_REF
    return told if fits and told.isascii() and told.isprintable() else ""


def _add_session(body: bytes, session_id: str, warning: str) -> bytes:
    more = {"session_id": session_id, "warning": warning} if warning else {"session_id": session_id}
    try:
        return wire.extended(body, more)
    except wire.WireError:
        return wire.pack(more)  # the guest is hostile; the client gets an answer without its fields
