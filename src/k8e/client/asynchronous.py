"""The asynchronous SDK: every method of :class:`k8e.SandboxClient`, to be awaited.

What a method does is written once, in :mod:`k8e.client.operations`, and explained at its blocking
twin; a test holds the two classes to the same methods and arguments.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from k8e import errors
from k8e.client import async_driving, endpoints, operations, requests, results
from k8e.client.approving import AsyncApproving
from k8e.client.async_files import AsyncFiles
from k8e.client.async_interactive import AsyncInteractive
from k8e.client.async_runs import AsyncRuns
from k8e.client.async_transfers import AsyncTransfers
from k8e.client.auditing import AsyncAuditing
from k8e.client.contexts import AsyncContexts
from k8e.client.events import AsyncTelling
from k8e.client.exposing import AsyncExposing
from k8e.client.imaging import AsyncImaging
from k8e.client.operations import Operation
from k8e.client.pooling import AsyncPooling
from k8e.client.requests import AsyncContent, ExecOptions, SessionOptions
from k8e.client.results import ExecEvent, ExecResult, SessionInfo, Stdout
from k8e.client.secrets import AsyncSecrets
from k8e.client.snapshotting import AsyncSnapshotting
from k8e.client.steering import AsyncSteering
from k8e.client.templating import AsyncTemplating

T = TypeVar("T")
KILL_SECONDS = 5.0  # how long a cancelled caller waits for its command to be killed


class AsyncSandboxClient(
    AsyncRuns,
    AsyncInteractive,
    AsyncFiles,
    AsyncTransfers,
    AsyncApproving,
    AsyncSnapshotting,
    AsyncSteering,
    AsyncExposing,
    AsyncTelling,
    AsyncPooling,
    AsyncTemplating,
    AsyncImaging,
    AsyncSecrets,
    AsyncContexts,
    AsyncAuditing,
):
    """Runs code in sandboxes, from any number of tasks at once.

    async with AsyncSandboxClient() as client:
        print((await client.run("print(1 + 1)", "python")).stdout)
    """

    def __init__(
        self,
        endpoint: str | None = None,
        tenant_id: str = "",
        *,
        api_key: str | None = None,
        profile: str | None = None,
    ) -> None:
        self.tenant_id = tenant_id
        self._pool = async_driving.Pool(self._connector(endpoint, api_key, profile))
        self._own_lock = asyncio.Lock()  # protects _own
        self._own: dict[str, str] = {}  # the session of each template
        self._closing = False
        self._streamed: dict[str, Mapping[str, Any]] = {}  # commands that end with their reader

    def _connector(
        self, endpoint: str | None, api_key: str | None, profile: str | None, /
    ) -> async_driving.Connector:
        return async_driving.connector(endpoints.resolve(endpoint, api_key, profile))

    async def __aenter__(self) -> AsyncSandboxClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        async with self._own_lock:
            own, self._own = self._own, {}
            self._closing = True
        try:
            for call in list(self._streamed.values()):
                await self._kill(call)
            for program in self._pool.ending:
                await program.close()
            for session_id in own.values():
                with contextlib.suppress(errors.K8eError):
                    await self.destroy_session(session_id)
        finally:
            await self._pool.close()

    # Commands.

    async def run(
        self,
        code: str | bytes,
        language: str = "bash",
        timeout: float = 30,
        *,
        session_id: str | None = None,
        template: str = "",
        stdin: AsyncContent | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        requests.check_exec_options(self.run, options)

        async def attempt(session: Mapping[str, Any]) -> ExecResult:
            call = requests.code_call(
                session,
                code,
                language=language,
                timeout=timeout,
                stdin=stdin is not None,
                options=options,
            )
            return await self._exec(call, stdin)

        requests.check_made_for_run(session_id, template)
        if session_id:
            return await attempt(requests.by_id(session_id))
        if self.tenant_id:
            return await attempt(requests.auto(self.tenant_id, template))
        own = await self._own_session(template)
        try:
            return await attempt(requests.by_id(own))
        except (errors.SessionNotFound, errors.SandboxDied) as error:
            self._forget_own(own)
            if isinstance(error, errors.SandboxDied):
                raise  # the code may have run
        return await attempt(requests.by_id(await self._own_session(template)))

    async def exec(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 30,
        *,
        stdin: AsyncContent | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        requests.check_exec_options(self.exec, options)
        call = requests.command_call(
            requests.by_id(session_id),
            command,
            timeout=timeout,
            stdin=stdin is not None,
            options=options,
        )
        return await self._exec(call, stdin)

    async def exec_events(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 300,
        *,
        stdin: AsyncContent | None = None,
        **options: Unpack[ExecOptions],
    ) -> AsyncGenerator[ExecEvent]:
        requests.check_exec_options(self.exec_events, options)
        options.setdefault("output_limit", 0)
        call = requests.command_call(
            requests.by_id(session_id),
            command,
            timeout=timeout,
            stdin=stdin is not None,
            options=options,
        )
        self._streamed[call["id"]] = call
        try:
            async with (
                self._killing(call),
                contextlib.aclosing(self._stream(operations.exec_events(call), stdin)) as events,
            ):
                async for event in events:
                    yield event
        finally:
            self._streamed.pop(call["id"], None)

    async def exec_stream(
        self, session_id: str, command: str | Sequence[str], timeout: float = 300
    ) -> AsyncGenerator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        events = self.exec_events(session_id, command, timeout)
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Stdout) and (text := decoder.decode(event.data)):
                    yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    async def execs(self, session_id: str) -> list[results.ExecInfo]:
        call = {"op": "execs", "session": requests.by_id(session_id)}
        return await self._call(operations.execs(call))

    async def kill(self, session_id: str, exec_id: str) -> None:
        target = {"session": requests.by_id(session_id), "id": exec_id}
        await self._call(operations.call(requests.terminate_call(target)))

    # Sessions.

    async def create_session(
        self,
        runtime_class: str = "",
        allowed_hosts: Sequence[str] | None = None,
        tenant_id: str = "",
        **options: Unpack[SessionOptions],
    ) -> str:
        requests.check_session_options(self.create_session, options)
        tenant = tenant_id or self.tenant_id
        call = requests.create_call(runtime_class, allowed_hosts, tenant, options)
        return (await self._call(operations.session(call))).session_id

    async def get_session(self, session_id: str) -> SessionInfo:
        call = {"op": "get_session", "session_id": session_id}
        return await self._call(operations.session(call))

    async def list_sessions(self, tenant_id: str = "", *, ended: bool = False) -> list[SessionInfo]:
        call = {"op": "list_sessions", "tenant": tenant_id, "ended": ended}
        return await self._call(operations.sessions(call))

    async def extend_session(self, session_id: str, lifetime: float) -> SessionInfo:
        call = {"op": "extend_session", "session_id": session_id, "lifetime": lifetime}
        return await self._call(operations.session(call))

    async def destroy_session(self, session_id: str) -> None:
        await self._call(operations.call({"op": "destroy_session", "session_id": session_id}))

    # Egress.

    async def update_allowed_hosts(self, session_id: str, hosts: Sequence[str]) -> list[str]:
        call = requests.allow_call(session_id, hosts)
        return await self._call(operations.update_allowed_hosts(call))

    async def change_allowed_hosts(
        self, session_id: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        call = requests.change_call(session_id, add, remove)
        return await self._call(operations.update_allowed_hosts(call))

    async def egress(self, session_id: str) -> results.Egress:
        call = {"op": "egress", "session_id": session_id}
        return await self._call(operations.egress(call))

    # Packages.

    async def pip_install(
        self, session_id: str, packages: Sequence[str], *, timeout: float = 120
    ) -> ExecResult:
        return await self._exec(requests.pip_call(session_id, packages, timeout), None)

    # The gateway.

    async def status(self) -> dict[str, Any]:
        return await self._call(operations.call({"op": "status"}))

    async def doctor(self, *, fresh: bool = False) -> dict[str, Any]:
        return await self._call(operations.call({"op": "doctor", "fresh": fresh}))

    # Driving.

    async def _call(self, operation: Operation[T], source: AsyncContent | None = None) -> T:
        pool = self._pool
        connection = await (pool.share() if source is None else pool.take())
        running = async_driving.Running(connection, operation, source, pool.renew)
        while await running.next_event() is not None:
            pass
        await self._pool.keep(running.connection)
        return running.result

    async def _exec(self, call: Mapping[str, Any], stdin: AsyncContent | None) -> ExecResult:
        async with self._killing(call):
            return await self._call(operations.exec_result(call), stdin)

    async def _stream(
        self, operation: Operation[Any], source: AsyncContent | None = None
    ) -> AsyncGenerator[Any]:
        pool = self._pool
        running = async_driving.Running(await pool.take(), operation, source, pool.renew)
        try:
            while (event := await running.next_event()) is not None:
                yield event
                self._pool.check_open()
            await self._pool.keep(running.connection)
        finally:
            await running.close()

    @contextlib.asynccontextmanager
    async def _killing(self, call: Mapping[str, Any]) -> AsyncGenerator[None]:
        """Kill the command if its caller gives up: a cancelled task, or a loop that was left."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            await self._kill(call)
            raise

    async def _kill(self, call: Mapping[str, Any]) -> None:
        kill = self._call(operations.call(requests.terminate_call(call)))
        await async_driving.finish(kill, KILL_SECONDS)

    async def _own_session(self, template: str) -> str:
        async with self._own_lock:
            if self._closing:
                raise errors.ClientClosed
            if template not in self._own:
                self._own[template] = await self.create_session(template=template)
            return self._own[template]

    def _forget_own(self, session_id: str) -> None:
        self._own = {key: own for key, own in self._own.items() if own != session_id}
