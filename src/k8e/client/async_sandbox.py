"""A sandbox as one object: a session, and everything that can be done in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Unpack, cast

from k8e import errors
from k8e.client import exposures, requests, templates
from k8e.client.async_contexts import AsyncContext
from k8e.client.async_processes import AsyncProcess
from k8e.client.async_runs import AsyncRun
from k8e.client.asynchronous import AsyncSandboxClient
from k8e.client.exposures import Exposed
from k8e.client.operations import Copied
from k8e.client.requests import (
    AsyncContent,
    ContextLanguage,
    ExecOptions,
    Language,
    Limits,
    SandboxOptions,
    SessionOptions,
)
from k8e.client.results import Egress, ExecEvent, ExecResult, FileEntry, SessionInfo
from k8e.client.snapshots import Snapshot


class AsyncSandbox:
    """A sandbox: made at the start of a ``with`` block, or when it is first used.

        async with AsyncSandbox(memory="2G") as sb:
            print((await sb.run("print(1 + 1)", "python")).stdout)

    The end of the block kills it. A sandbox from :meth:`connect` lives on.

    Args:
        template: what it is made from; see :meth:`AsyncSandboxClient.list_templates`.
        image: the image that its root file system comes from. A template is kept for each image,
            which needs the role ``admin``.
        runtime: ``gvisor`` or ``container``; by default the best.
        memory: at most so many bytes, or text like ``"2G"``.
        cpus: at most so many CPUs.
        limits: further limits; see :class:`Limits`.
        allowed_hosts: what it may reach; None means the gateway's default.
        client: whose sandbox it is; by default it has a client of its own.
        endpoint: of its own client; see :class:`AsyncSandboxClient`.
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
        client: AsyncSandboxClient | None = None,
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
        self._client = client or AsyncSandboxClient(endpoint, api_key=api_key, profile=profile)
        self._owns_client = client is None
        self.files = AsyncSandboxFiles(self._client, self._made)
        self._ends_with_block = True
        self._lock = asyncio.Lock()  # protects _id while the sandbox is made
        self._id = ""
        self._ended = False
        self._closed = False

    @classmethod
    async def create(
        cls,
        template: str = "",
        *,
        image: str = "",
        runtime: str = "",
        memory: float | str | None = None,
        cpus: float | str | None = None,
        limits: Limits | None = None,
        allowed_hosts: Sequence[str] | None = None,
        client: AsyncSandboxClient | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        profile: str | None = None,
        **options: Unpack[SandboxOptions],
    ) -> AsyncSandbox:
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
        return await sandbox.__aenter__()

    @classmethod
    async def connect(
        cls,
        session_id: str,
        *,
        client: AsyncSandboxClient | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        profile: str | None = None,
    ) -> AsyncSandbox:
        """An existing sandbox; leaving its block does not kill it."""
        sandbox = cls(client=client, endpoint=endpoint, api_key=api_key, profile=profile)
        sandbox._id = session_id
        sandbox._ends_with_block = False
        try:
            requests.by_id(session_id)
            info = await sandbox.info()
            if info.phase == "ended":
                raise errors.SessionNotFound(
                    f"sandbox {session_id} has ended: {info.ended_reason}",
                    hint="Sandbox.create() makes another one",
                )
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    @classmethod
    async def list(
        cls,
        *,
        ended: bool = False,
        client: AsyncSandboxClient | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        profile: str | None = None,
    ) -> Sequence[SessionInfo]:
        """The sandboxes of this client's user; with ``ended`` also those that ended in a day."""
        if client is not None:
            return await client.list_sessions(ended=ended)
        async with AsyncSandboxClient(endpoint, api_key=api_key, profile=profile) as own:
            return await own.list_sessions(ended=ended)

    @property
    def client(self) -> AsyncSandboxClient:
        """Its client, for operations that have no method here."""
        return self._client

    @property
    def id(self) -> str:
        """The id of its session; empty until it is made."""
        return self._id

    async def _made(self) -> str:
        """The id of its session, which is made now if there is none yet."""
        if self._id:
            return self._id
        async with self._lock:
            if self._ended or self._closed:
                raise errors.ClientClosed
            if not self._id:
                if self._image:
                    self._options["template"] = await self._template_of_image()
                self._id = await self._client.create_session(
                    self._runtime, self._allowed_hosts, **self._options
                )
            return self._id

    async def _template_of_image(self) -> str:
        """A template with nothing but the image, under a name derived from it."""
        name = templates.name_for_image(self._image)
        try:
            await self._client.get_template(name)
        except errors.TemplateNotFound:
            await self._client.apply_template({"name": name, "rootfs": f"image:{self._image}"})
        return name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._id or 'not made yet'})"

    async def __aenter__(self) -> AsyncSandbox:
        try:
            await self._made()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill it if it was made here, and close the client if it is its own."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._ends_with_block:
                await self.kill()
        finally:
            if self._owns_client:
                await self._client.close()

    # Code and commands.

    async def run(
        self,
        code: str | bytes,
        language: Language = "bash",
        timeout: float = 30,
        *,
        stdin: AsyncContent | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run source code; see :meth:`AsyncSandboxClient.run`."""
        session_id = await self._made()
        return await self._client.run(
            code, language, timeout, session_id=session_id, stdin=stdin, **options
        )

    async def exec(
        self,
        command: str | Sequence[str],
        timeout: float = 30,
        *,
        stdin: AsyncContent | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run a command and collect its output; text is for the shell, a list for no shell."""
        session_id = await self._made()
        return await self._client.exec(session_id, command, timeout, stdin=stdin, **options)

    async def exec_events(
        self,
        command: str | Sequence[str],
        timeout: float = 300,
        *,
        stdin: AsyncContent | None = None,
        **options: Unpack[ExecOptions],
    ) -> AsyncGenerator[ExecEvent]:
        """Run a command while iterating over its output and, last, its exit."""
        session_id = await self._made()
        events = self._client.exec_events(session_id, command, timeout, stdin=stdin, **options)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def exec_stream(
        self, command: str | Sequence[str], timeout: float = 300
    ) -> AsyncGenerator[str]:
        """Run a command while iterating over its standard output as text."""
        session_id = await self._made()
        pieces = self._client.exec_stream(session_id, command, timeout)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def start(
        self,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        language: Language | None = None,
        **options: Unpack[ExecOptions],
    ) -> AsyncRun:
        """Start a command that runs on without us; return its handle."""
        session_id = await self._made()
        return await self._client.start(
            session_id, command, timeout, language=language or "", **options
        )

    async def open(
        self,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        stdin: bool = True,
        **options: Unpack[ExecOptions],
    ) -> AsyncProcess:
        """Start a program to write to and read from while it runs; it ends with the handle."""
        session_id = await self._made()
        return await self._client.open(session_id, command, timeout, stdin=stdin, **options)

    async def terminal(
        self,
        program: str | Sequence[str] | None = None,
        rows: int = 24,
        columns: int = 80,
        *,
        timeout: float = 0,
        **options: Unpack[ExecOptions],
    ) -> AsyncProcess:
        """Start a program on a terminal: by default ``bash``, or ``sh`` where there is none."""
        session_id = await self._made()
        return await self._client.terminal(
            session_id, program, rows, columns, timeout=timeout, **options
        )

    async def transcript(
        self, start: int = 0, *, follow: bool = False
    ) -> AsyncGenerator[ExecEvent]:
        """Iterate over what all its programs printed; see :meth:`AsyncSandboxClient.transcript`."""
        events = self._client.transcript(await self._made(), start, follow=follow)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def context(self, language: ContextLanguage = "python", *, cwd: str = "") -> AsyncContext:
        """Start a program that keeps its variables between runs."""
        return await self._client.create_context(await self._made(), language, cwd=cwd)

    async def pip_install(self, packages: Sequence[str], *, timeout: float = 120) -> ExecResult:
        """Install Python packages (``["requests>=2.28"]``); the next import finds them."""
        return await self._client.pip_install(await self._made(), packages, timeout=timeout)

    async def expose(self, port: int, host: str = exposures.LOOPBACK) -> AsyncExposedPort:
        """Make a port reachable on a URL with a token; the server need not run yet."""
        exposed = await self._client.expose(await self._made(), port, host)
        return AsyncExposedPort(self._client, exposed)

    # Its life.

    async def info(self) -> SessionInfo:
        """Its runtime, limits, phase, and until when it lives."""
        return await self._client.get_session(await self._made())

    async def extend(self, lifetime: float) -> SessionInfo:
        """Let it live ``lifetime`` seconds from now."""
        return await self._client.extend_session(await self._made(), lifetime)

    async def egress(self) -> Egress:
        """What it may reach, and what it was refused."""
        return await self._client.egress(await self._made())

    async def update_allowed_hosts(self, hosts: Sequence[str]) -> Sequence[str]:
        """Replace what it may reach; what is in effect."""
        return await self._client.update_allowed_hosts(await self._made(), hosts)

    async def snapshot(self, name: str, *, replace: bool = False) -> Snapshot:
        """Save its /workspace; ``snapshot=name`` begins another sandbox with it."""
        return await self._client.save_snapshot(await self._made(), name, replace=replace)

    async def pause(self) -> None:
        """Freeze everything in it until it is resumed."""
        await self._client.pause_session(await self._made())

    async def resume(self) -> None:
        """Let it go on where it stopped."""
        await self._client.resume_session(await self._made())

    async def kill(self) -> None:
        """End it and everything in it; nothing happens if it has ended, or was never made."""
        async with self._lock:
            self._ended = True
            if self._id:
                with contextlib.suppress(errors.SessionNotFound):
                    await self._client.destroy_session(self._id)


class AsyncSandboxFiles:
    """The files of one sandbox. Relative paths are below /workspace."""

    def __init__(self, client: AsyncSandboxClient, made: Callable[[], Awaitable[str]]) -> None:
        self._client = client
        self._made = made  # gives the id of the session

    async def read(self, path: str) -> str:
        """A file as text; invalid UTF-8 is replaced."""
        return (await self.read_bytes(path)).decode("utf-8", "replace")

    async def read_bytes(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """A file, or ``length`` bytes of it."""
        session_id = await self._made()
        return await self._client.read_bytes(session_id, path, offset=offset, length=length)

    async def read_chunks(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Iterate over a file in constant memory."""
        session_id = await self._made()
        chunks = self._client.read_chunks(session_id, path, offset=offset, length=length)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def write(
        self, path: str, content: AsyncContent, *, append: bool = False, mode: int | None = None
    ) -> int:
        """Write text, bytes, an open binary file or an iterable of them; return the byte count."""
        session_id = await self._made()
        return await self._client.write_file(session_id, path, content, append=append, mode=mode)

    async def list(self, path: str = "/workspace", *, depth: int | None = 1) -> Sequence[FileEntry]:
        """The entries of a folder, and below it down to ``depth``; None means all."""
        session_id = await self._made()
        return await self._client.list_files(session_id, path=path, depth=depth, directories=True)

    async def stat(self, path: str, *, follow: bool = False) -> FileEntry:
        """The description of a file, or with ``follow`` of a link's target."""
        session_id = await self._made()
        return await self._client.stat(session_id, path, follow=follow)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or with ``recursive`` a folder and its content."""
        session_id = await self._made()
        await self._client.remove(session_id, path, recursive=recursive)

    async def rename(self, path: str, to: str) -> None:
        """Give a file another path."""
        await self._client.rename(await self._made(), path, to)

    async def mkdir(self, path: str, *, exist_ok: bool = True) -> None:
        """Make a folder and those above it."""
        await self._client.mkdir(await self._made(), path, exist_ok=exist_ok)

    async def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link, replacing a file or link of that name."""
        await self._client.symlink(await self._made(), path, target)

    async def chmod(self, path: str, mode: int) -> None:
        """Change its permissions."""
        await self._client.chmod(await self._made(), path, mode)

    async def upload(self, source: str | Path | BinaryIO, path: str) -> Copied:
        """Make ``path`` a copy of a local file or folder; see :meth:`AsyncSandboxClient.upload`."""
        return await self._client.upload(await self._made(), source, path)

    async def download(self, path: str, target: str | Path | BinaryIO) -> Copied:
        """Make a local file or folder a copy of ``path``."""
        return await self._client.download(await self._made(), path, target)


class AsyncExposedPort:
    """A port of a sandbox that can be reached on the gateway's machine."""

    def __init__(self, client: AsyncSandboxClient, exposed: Exposed) -> None:
        self._client = client
        self.info = exposed
        self.url = exposed.url
        """With the token, for a browser or ``curl``: anyone who has it can use the service."""
        self.base_url = exposed.base_url
        self.headers: Mapping[str, Any] = exposed.headers

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def wait(self, timeout: float = 30) -> AsyncExposedPort:
        """Wait until a server takes connections there; TimedOut if none does."""
        info = self.info
        await self._client.wait_for_port(info.session_id, info.port, info.host, timeout=timeout)
        return self
