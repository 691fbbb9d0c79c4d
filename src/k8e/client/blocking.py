# Generated from asynchronous.py by tools/generate_client.py (`make gen`); changes belong there.
"""The synchronous client: sandboxes, and operations in them.

Its methods run the operations of :mod:`k8e.client.operations` and of the modules named after their
subjects, which have no input or output of their own.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Unpack

from k8e import errors
from k8e.client import (
    attachment,
    exchange,
    executions,
    exposures,
    operations,
    requests,
    results,
    subagents,
    trees,
)
from k8e.client.caller import ProgramDriver
from k8e.client.contexts import Context
from k8e.client.executions import ContextInfo
from k8e.client.exposures import Exposed
from k8e.client.gateway import GatewayClient
from k8e.client.operations import Copied, Progress, Skipped, Tally
from k8e.client.processes import Process
from k8e.client.requests import Content, ExecOptions, SessionOptions
from k8e.client.results import ExecEvent, ExecResult, FileEntry, ProcessInfo, SessionInfo, Stdout
from k8e.client.runs import Run


class SandboxClient(GatewayClient):
    """Runs code in sandboxes; safe to share among threads.

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
        super().__init__(endpoint, tenant_id, api_key=api_key, profile=profile)
        self._own_lock = threading.Lock()  # protects _own
        self._own: dict[str, str] = {}  # the session of each template
        self._closing = False

    def __enter__(self) -> SandboxClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroy the client's own sessions, if it made any, and close its connections.

        Interactive programs end, and those whose output is still being iterated over. Later calls
        of the client or its handles are refused (ClientClosed).
        """
        with self._own_lock:
            own, self._own = self._own, {}
            self._closing = True
        try:
            self._end_programs()
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
            with (
                self._killing(call),
                contextlib.closing(self._stream(operations.exec_events(call), stdin)) as events,
            ):
                yield from events
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
        call = {"op": "execs", "session": requests.by_id(session_id)}
        return self._call(operations.execs(call))

    def kill(self, session_id: str, exec_id: str) -> None:
        """End a command and everything that it started."""
        target = {"session": requests.by_id(session_id), "id": exec_id}
        self._call(operations.call(requests.terminate_call(target)))

    def pip_install(
        self, session_id: str, packages: Sequence[str], *, timeout: float = 120
    ) -> ExecResult:
        """Install Python packages (``["requests>=2.28"]``); the next import finds them."""
        return self._exec(requests.pip_call(session_id, packages, timeout), None)

    def start(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        language: str = "",
        **options: Unpack[ExecOptions],
    ) -> Run:
        """Start a command that runs on without us; return its handle.

        Its newest 512 KiB of output are kept, and its end for a day.

        Args:
            session_id: where to run it.
            command: text for the shell, a list for no shell; with ``language``, source code.
            timeout: seconds after which it is killed; 0 means never.
            language: what the source code is written in.
            options: see :class:`ExecOptions`.
        """
        requests.check_exec_options(self.start, options)
        call = requests.start_call(
            session_id, command, language=language, timeout=timeout, options=options
        )
        told = self._call(attachment.start_run(call))
        return self.get_run(requests.run_id(str(told["session_id"]), str(told["id"])))

    def get_run(self, run_id: str) -> Run:
        """The handle of a run that was started before, here or elsewhere; makes no call."""
        return Run(run_id, self._call, self._stream)

    def transcript(
        self, session_id: str, start: int = 0, *, follow: bool = False
    ) -> Generator[ExecEvent]:
        """Iterate over the output of all programs of a session, from byte ``start`` on.

        The newest 512 KiB are kept, without what was printed on terminals; values of the session's
        secrets are hidden. Last comes an exit, with the code of the run that ended last, if nothing
        runs by then; with ``follow`` it is waited for.
        """
        call = {"op": "transcript", "session": requests.by_id(session_id), "seq": start}
        return self._stream(attachment.attached_output(call, follow=follow))

    def open(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        stdin: bool = True,
        **options: Unpack[ExecOptions],
    ) -> Process:
        """Start a program to write to and read from while it runs; it ends with the handle.

        Args:
            session_id: where to run it.
            command: text for the shell, a list for no shell.
            timeout: seconds after which it is killed; 0 means never.
            stdin: whether it can be written to; otherwise it reads an empty stdin.
            options: see :class:`ExecOptions`; ``tty=(rows, columns)`` gives it a terminal.
        """
        requests.check_exec_options(self.open, options)
        call = exchange.open_call(
            session_id, command, timeout=timeout, stdin=stdin, options=options
        )
        talk = exchange.Exchange(call)
        process = Process(talk, ProgramDriver(talk, self._pool), self._call)
        process.begin()
        self._pool.end_with(process)
        return process

    def terminal(
        self,
        session_id: str,
        program: str | Sequence[str] | None = None,
        rows: int = 24,
        columns: int = 80,
        *,
        timeout: float = 0,
        **options: Unpack[ExecOptions],
    ) -> Process:
        """Start a program on a terminal: by default ``bash``, or ``sh`` where there is none."""
        requests.check_exec_options(self.terminal, options)
        options["tty"] = (rows, columns)
        tried = exchange.terminal_programs(program)
        for command in tried[:-1]:
            with contextlib.suppress(FileNotFoundError):
                return self.open(session_id, command, timeout, **options)
        return self.open(session_id, tried[-1], timeout, **options)

    def processes(self, session_id: str) -> list[ProcessInfo]:
        """All programs that run in a session's sandbox."""
        call = {"op": "processes", "session": requests.by_id(session_id)}
        return self._call(operations.processes(call))

    def resize(self, session_id: str, exec_id: str, rows: int, columns: int) -> None:
        """Set the window size of a command's terminal."""
        call = requests.run_call("resize", requests.run_id(session_id, exec_id))
        self._call(operations.call({**call, "rows": rows, "cols": columns}))

    # Contexts.

    def create_context(
        self, session_id: str, language: str = "python", *, cwd: str = "", context_id: str = ""
    ) -> Context:
        """Start a program that keeps its variables between runs.

        Args:
            session_id: where.
            language: ``python``, ``bash`` or ``node``.
            cwd: where it begins; absolute, or relative to /workspace.
            context_id: letters, digits and hyphens; by default one is made.
        """
        call = executions.context_call(
            "create_context", session_id, id=context_id, language=language, cwd=cwd
        )
        made = self._call(executions.describe_context(call))
        return self.get_context(made.session_id, made.context_id)

    def get_context(self, session_id: str, context_id: str) -> Context:
        """The handle of a context that was made before, here or elsewhere; makes no call."""
        return Context(session_id, context_id, self._call, self._stream)

    def list_contexts(self, session_id: str) -> list[ContextInfo]:
        """The contexts of a session, and their state."""
        call = executions.context_call("list_contexts", session_id)
        return self._call(executions.list_contexts(call))

    # Files.

    def write_file(
        self,
        session_id: str,
        path: str,
        content: Content,
        *,
        append: bool = False,
        mode: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Write text, bytes, an open binary file or an iterable of them; return the byte count.

        A new file appears whole or not at all. Folders above it are made. ``progress`` is called
        with the bytes that were sent and, if it is known, the total.
        """
        requests.check_content(content)
        call = requests.file_call("write", session_id, path, append=append, mode=mode)
        operation = operations.write(call, progress, requests.size_of(content))
        return self._call(operation, content)["size"]

    def read_file(self, session_id: str, path: str, *, progress: Progress | None = None) -> str:
        """A file as text; invalid UTF-8 is replaced."""
        data = self.read_bytes(session_id, path, progress=progress)
        return data.decode("utf-8", "replace")

    def read_bytes(
        self,
        session_id: str,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> bytes:
        chunks = self.read_chunks(session_id, path, offset=offset, length=length, progress=progress)
        whole = io.BytesIO()  # joining chunks would need twice the memory, and half the speed
        for chunk in chunks:
            whole.write(chunk)
        return whole.getvalue()

    def read_chunks(
        self,
        session_id: str,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> Generator[bytes]:
        """A file, piece by piece, in constant memory."""
        call = requests.file_call("read", session_id, path, offset=offset, length=length)
        with contextlib.closing(self._stream(operations.read(call, progress))) as chunks:
            for chunk in chunks:
                yield chunk.data

    def list_files(
        self,
        session_id: str,
        since: float = 0,
        *,
        path: str = "/workspace",
        depth: int | None = None,
        directories: bool = False,
    ) -> list[FileEntry]:
        """Files below a folder that changed after ``since`` (seconds since 1970)."""
        call = requests.list_call(session_id, path, since, depth)
        found = self._call(operations.listing(call))
        return [entry for entry in found if directories or entry.type != "dir"]

    def stat(self, session_id: str, path: str, *, follow: bool = False) -> FileEntry:
        call = requests.file_call("stat", session_id, path, follow=follow)
        return self._call(operations.stat(call))

    def remove(self, session_id: str, path: str, *, recursive: bool = False) -> None:
        call = requests.file_call("remove", session_id, path, recursive=recursive)
        self._call(operations.call(call))

    def rename(self, session_id: str, path: str, to: str) -> None:
        self._call(operations.call(requests.file_call("rename", session_id, path, to=to)))

    def mkdir(self, session_id: str, path: str, *, exist_ok: bool = True) -> None:
        """Make a folder and those above it."""
        call = requests.file_call("mkdir", session_id, path, exist_ok=exist_ok)
        self._call(operations.call(call))

    def symlink(self, session_id: str, path: str, target: str) -> None:
        """Make a symbolic link in a sandbox, replacing a file or link of that name."""
        self._call(operations.call(requests.file_call("symlink", session_id, path, target=target)))

    def chmod(self, session_id: str, path: str, mode: int) -> None:
        """Change the permissions of a file of a sandbox."""
        self._call(operations.call(requests.file_call("chmod", session_id, path, mode=mode)))

    def upload(
        self,
        session_id: str,
        source: str | Path | BinaryIO,
        path: str,
        *,
        progress: Progress | None = None,
        on_skip: Skipped | None = None,
    ) -> Copied:
        """Make ``path`` a copy of a local file or folder, or write an open binary file to it.

        Permissions are kept, and links are copied as links. A folder that is there is added to.

        Args:
            session_id: where to copy to.
            source: what to copy.
            path: the copy itself, not a folder to put it in; folders above it are made.
            progress: called with the bytes that were sent and, if it is known, how many it will be.
            on_skip: called with a path that cannot be copied, and why; otherwise that is a warning.
        """
        tally = Tally(progress, on_skip)
        self._perform(trees.upload(session_id, source, path, tally))
        return tally.copied

    def download(
        self,
        session_id: str,
        path: str,
        target: str | Path | BinaryIO,
        *,
        progress: Progress | None = None,
        on_skip: Skipped | None = None,
    ) -> Copied:
        """Make a local file or folder a copy of one in a sandbox, or write to an open binary file.

        Nothing from the sandbox leads out of ``target``, and files appear whole or not at all.

        Args:
            session_id: where to copy from.
            path: a file or folder.
            target: the copy itself, not a folder to put it in; the folder above must be there.
            progress: called with the bytes that came and, if it is known, how many it will be.
            on_skip: called with a path that cannot be copied, and why. Otherwise a file that cannot
                be read raises its error, and what is no file, or a link that leads out, a warning.
        """
        tally = Tally(progress, on_skip)
        self._perform(trees.download(session_id, path, target, tally))
        return tally.copied

    # Sessions.

    def create_session(
        self,
        runtime_class: str = "",
        allowed_hosts: Sequence[str] | None = None,
        tenant_id: str = "",
        **options: Unpack[SessionOptions],
    ) -> str:
        """Make a session; return its id. See :class:`SessionOptions` for its options.

        ``allowed_hosts`` are the words of its egress policy: host names, ``*.wildcards`` and CIDRs,
        with or without ``:port``, and ``default``, ``open``, ``none``, ``strict``. None means the
        gateway's default, an empty list nothing.
        """
        requests.check_session_options(self.create_session, options)
        tenant = tenant_id or self.tenant_id
        call = requests.create_call(runtime_class, allowed_hosts, tenant, options)
        return self._call(operations.session(call)).session_id

    def get_session(self, session_id: str) -> SessionInfo:
        call = {"op": "get_session", "session_id": session_id}
        return self._call(operations.session(call))

    def list_sessions(self, tenant_id: str = "", *, ended: bool = False) -> list[SessionInfo]:
        call = {"op": "list_sessions", "tenant": tenant_id, "ended": ended}
        return self._call(operations.sessions(call))

    def extend_session(self, session_id: str, lifetime: float) -> SessionInfo:
        """Let a session live ``lifetime`` seconds from now."""
        call = {"op": "extend_session", "session_id": session_id, "lifetime": lifetime}
        return self._call(operations.session(call))

    def destroy_session(self, session_id: str) -> None:
        self._call(operations.call({"op": "destroy_session", "session_id": session_id}))

    def run_subagent(
        self, parent_session_id: str, agent_type: str = "", workspace_path: str = ""
    ) -> str:
        """Make a session for a sub-agent; return its id.

        It is a sandbox of its own, with the parent's limits, variables and allowed hosts, and it
        shares the parent's ``/workspace``. It ends with its parent at the latest.

        Args:
            parent_session_id: whose workspace it shares; not a sub-agent itself.
            agent_type: kept as its label ``agent_type``.
            workspace_path: the folder in which its commands start, ``/workspace`` or below; it is
                made if it is missing.
        """
        return self._call(subagents.start(parent_session_id, agent_type, workspace_path))

    def pause_session(self, session_id: str) -> None:
        """Freeze a session, and its sub-agents, until it is resumed.

        Until then, new operations in it raise :class:`k8e.errors.SessionPaused`.
        """
        self._call(operations.call({"op": "pause_session", "session_id": session_id}))

    def resume_session(self, session_id: str) -> None:
        """Let a session, and its sub-agents, go on where they stopped."""
        self._call(operations.call({"op": "resume_session", "session_id": session_id}))

    # The network.

    def update_allowed_hosts(self, session_id: str, hosts: Sequence[str]) -> list[str]:
        """Replace what a session may reach; return the policy in effect, ``default`` spelled out.

        Open connections are judged by the new policy too. An empty list allows nothing.
        """
        call = requests.allow_call(session_id, hosts)
        return self._call(operations.update_allowed_hosts(call))

    def change_allowed_hosts(
        self, session_id: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        """Add words to what a session may reach, and remove others; return the policy in effect.

        Two callers at once lose nothing of each other's changes.
        """
        call = requests.change_call(session_id, add, remove)
        return self._call(operations.update_allowed_hosts(call))

    def egress(self, session_id: str) -> results.Egress:
        """What a session may reach, and what it was refused."""
        call = {"op": "egress", "session_id": session_id}
        return self._call(operations.egress(call))

    def expose(self, session_id: str, port: int, host: str = exposures.LOOPBACK) -> Exposed:
        """Make a port of a session's sandbox reachable, on a URL with a token.

        The server need not run yet. A port that is exposed already keeps its URL.

        Args:
            session_id: whose sandbox.
            port: where in the sandbox the server listens.
            host: the same: an address of the sandbox's loopback, or ``localhost`` for both
                127.0.0.1 and ::1.
        """
        return self._call(exposures.expose_port(exposures.target(session_id, port, host=host)))

    def unexpose(self, session_id: str, port: int) -> None:
        """Close a URL, and every connection that came through it."""
        self._call(exposures.unexpose_port(exposures.target(session_id, port)))

    def wait_for_port(
        self, session_id: str, port: int, host: str = exposures.LOOPBACK, *, timeout: float = 30
    ) -> None:
        """Wait until a server in the sandbox accepts connections; TimedOut if none does in time.

        Its port need not be exposed. The sandbox watches for it, and answers once.
        """
        self._call(exposures.wait_for_port(session_id, port, host, timeout))

    def list_exposed(self, session_id: str = "") -> list[Exposed]:
        """Exposed ports of one session, or of all of yours, oldest first."""
        return self._call(exposures.listing(session_id))

    # The session that the client makes for runs that name none.

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
