"""A sandbox as behaviours use it: the guest's operations with bounded waits, nothing hidden."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from k8e import errors
from k8e.conformance.outcomes import BrokenPromise
from k8e.guest import wire
from k8e.guest.results import ShowRecords
from k8e.link import Channel, Link, request
from k8e.runtimes.base import Guest

PATIENCE = 90.0
"""Seconds for anything that takes a few at most: on a busy machine the slowest took 40."""
PYTHON = "/usr/bin/python3"
TIMES = (1.0, 5.0, 20.0)
"""Seconds for a time-out that is to be reached only after a program has begun."""


async def with_time(check: Callable[[float], Awaitable[None]]) -> None:
    """Run a check with a short time-out, and again with a longer one on a busy machine."""
    for seconds in TIMES[:-1]:
        try:
            await check(seconds)
        except (BrokenPromise, errors.K8eError, OSError):
            continue
        return
    await check(TIMES[-1])


@dataclass
class Outcome:
    """The outcome of a program: its output so far, and how it ended."""

    stdout: bytes = b""
    stderr: bytes = b""
    exit: dict[str, Any] = field(default_factory=dict[str, Any])
    shown: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Results, in a context."""

    @property
    def code(self) -> int:
        return int(self.exit["code"])

    @property
    def status(self) -> str:
        return str(self.exit["status"])

    @property
    def text(self) -> str:
        return self.stdout.decode()

    def story(self) -> str:
        """Everything that may explain a surprise."""
        return f"exit {self.exit}, stdout {self.stdout[-400:]!r}, stderr {self.stderr[-400:]!r}"


class OperationStream:
    """One operation that is under way. Frames wait in a queue until they are read."""

    def __init__(self, *, generous: bool = True) -> None:
        self.lost = asyncio.Event()
        self.generous = generous
        """Whether output is acknowledged as soon as it is read."""
        self._frames: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self._room = wire.WINDOW
        self._grown = asyncio.Event()
        self._ended = False
        self._channel: Channel | None = None

    def open(self, link: Link, call: dict[str, Any]) -> OperationStream:
        self._channel = link.open(call, self._on_frame, self._on_lost)
        return self

    def _on_frame(self, kind: int, body: bytes) -> None:
        if kind == wire.CREDIT:
            self._room += wire.CREDIT_BODY.unpack(body)[0]
            self._grown.set()
            return
        if kind in (wire.EXIT, wire.ERROR):
            self._ended = True
            self._grown.set()
        self._frames.put_nowait((kind, body))

    def _on_lost(self) -> None:
        self.lost.set()
        self._ended = True
        self._grown.set()
        self._frames.put_nowait((0, b""))

    async def next(self) -> tuple[int, bytes]:
        """The next frame; the error of an ERROR frame, and GuestFailed when the link is lost."""
        async with asyncio.timeout(PATIENCE):
            kind, body = await self._frames.get()
        if not kind:
            raise errors.GuestFailed("the link to the guest was lost")
        if kind == wire.ERROR:
            raise errors.from_wire(wire.unpack_dict(body))
        numbered = kind in (wire.OUT, wire.ERR, wire.SHOW)
        counted = len(body) - wire.SEQ.size if numbered else len(body)
        if self.generous and (numbered or kind == wire.DATA):
            self.credit(counted)
        return kind, body

    async def result(self) -> dict[str, Any]:
        kind, body = await self.next()
        if kind != wire.RESULT:
            raise errors.GuestFailed(f"frame {kind} where a result was due")
        return wire.unpack_dict(body)

    def credit(self, count: int) -> None:
        self.send(wire.CREDIT, wire.CREDIT_BODY.pack(count))

    def send(self, kind: int, body: bytes = b"") -> None:
        if self._channel is not None:
            self._channel.send(kind, body)

    async def feed(self, kind: int, data: bytes) -> None:
        """Send bytes as the guest grants room for them, for as long as it listens."""
        view = memoryview(data)
        while view:
            while self._room <= 0 and not self._ended:
                self._grown.clear()
                async with asyncio.timeout(PATIENCE):
                    await self._grown.wait()
            if self._ended:
                return
            part = view[: min(self._room, wire.CHUNK)]
            self._room -= len(part)
            self.send(kind, bytes(part))
            view = view[len(part) :]

    def cancel(self) -> None:
        self.send(wire.CANCEL)


class Program(OperationStream):
    """A program that was started or attached to."""

    def __init__(self, *, generous: bool = True) -> None:
        super().__init__(generous=generous)
        self.info: dict[str, Any] = {}
        self.first_seq = -1
        self.outcome = Outcome()
        self._records = ShowRecords()

    @property
    def id(self) -> str:
        return str(self.info["id"])

    async def take(self) -> bool:
        """Take one frame of output; False when the program has ended."""
        kind, body = await self.next()
        if kind == wire.EXIT:
            self.outcome.exit = wire.unpack_dict(body)
            return False
        if self.first_seq < 0:
            self.first_seq = wire.SEQ.unpack_from(body)[0]
        if kind == wire.OUT:
            self.outcome.stdout += body[wire.SEQ.size :]
        elif kind == wire.SHOW:
            self.outcome.shown += self._records.feed(*wire.numbered(body))
        else:
            self.outcome.stderr += body[wire.SEQ.size :]
        return True

    async def until(self, text: bytes, times: int = 1) -> None:
        """Take output until ``text`` has been printed ``times`` times."""
        while self.outcome.stdout.count(text) < times:
            if not await self.take():
                raise errors.GuestFailed(f"{text!r} never came: {self.outcome.story()}")

    async def finish(self) -> Outcome:
        while await self.take():
            pass
        return self.outcome

    async def type(self, text: bytes) -> None:
        await self.feed(wire.STDIN, text)

    def end_input(self) -> None:
        self.send(wire.STDIN_END)


class Sandbox:
    """A live sandbox with a bound session."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.left_out: tuple[str, ...] = ()
        """What could not be done before it had a session."""

    async def is_gone(self) -> bool:
        try:
            await self.call("ping")
        except (errors.K8eError, OSError):
            return True
        return False

    # Programs.

    async def start(
        self, argv: list[str] | None = None, *, generous: bool = True, **call: Any
    ) -> Program:
        """Start a program and return when the guest says that it runs."""
        if argv is not None:
            call["argv"] = argv
        program = Program(generous=generous)
        program.open(await self.guest.connect(), {"op": "exec", **call})
        program.info = await program.result()
        return program

    async def attach(self, exec_id: str, *, generous: bool = True, **call: Any) -> Program:
        program = Program(generous=generous)
        program.open(await self.guest.connect(), {"op": "attach", "id": exec_id, **call})
        program.info = await program.result()
        return program

    async def run(self, argv: list[str] | None = None, **call: Any) -> Outcome:
        return await (await self.start(argv, **call)).finish()

    async def shell(self, script: str, **call: Any) -> Outcome:
        return await self.run(["/bin/bash", "-c", script], **call)

    async def python(self, script: str, *arguments: str, **call: Any) -> Outcome:
        return await self.run([PYTHON, "-I", "-c", script, *arguments], **call)

    async def describe(self, exec_id: str) -> dict[str, Any]:
        """The guest's description of one of its execs."""
        for item in (await self.call("execs"))["execs"]:
            if item["id"] == exec_id:
                return item
        raise errors.ExecNotFound(exec_id)

    # Files.

    async def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        link = await self.guest.connect()
        return await request(link, {"op": op, **arguments}, seconds=PATIENCE)

    async def write(self, path: str, *chunks: bytes, **call: Any) -> dict[str, Any]:
        return await self.write_all(path, chunks, **call)

    async def write_all(self, path: str, chunks: Iterable[bytes], **call: Any) -> dict[str, Any]:
        upload = OperationStream().open(
            await self.guest.connect(), {"op": "write", "path": path, **call}
        )
        await upload.result()
        for chunk in chunks:
            await upload.feed(wire.DATA, chunk)
        upload.send(wire.END)
        return await upload.result()

    async def read(self, path: str, **call: Any) -> bytes:
        download = OperationStream().open(
            await self.guest.connect(), {"op": "read", "path": path, **call}
        )
        await download.result()
        parts: list[bytes] = []
        while True:
            kind, body = await download.next()
            if kind == wire.END:
                return b"".join(parts)
            parts.append(body)

    async def list(self, path: str, **call: Any) -> list[dict[str, Any]]:
        listing = OperationStream().open(
            await self.guest.connect(), {"op": "list", "path": path, **call}
        )
        await listing.result()
        entries: list[dict[str, Any]] = []
        while True:
            kind, body = await listing.next()
            if kind == wire.END:
                return entries
            entries += wire.unpack(body)
