"""The synchronous SDK: one class, safe to share among threads."""

from __future__ import annotations

import codecs
import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from k8e import errors
from k8e.client import driving, endpoints, operations, requests, results
from k8e.client.approving import Approving
from k8e.client.auditing import Auditing
from k8e.client.contexts import Contexts
from k8e.client.events import Telling
from k8e.client.exposing import Exposing
from k8e.client.files import Files
from k8e.client.imaging import Imaging
from k8e.client.interactive import Interactive
from k8e.client.operations import Operation
from k8e.client.pooling import Pooling
from k8e.client.requests import Content, ExecOptions, SessionOptions
from k8e.client.results import ExecEvent, ExecResult, SessionInfo, Stdout
from k8e.client.runs import Runs
from k8e.client.secrets import Secrets
from k8e.client.snapshotting import Snapshotting
from k8e.client.steering import Steering
from k8e.client.templating import Templating
from k8e.client.transfers import Transfers

T = TypeVar("T")


class SandboxClient(
    Runs,
    Interactive,
    Files,
    Transfers,
    Approving,
    Snapshotting,
    Steering,
    Exposing,
    Telling,
    Pooling,
    Templating,
    Imaging,
    Secrets,
    Contexts,
    Auditing,
):
    """Runs code in sandboxes.

    The gateway is ``endpoint``, that of K8E_SANDBOX_ENDPOINT, of ``profile`` or of the current
    profile; without any of them it is this host's own, which is started if it does not run.
    :meth:`run` needs no session: the client makes one of its own, which ends with :meth:`close`, or
    uses the standing one of ``tenant_id``, which does not.

        with SandboxClient() as client:
            print(client.run("print(1 + 1)", "python").stdout)
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
        self._pool = driving.Pool(driving.connector(endpoints.resolve(endpoint, api_key, profile)))
        self._own_lock = threading.Lock()  # protects _own
        self._own: dict[str, str] = {}  # the session of each template
        self._closing = False
        self._streamed: dict[str, Mapping[str, Any]] = {}  # commands that end with their reader

    def __enter__(self) -> SandboxClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroy the client's own sessions, if it made any, and close its connections.

        Programs end whose output somebody was still iterating over, or that were opened to be
        talked to. Whatever is asked of the client or its handles later is refused (ClientClosed).
        """
        with self._own_lock:
            own, self._own = self._own, {}
            self._closing = True
        try:
            for call in list(self._streamed.values()):
                self._kill(call)
            for program in self._pool.ending:
                program.close()
            for session_id in own.values():
                with contextlib.suppress(errors.K8eError):
                    self.destroy_session(session_id)
        finally:
            self._pool.close()

    # Commands.

    def run(
        self,
        code: str | bytes,
        language: str = "bash",
        timeout: float = 30,
        *,
        session_id: str | None = None,
        template: str = "",
        stdin: Content | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run source code in ``bash``, ``python``, ``node`` or ``ts``; never through a shell line.

        Args:
            code: the program.
            language: what it is written in.
            timeout: seconds after which it is killed; 0 means never.
            session_id: where to run it; by default the client's own or its tenant's session.
            template: what that session is made from; the client makes one of its own for each.
            stdin: what the program reads.
            options: see :class:`ExecOptions`.
        """
        requests.check_exec_options(self.run, options)

        def attempt(session: Mapping[str, Any]) -> ExecResult:
            call = requests.code_call(
                session,
                code,
                language=language,
                timeout=timeout,
                stdin=stdin is not None,
                options=options,
            )
            return self._exec(call, stdin)

        requests.check_made_for_run(session_id, template)
        if session_id:
            return attempt(requests.by_id(session_id))
        if self.tenant_id:
            return attempt(requests.auto(self.tenant_id, template))
        own = self._own_session(template)
        try:
            return attempt(requests.by_id(own))
        except (errors.SessionNotFound, errors.SandboxDied) as error:
            self._forget_own(own)
            if isinstance(error, errors.SandboxDied):
                raise  # the code may have run
        return attempt(requests.by_id(self._own_session(template)))

    def exec(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 30,
        *,
        stdin: Content | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run a command and collect its output; text is for the shell, a list for no shell."""
        requests.check_exec_options(self.exec, options)
        call = requests.command_call(
            requests.by_id(session_id),
            command,
            timeout=timeout,
            stdin=stdin is not None,
            options=options,
        )
        return self._exec(call, stdin)

    def exec_events(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 300,
        *,
        stdin: Content | None = None,
        **options: Unpack[ExecOptions],
    ) -> Generator[ExecEvent]:
        """Run a command while iterating over its output and, last, its exit.

        Reading slowly slows the command down; leaving the loop kills it.
        """
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
            with self._killing(call):
                yield from self._stream(operations.exec_events(call), stdin)
        finally:
            self._streamed.pop(call["id"], None)

    def exec_stream(
        self, session_id: str, command: str | Sequence[str], timeout: float = 300
    ) -> Generator[str]:
        """Run a command while iterating over its standard output as text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        events = self.exec_events(session_id, command, timeout)
        with contextlib.closing(events):
            for event in events:
                if isinstance(event, Stdout) and (text := decoder.decode(event.data)):
                    yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    def execs(self, session_id: str) -> list[results.ExecInfo]:
        """The commands that run in a session, and those that ended not long ago."""
        return self._call(operations.execs({"op": "execs", "session": requests.by_id(session_id)}))

    def kill(self, session_id: str, exec_id: str) -> None:
        """End a command and everything that it started."""
        target = {"session": requests.by_id(session_id), "id": exec_id}
        self._call(operations.call(requests.terminate_call(target)))

    # Sessions.

    def create_session(
        self,
        runtime_class: str = "",
        allowed_hosts: Sequence[str] | None = None,
        tenant_id: str = "",
        **options: Unpack[SessionOptions],
    ) -> str:
        """Make a session; its id. See :class:`SessionOptions` for what it can be given.

        ``allowed_hosts`` are the words of its egress policy: host names, ``*.wildcards`` and CIDRs,
        with or without ``:port``, and ``default``, ``open``, ``none``, ``strict``. None means the
        gateway's default, an empty list nothing.
        """
        requests.check_session_options(self.create_session, options)
        tenant = tenant_id or self.tenant_id
        call = requests.create_call(runtime_class, allowed_hosts, tenant, options)
        return self._call(operations.session(call)).session_id

    def get_session(self, session_id: str) -> SessionInfo:
        return self._call(operations.session({"op": "get_session", "session_id": session_id}))

    def list_sessions(self, tenant_id: str = "", *, ended: bool = False) -> list[SessionInfo]:
        call = {"op": "list_sessions", "tenant": tenant_id, "ended": ended}
        return self._call(operations.sessions(call))

    def extend_session(self, session_id: str, lifetime: float) -> SessionInfo:
        """Let a session live ``lifetime`` seconds from now."""
        call = {"op": "extend_session", "session_id": session_id, "lifetime": lifetime}
        return self._call(operations.session(call))

    def destroy_session(self, session_id: str) -> None:
        self._call(operations.call({"op": "destroy_session", "session_id": session_id}))

    # Egress.

    def update_allowed_hosts(self, session_id: str, hosts: Sequence[str]) -> list[str]:
        """Replace what a session may reach; what is in effect, with ``default`` spelled out.

        Open connections are judged by the new policy too. An empty list allows nothing.
        """
        call = requests.allow_call(session_id, hosts)
        return self._call(operations.update_allowed_hosts(call))

    def change_allowed_hosts(
        self, session_id: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        """Add words to what a session may reach, and take others out; what is in effect.

        Two callers at once lose nothing of each other's changes.
        """
        call = requests.change_call(session_id, add, remove)
        return self._call(operations.update_allowed_hosts(call))

    def egress(self, session_id: str) -> results.Egress:
        """What a session may reach, and what it was refused."""
        call = {"op": "egress", "session_id": session_id}
        return self._call(operations.egress(call))

    # Packages.

    def pip_install(
        self, session_id: str, packages: Sequence[str], *, timeout: float = 120
    ) -> ExecResult:
        """Install Python packages (``["requests>=2.28"]``); the next import finds them."""
        return self._exec(requests.pip_call(session_id, packages, timeout), None)

    # The gateway.

    def status(self) -> dict[str, Any]:
        """How the gateway is: version, pid, sessions, addresses."""
        return self._call(operations.call({"op": "status"}))

    def doctor(self, *, fresh: bool = False) -> dict[str, Any]:
        """Which runtimes and features work on the gateway's host, and how to fix the others."""
        return self._call(operations.call({"op": "doctor", "fresh": fresh}))

    # Driving.

    def _call(self, operation: Operation[T], source: Content | None = None) -> T:
        running = driving.Running(self._pool.take(), operation, source, self._pool.renew)
        while running.next_event() is not None:
            pass
        self._pool.keep(running.connection)
        return running.result

    def _exec(self, call: Mapping[str, Any], stdin: Content | None) -> ExecResult:
        with self._killing(call):
            return self._call(operations.exec_result(call), stdin)

    def _stream(self, operation: Operation[Any], source: Content | None = None) -> Generator[Any]:
        running = driving.Running(self._pool.take(), operation, source, self._pool.renew)
        try:
            while (event := running.next_event()) is not None:
                yield event
                self._pool.check_open()
            self._pool.keep(running.connection)
        finally:
            running.close()

    @contextlib.contextmanager
    def _killing(self, call: Mapping[str, Any]) -> Generator[None]:
        """Kill the command if its caller gives up: Ctrl-C, or leaving a loop over its output."""
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            self._kill(call)
            raise

    def _kill(self, call: Mapping[str, Any]) -> None:
        with contextlib.suppress(errors.K8eError):
            self._call(operations.call(requests.terminate_call(call)))

    def _own_session(self, template: str) -> str:
        with self._own_lock:
            if self._closing:
                raise errors.ClientClosed
            if template not in self._own:
                self._own[template] = self.create_session(template=template)
            return self._own[template]

    def _forget_own(self, session_id: str) -> None:
        with self._own_lock:
            self._own = {key: own for key, own in self._own.items() if own != session_id}


@contextlib.contextmanager
def sandbox_session(
    runtime_class: str = "",
    allowed_hosts: Sequence[str] | None = None,
    endpoint: str | None = None,
    **options: Unpack[SessionOptions],
) -> Generator[tuple[SandboxClient, str]]:
    """A client and a session that ends with the block."""
    with SandboxClient(endpoint) as client:
        session_id = client.create_session(runtime_class, allowed_hosts, **options)
        try:
            yield client, session_id
        finally:
            with contextlib.suppress(errors.SessionNotFound):  # it has ended before
                client.destroy_session(session_id)
