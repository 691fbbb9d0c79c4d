"""RPCs about sessions, programs and files, and the table of all RPCs that are implemented."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.operations import AGENT, NoRow
from k8e.gateway.rpc import egress
from k8e.gateway.rpc.contexts import ContextRpcs
from k8e.gateway.rpc.errors import as_text
from k8e.gateway.rpc.management import (
    ApprovalRpcs,
    AuditRpcs,
    EventRpcs,
    ExposureRpcs,
    LoginRpcs,
    SecretRpcs,
    SnapshotRpcs,
    SubagentRpcs,
    TemplateRpcs,
)
from k8e.gateway.rpc.method import RpcCaller, declared, encodes, rpc
from k8e.gateway.rpc.runs import NO_TENANT, GuestCalls, RunRpcs, limits, started
from k8e.gateway.rpc.terminals import TerminalRpcs
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.model import PIP_SECONDS, Phase, Principal, pip_command
from k8e.sessions import refusals
from k8e.sessions.exchange import SessionCall, decode

MAX_MESSAGE = 64 << 20
"""Bytes of one message, either way; K8E's newest clients have the same limit."""
OUTPUT_CAP = 1 << 20  # bytes per stream of a unary Exec
DEFAULT_TIMEOUT = 30  # seconds
MAX_ENV_KEY, MAX_ENV_VALUE = 256, 4 << 10  # bytes, of one variable of CreateSession
ALL_LEVELS = 1 << 20  # of directories
EXIT_CODE_KEY = "k8e-exit-code"
STATUS_KEY = "k8e-status"
DENIALS_KEY = "k8e-denials"
LIMITS_KEY = "k8e-limits"
_MAX_CONTENT = MAX_MESSAGE - 1024  # room for the fields' own bytes
MOST_PIECES = 1024  # of text that wait to be joined
_DECODER = codecs.getincrementaldecoder("utf-8")
_FILE_TYPES = {"file": "file", "dir": "directory", "link": "symlink"}
"""Our guests' types of entries in K8E's words; all others are ``other``."""
_STREAM_HINT = "larger files go through Run, in pieces"

StreamContext = grpc.aio.ServicerContext[pb.ExecRequest, pb.ExecStreamResponse]


class ExecEnd(NamedTuple):
    """How an exec ended, checked because it comes from a hostile guest."""

    code: int
    status: str
    duration_ms: int
    truncated: bool
    denials: list[pb.EgressDenial]
    limits: list[pb.ReachedLimit]


class SessionRpcs:
    """The RPCs about sessions themselves, and what they may reach."""

    @encodes("create_session")
    async def CreateSession(
        self, caller: RpcCaller, request: pb.CreateSessionRequest
    ) -> pb.CreateSessionResponse:
        _check_env(request.env)
        asked = {
            "tenant": request.tenant_id or NO_TENANT,
            "runtime": request.runtime_class,
            "session_id": request.session_id,
            "env": dict(request.env),
            "allowed_hosts": egress.hosts(request.allowed_hosts) or None,
            "template": request.template,
            "secret_refs": [(r.secret_name, r.key, r.env_var) for r in request.secret_refs],
        }
        answer = await caller.ask({"spec": asked})
        return pb.CreateSessionResponse(session_id=answer["session"]["session_id"])

    @encodes("destroy_session")
    async def DestroySession(
        self, caller: RpcCaller, request: pb.DestroySessionRequest
    ) -> pb.DestroySessionResponse:
        if not request.session_id:
            raise errors.InvalidRequest("session_id is empty")
        await caller.ask({"session_id": request.session_id})
        return pb.DestroySessionResponse(ok=True)

    @encodes("get_session")
    async def GetSession(
        self, caller: RpcCaller, request: pb.GetSessionRequest
    ) -> pb.GetSessionResponse:
        if not request.session_id:
            raise refusals.not_found("")
        found = (await caller.ask({"session_id": request.session_id}))["session"]
        response = _session(found)
        response.background_runs = found["background_runs"]
        return response

    @encodes("list_sessions")
    async def ListSessions(
        self, caller: RpcCaller, request: pb.ListSessionsRequest
    ) -> pb.ListSessionsResponse:
        phase = (request.phase or Phase.ACTIVE).lower()
        if phase not in ("all", *Phase):
            known = ", ".join(item.capitalize() for item in Phase)
            raise errors.InvalidRequest(
                f"unknown phase {request.phase[:80]!r}", hint=f"known are {known} and all"
            )
        found = (await caller.ask({"ended": phase in ("all", Phase.ENDED)}))["sessions"]
        listed = [_session(item) for item in found if phase in ("all", item["phase"])]
        return pb.ListSessionsResponse(sessions=listed)

    @encodes("update_allowed_hosts")
    async def UpdateAllowedHosts(
        self, caller: RpcCaller, request: pb.UpdateAllowedHostsRequest
    ) -> pb.UpdateAllowedHostsResponse:
        call = {"session_id": request.session_id, "hosts": egress.hosts(request.hosts)}
        answer = await caller.ask(call)
        return pb.UpdateAllowedHostsResponse(hosts=answer["hosts"])

    @encodes("egress")
    async def GetEgress(
        self, caller: RpcCaller, request: pb.GetEgressRequest
    ) -> pb.GetEgressResponse:
        return egress.egress(await caller.ask({"session_id": request.session_id}))


class ExecRpcs:
    """The RPCs that run programs to their end, or start them in the background."""

    def __init__(self, guests: GuestCalls) -> None:
        self._guests = guests

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def Exec(self, caller: RpcCaller, request: pb.ExecRequest) -> pb.ExecResponse:
        call = _exec_call(request, limit=OUTPUT_CAP)
        if request.background:
            session_id = await self._guests.resolve(caller.principal, request.session_id)
            return await self._guests.start(caller.principal, session_id, call)
        response = await self._exec(caller.principal, request.session_id, call)
        response.language = request.language
        return response

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def PipInstall(
        self, caller: RpcCaller, request: pb.PipInstallRequest
    ) -> pb.PipInstallResponse:
        call = {
            "op": "exec",
            "argv": pip_command(request.packages),
            "timeout": PIP_SECONDS,
            "limit": OUTPUT_CAP,
            "kill_on_disconnect": True,
        }
        done = await self._exec(caller.principal, request.session_id, call)
        return pb.PipInstallResponse(output=done.stdout + done.stderr, exit_code=done.exit_code)

    async def _exec(
        self, principal: Principal, session_id: str, call: dict[str, Any]
    ) -> pb.ExecResponse:
        """Run a command to its end, and collect its output."""
        session_id = await self._guests.resolve(principal, session_id)
        output = {wire.OUT: bytearray(), wire.ERR: bytearray()}
        async with self._guests.call(principal, session_id, call) as running:
            await started(running)
            overflow = False
            while True:
                kind, body = await running.receive()
                if kind == wire.EXIT:
                    break
                data = body[wire.SEQ.size :]
                stream = output.get(kind)
                if stream is not None:
                    # The guest keeps to the limit by itself; a hostile one does not.
                    overflow = overflow or len(stream) + len(data) > OUTPUT_CAP
                    stream += data[: OUTPUT_CAP - len(stream)]
                    running.consumed(len(data))
        end = _ending(body)
        stdout, stdout_bytes = _text(bytes(output[wire.OUT]))
        stderr, stderr_bytes = _text(bytes(output[wire.ERR]))
        return pb.ExecResponse(
            stdout=stdout,
            stderr=stderr,
            stdout_bytes=stdout_bytes,
            stderr_bytes=stderr_bytes,
            exit_code=end.code,
            session_id=session_id,
            status=end.status,
            duration_ms=end.duration_ms,
            truncated=end.truncated or overflow,
            denials=end.denials,
            limits=end.limits,
        )

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def ExecStream(
        self, caller: RpcCaller, request: pb.ExecRequest, context: StreamContext
    ) -> None:
        """Send output as it comes; written, not yielded, so that it ends if its client leaves."""
        if request.background:
            raise errors.InvalidRequest(
                "a background run has no stream", hint="start it with Exec, and use GetTranscript"
            )
        call = _exec_call(request, limit=0)
        session_id = await self._guests.resolve(caller.principal, request.session_id)
        # A character may be cut by a chunk's end, and then the other stream may come in between.
        decoders = {kind: _DECODER("replace") for kind in (wire.OUT, wire.ERR)}
        async with self._guests.call(caller.principal, session_id, call) as running:
            await started(running)
            while True:
                kind, body = await running.receive()
                if kind == wire.EXIT:
                    break
                if kind in decoders:
                    data = body[wire.SEQ.size :]
                    await _write(context, decoders[kind].decode(data))
                    running.consumed(len(data))
        for decoder in decoders.values():
            await _write(context, decoder.decode(b"", final=True))
        end = _ending(body)
        metadata = [(EXIT_CODE_KEY, str(end.code)), (STATUS_KEY, end.status)]
        if end.denials:
            metadata.append((DENIALS_KEY, egress.denials_as_json(end.denials)))
        if end.limits:
            metadata.append((LIMITS_KEY, ",".join(item.limit for item in end.limits)))
        context.set_trailing_metadata(tuple(metadata))


class FileRpcs:
    """The RPCs about files."""

    def __init__(self, guests: GuestCalls) -> None:
        self._guests = guests

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def WriteFile(
        self, caller: RpcCaller, request: pb.WriteFileRequest
    ) -> pb.WriteFileResponse:
        session_id = await self._guests.resolve(caller.principal, request.session_id)
        call = {"op": "write", "path": request.path, "append": request.mode == "a"}
        async with self._guests.call(caller.principal, session_id, call) as upload:
            await upload.result()
            await upload.upload(request.content_bytes or request.content.encode())
        return pb.WriteFileResponse(ok=True)

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def ReadFile(self, caller: RpcCaller, request: pb.ReadFileRequest) -> pb.ReadFileResponse:
        session_id = await self._guests.resolve(caller.principal, request.session_id)
        call = {"op": "read", "path": request.path}
        async with self._guests.call(caller.principal, session_id, call) as download:
            size = (await download.result()).get("size")
            if isinstance(size, int) and size > _MAX_CONTENT:
                raise _too_large(f"the file has {size} bytes")
            return await _receive_content(download)

    @rpc(roles=AGENT, audit=NoRow.EVENTS)
    async def ListFiles(
        self, caller: RpcCaller, request: pb.ListFilesRequest
    ) -> pb.ListFilesResponse:
        if not 0 <= request.since < 1 << 33:
            raise errors.InvalidRequest("since must be a time in unix seconds")
        session_id = await self._guests.resolve(caller.principal, request.session_id)
        call = {"op": "list", "depth": ALL_LEVELS, "since_ns": request.since * 1_000_000_000}
        response = pb.ListFilesResponse()
        size = 0
        async with self._guests.call(caller.principal, session_id, call) as listing:
            await listing.result()
            while True:
                kind, body = await listing.receive()
                if kind == wire.END:
                    return response
                if kind == wire.DATA:
                    size += len(body)
                    if size > MAX_MESSAGE:
                        raise errors.LimitExceeded("there are more files than an answer can hold")
                    response.files.extend(_entries(body))
                    listing.consumed(len(body))


SERVICES = (
    SessionRpcs,
    ExecRpcs,
    FileRpcs,
    RunRpcs,
    TerminalRpcs,
    ContextRpcs,
    ApprovalRpcs,
    AuditRpcs,
    EventRpcs,
    ExposureRpcs,
    LoginRpcs,
    SecretRpcs,
    SnapshotRpcs,
    SubagentRpcs,
    TemplateRpcs,
)
RPCS = declared(*SERVICES)
"""The declaration of every RPC that is implemented, by name."""


def handlers(gateway: Gateway) -> dict[str, Callable[..., Awaitable[Any]]]:
    """The handlers of all RPCs, by name."""
    guests = GuestCalls(gateway)
    services: tuple[object, ...] = (
        SessionRpcs(),
        ExecRpcs(guests),
        FileRpcs(guests),
        RunRpcs(gateway, guests),
        TerminalRpcs(guests),
        ContextRpcs(guests),
        ApprovalRpcs(),
        AuditRpcs(),
        EventRpcs(),
        ExposureRpcs(),
        LoginRpcs(gateway.client_certificates),
        SecretRpcs(),
        SnapshotRpcs(),
        SubagentRpcs(),
        TemplateRpcs(),
    )
    return {name: getattr(part, name) for part in services for name in declared(type(part))}


def _check_env(env: Mapping[str, str]) -> None:
    """K8E's bounds of each variable; our own clients, who do not come this way, have wider ones."""
    for name, value in env.items():
        sizes = len(name.encode()), len(value.encode())
        if sizes[0] > MAX_ENV_KEY or sizes[1] > MAX_ENV_VALUE:
            raise errors.InvalidRequest(
                f"environment variable {name[:80]!r} has a name of {sizes[0]} bytes and a value of "
                f"{sizes[1]} bytes; they may have {MAX_ENV_KEY} and {MAX_ENV_VALUE}",
                hint="put what is large into a file",
            )


def _session(found: dict[str, Any]) -> pb.GetSessionResponse:
    names = ("session_id", "tenant_id", "env_keys", "secret_env_vars", "allowed_hosts")
    return pb.GetSessionResponse(
        phase=found["phase"].capitalize(),
        runtime_class=found["runtime"],
        expires_at=int(found["expires_at"]),
        parent_id=found["parent_id"],
        template=found["template"],
        **{name: found[name] for name in names},
    )


def _exec_call(request: pb.ExecRequest, *, limit: int) -> dict[str, Any]:
    timeout = request.timeout or (0 if request.background else DEFAULT_TIMEOUT)
    call: dict[str, Any] = {
        "op": "exec",
        "cwd": request.workdir,
        "timeout": timeout,
        "limit": limit,
        "kill_on_disconnect": True,
    }
    # K8E's clients wrap their code into the command and send the language only as a label.
    if request.code:
        return {**call, "code": request.code, "language": request.language}
    if not request.command.strip():
        raise errors.InvalidRequest("the command is empty")
    return {**call, "argv": ["/bin/sh", "-c", request.command]}


async def _write(context: StreamContext, text: str) -> None:
    if text:
        await context.write(pb.ExecStreamResponse(chunk=text))


async def _receive_content(download: SessionCall) -> pb.ReadFileResponse:
    """A file as text, and also as bytes if the text cannot hold them.

    Decoded piece by piece: 64 MiB of broken characters would hold everybody up for seconds.
    """
    decoder = _DECODER("replace")
    data = bytearray()
    text: list[str] = []
    joined: list[str] = []
    size = 0
    lossy = False
    kind = wire.DATA
    while kind != wire.END:
        kind, body = await download.receive()
        if kind not in (wire.DATA, wire.END):
            continue
        data += body
        text.append(decoder.decode(body, final=kind == wire.END))
        size += len(text[-1].encode())
        lossy = lossy or "\ufffd" in text[-1]
        if size + (len(data) if lossy else 0) > _MAX_CONTENT:
            raise _too_large("text and bytes of the file do not fit into an answer")
        download.consumed(len(body))
        if len(text) == MOST_PIECES:  # of a byte each, perhaps
            joined.append("".join(text))
            text = []
    content = "".join((*joined, *text))
    return pb.ReadFileResponse(content=content, content_bytes=bytes(data) if lossy else b"")


def _too_large(what: str) -> errors.LimitExceeded:
    return errors.LimitExceeded(
        f"{what}; ReadFile takes up to {_MAX_CONTENT} bytes", hint=_STREAM_HINT
    )


def _text(data: bytes) -> tuple[str, bytes]:
    """Text for K8E's field, and the bytes for ours where the text could not hold them."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError:
        return data.decode(errors="replace"), data


def _ending(body: bytes) -> ExecEnd:
    end = decode(body)
    code, duration = end.get("code"), end.get("duration_ms")
    if not isinstance(code, int) or not 0 <= code < 1 << 16 or not isinstance(duration, int):
        raise errors.GuestFailed("the guest reported no exit code")
    status = str(end.get("status"))
    known = status if status in ("completed", "timed_out", "killed") else "failed"
    denied = egress.denials(end.get("denials"))
    met = limits(end.get("limits"))
    return ExecEnd(code, known, duration, bool(end.get("truncated")), denied, met)


def _entries(body: bytes) -> list[pb.FileEntry]:
    try:
        return [
            pb.FileEntry(
                path=as_text(entry["path"]),
                modified=entry["modified_ns"] // 1_000_000_000,
                type=_FILE_TYPES.get(entry["type"], "other"),
                size=entry["size"],
            )
            for entry in wire.unpack(body)
            if entry["type"] != "dir"
        ]
    except (wire.WireError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None
