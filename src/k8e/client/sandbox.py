# Generated from async_sandbox.py by tools/generate_client.py (`make gen`); changes belong there.
"""A sandbox as one object: a session, and everything that can be done in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Unpack, cast

from k8e import errors
from k8e.client import exposures, requests, templates
from k8e.client.blocking import SandboxClient
from k8e.client.contexts import Context
from k8e.client.exposures import Exposed
from k8e.client.operations import Copied
from k8e.client.processes import Process
from k8e.client.requests import (
    Content,
    ContextLanguage,
    ExecOptions,
    Language,
    Limits,
    SandboxOptions,
    SessionOptions,
)
from k8e.client.results import Egress, ExecEvent, ExecResult, FileEntry, SessionInfo
from k8e.client.runs import Run
from k8e.client.snapshots import Snapshot


class Sandbox:
    """A sandbox: made at the start of a ``with`` block, or when it is first used.

        with Sandbox(memory="2G") as sb:
            print(sb.run("print(1 + 1)", "python").stdout)

    The end of the block kills it. A sandbox from :meth:`connect` lives on.

    Args:
        template: what it is made from; see :meth:`SandboxClient.list_templates`.
        image: the image that its root file system comes from. A template is kept for each image,
            which needs the role ``admin``.
        runtime: ``gvisor`` or ``container``; by default the best.
        memory: at most so many bytes, or text like ``"2G"``.
        cpus: at most so many CPUs.
        limits: further limits; see :class:`Limits`.
        allowed_hosts: what it may reach; None means the gateway's default.
        client: whose sandbox it is; by default it has a client of its own.
        endpoint: of its own client; see :class:`SandboxClient`.
        api_key: of its own client.
        profile: of its own client.
        options: see :class:`SandboxOptions`.
    """

    def __init__(
        self,
        template: str = "",
        *,
        image: str = "",
        runtime: str = "",
        memory: float | str | None = None,
        cpus: float | str | None = None,
        limits: Limits | None = None,
        allowed_hosts: Sequence[str] | None = None,
        client: SandboxClient | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        profile: str | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        requests.check_session_options(type(self), options)
        if template and image:
            raise errors.InvalidRequest(
                "a sandbox is made from a template or from an image, not from both",
                hint="name the image in the template",
            )
        session: SessionOptions = {**options}
        wanted = dict(cast("Mapping[str, float | str]", limits or {}))
        given = {"memory": memory, "cpus": cpus}
        wanted |= {key: value for key, value in given.items() if value}
        if wanted:
            session["limits"] = wanted
        if template:
            session["template"] = template
        self._image = image
        self._runtime = runtime
        self._allowed_hosts = allowed_hosts
        self._options = session
        self._client = client or SandboxClient(endpoint, api_key=api_key, profile=profile)
        self._owns_client = client is None
        self.files = SandboxFiles(self._client, self._made)
        self._ends_with_block = True
        self._lock = threading.Lock()  # protects _id while the sandbox is made
        self._id = ""
        self._ended = False
        self._closed = False

    @classmethod
    def create(
        cls,
        template: str = "",
        *,
        image: str = "",
        runtime: str = "",
        memory: float | str | None = None,
        cpus: float | str | None = None,
        limits: Limits | None = None,
        allowed_hosts: Sequence[str] | None = None,
        client: SandboxClient | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        profile: str | None = None,
        **options: Unpack[SandboxOptions],
    ) -> Sandbox:
        """A sandbox that is made at once; without a block, :meth:`close` kills it."""
        sandbox = cls(
            template,
            image=image,
            runtime=runtime,
            memory=memory,
            cpus=cpus,
            limits=limits,
            allowed_hosts=allowed_hosts,
            client=client,
            endpoint=endpoint,
            api_key=api_key,
            profile=profile,
            **options,
        )
        return sandbox.__enter__()

    @classmethod
    def connect(
        cls,
        session_id: str,
        *,
        client: SandboxClient | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        profile: str | None = None,
    ) -> Sandbox:
        """An existing sandbox; leaving its block does not kill it."""
        sandbox = cls(client=client, endpoint=endpoint, api_key=api_key, profile=profile)
        sandbox._id = session_id
        sandbox._ends_with_block = False
        try:
            requests.by_id(session_id)
            info = sandbox.info()
            if info.phase == "ended":
                raise errors.SessionNotFound(
                    f"sandbox {session_id} has ended: {info.ended_reason}",
                    hint="Sandbox.create() makes another one",
                )
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    @classmethod
    def list(
        cls,
        *,
        ended: bool = False,
        client: SandboxClient | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        profile: str | None = None,
    ) -> Sequence[SessionInfo]:
        """The sandboxes of this client's user; with ``ended`` also those that ended in a day."""
        if client is not None:
            return client.list_sessions(ended=ended)
        with SandboxClient(endpoint, api_key=api_key, profile=profile) as own:
            return own.list_sessions(ended=ended)

    @property
    def client(self) -> SandboxClient:
        """Its client, for operations that have no method here."""
        return self._client

    @property
    def id(self) -> str:
        """The id of its session; empty until it is made."""
        return self._id

    def _made(self) -> str:
        """The id of its session, which is made now if there is none yet."""
        if self._id:
            return self._id
        with self._lock:
            if self._ended or self._closed:
                raise errors.ClientClosed
            if not self._id:
                if self._image:
                    self._options["template"] = self._template_of_image()
                self._id = self._client.create_session(
                    self._runtime, self._allowed_hosts, **self._options
                )
            return self._id

    def _template_of_image(self) -> str:
        """A template with nothing but the image, under a name derived from it."""
        name = templates.name_for_image(self._image)
        try:
            self._client.get_template(name)
        except errors.TemplateNotFound:
            self._client.apply_template({"name": name, "rootfs": f"image:{self._image}"})
        return name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._id or 'not made yet'})"

    def __enter__(self) -> Sandbox:
        try:
            self._made()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill it if it was made here, and close the client if it is its own."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._ends_with_block:
                self.kill()
        finally:
            if self._owns_client:
                self._client.close()

    # Code and commands.

    def run(
        self,
        code: str | bytes,
        language: Language = "bash",
        timeout: float = 30,
        *,
        stdin: Content | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run source code; see :meth:`SandboxClient.run`."""
        session_id = self._made()
        return self._client.run(
            code, language, timeout, session_id=session_id, stdin=stdin, **options
        )

    def exec(
        self,
        command: str | Sequence[str],
        timeout: float = 30,
        *,
        stdin: Content | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run a command and collect its output; text is for the shell, a list for no shell."""
        session_id = self._made()
        return self._client.exec(session_id, command, timeout, stdin=stdin, **options)

    def exec_events(
        self,
        command: str | Sequence[str],
        timeout: float = 300,
        *,
        stdin: Content | None = None,
        **options: Unpack[ExecOptions],
    ) -> Generator[ExecEvent]:
        """Run a command while iterating over its output and, last, its exit."""
        session_id = self._made()
        events = self._client.exec_events(session_id, command, timeout, stdin=stdin, **options)
        with contextlib.closing(events):
            yield from events

    def exec_stream(self, command: str | Sequence[str], timeout: float = 300) -> Generator[str]:
        """Run a command while iterating over its standard output as text."""
        session_id = self._made()
        pieces = self._client.exec_stream(session_id, command, timeout)
        with contextlib.closing(pieces):
            yield from pieces

    def start(
        self,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        language: Language | None = None,
        **options: Unpack[ExecOptions],
    ) -> Run:
        """Start a command that runs on without us; return its handle."""
        session_id = self._made()
        return self._client.start(session_id, command, timeout, language=language or "", **options)

    def open(
        self,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        stdin: bool = True,
        **options: Unpack[ExecOptions],
    ) -> Process:
        """Start a program to write to and read from while it runs; it ends with the handle."""
        session_id = self._made()
        return self._client.open(session_id, command, timeout, stdin=stdin, **options)

    def terminal(
        self,
        program: str | Sequence[str] | None = None,
        rows: int = 24,
        columns: int = 80,
        *,
        timeout: float = 0,
        **options: Unpack[ExecOptions],
    ) -> Process:
        """Start a program on a terminal: by default ``bash``, or ``sh`` where there is none."""
        session_id = self._made()
        return self._client.terminal(session_id, program, rows, columns, timeout=timeout, **options)

    def transcript(self, start: int = 0, *, follow: bool = False) -> Generator[ExecEvent]:
        """Iterate over what all its programs printed; see :meth:`SandboxClient.transcript`."""
        events = self._client.transcript(self._made(), start, follow=follow)
        with contextlib.closing(events):
            yield from events

    def context(self, language: ContextLanguage = "python", *, cwd: str = "") -> Context:
        """Start a program that keeps its variables between runs."""
        return self._client.create_context(self._made(), language, cwd=cwd)

    def pip_install(self, packages: Sequence[str], *, timeout: float = 120) -> ExecResult:
        """Install Python packages (``["requests>=2.28"]``); the next import finds them."""
        return self._client.pip_install(self._made(), packages, timeout=timeout)

    def expose(self, port: int, host: str = exposures.LOOPBACK) -> ExposedPort:
        """Make a port reachable on a URL with a token; the server need not run yet."""
        exposed = self._client.expose(self._made(), port, host)
        return ExposedPort(self._client, exposed)

    # Its life.

    def info(self) -> SessionInfo:
        """Its runtime, limits, phase, and until when it lives."""
        return self._client.get_session(self._made())

    def extend(self, lifetime: float) -> SessionInfo:
        """Let it live ``lifetime`` seconds from now."""
        return self._client.extend_session(self._made(), lifetime)

    def egress(self) -> Egress:
        """What it may reach, and what it was refused."""
        return self._client.egress(self._made())

    def update_allowed_hosts(self, hosts: Sequence[str]) -> Sequence[str]:
        """Replace what it may reach; what is in effect."""
        return self._client.update_allowed_hosts(self._made(), hosts)

    def snapshot(self, name: str, *, replace: bool = False) -> Snapshot:
        """Save its /workspace; ``snapshot=name`` begins another sandbox with it."""
        return self._client.save_snapshot(self._made(), name, replace=replace)

    def pause(self) -> None:
        """Freeze everything in it until it is resumed."""
        self._client.pause_session(self._made())

    def resume(self) -> None:
        """Let it go on where it stopped."""
        self._client.resume_session(self._made())

    def kill(self) -> None:
        """End it and everything in it; nothing happens if it has ended, or was never made."""
        with self._lock:
            self._ended = True
            if self._id:
                with contextlib.suppress(errors.SessionNotFound):
                    self._client.destroy_session(self._id)


class SandboxFiles:
    """The files of one sandbox. Relative paths are below /workspace."""

    def __init__(self, client: SandboxClient, made: Callable[[], str]) -> None:
        self._client = client
        self._made = made  # gives the id of the session

    def read(self, path: str) -> str:
        """A file as text; invalid UTF-8 is replaced."""
        return self.read_bytes(path).decode("utf-8", "replace")

    def read_bytes(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """A file, or ``length`` bytes of it."""
        session_id = self._made()
        return self._client.read_bytes(session_id, path, offset=offset, length=length)

    def read_chunks(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> Generator[bytes]:
        """Iterate over a file in constant memory."""
        session_id = self._made()
        chunks = self._client.read_chunks(session_id, path, offset=offset, length=length)
        with contextlib.closing(chunks):
            yield from chunks

    def write(
        self, path: str, content: Content, *, append: bool = False, mode: int | None = None
    ) -> int:
        """Write text, bytes, an open binary file or an iterable of them; return the byte count."""
        session_id = self._made()
        return self._client.write_file(session_id, path, content, append=append, mode=mode)

    def list(self, path: str = "/workspace", *, depth: int | None = 1) -> Sequence[FileEntry]:
        """The entries of a folder, and below it down to ``depth``; None means all."""
        session_id = self._made()
        return self._client.list_files(session_id, path=path, depth=depth, directories=True)

    def stat(self, path: str, *, follow: bool = False) -> FileEntry:
        """The description of a file, or with ``follow`` of a link's target."""
        session_id = self._made()
        return self._client.stat(session_id, path, follow=follow)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or with ``recursive`` a folder and its content."""
        session_id = self._made()
        self._client.remove(session_id, path, recursive=recursive)

    def rename(self, path: str, to: str) -> None:
        """Give a file another path."""
        self._client.rename(self._made(), path, to)

    def mkdir(self, path: str, *, exist_ok: bool = True) -> None:
        """Make a folder and those above it."""
        self._client.mkdir(self._made(), path, exist_ok=exist_ok)

    def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link, replacing a file or link of that name."""
        self._client.symlink(self._made(), path, target)

    def chmod(self, path: str, mode: int) -> None:
        """Change its permissions."""
        self._client.chmod(self._made(), path, mode)

    def upload(self, source: str | Path | BinaryIO, path: str) -> Copied:
        """Make ``path`` a copy of a local file or folder; see :meth:`SandboxClient.upload`."""
        return self._client.upload(self._made(), source, path)

    def download(self, path: str, target: str | Path | BinaryIO) -> Copied:
        """Make a local file or folder a copy of ``path``."""
        return self._client.download(self._made(), path, target)


class ExposedPort:
    """A port of a sandbox that can be reached on the gateway's machine."""

    def __init__(self, client: SandboxClient, exposed: Exposed) -> None:
        self._client = client
        self.info = exposed
        self.url = exposed.url
        """With the token, for a browser or ``curl``: anyone who has it can use the service."""
        self.base_url = exposed.base_url
        self.headers: Mapping[str, Any] = exposed.headers

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    def wait(self, timeout: float = 30) -> ExposedPort:
        """Wait until a server takes connections there; TimedOut if none does."""
        info = self.info
        self._client.wait_for_port(info.session_id, info.port, info.host, timeout=timeout)
        return self
