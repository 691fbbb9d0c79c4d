"""Programs that the gateway itself runs in a sandbox, as its user: input fed, output taken.

The sandbox is hostile: what it sends is bounded by credit, by the taker's own limit and in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k8e import errors
from k8e.guest import wire
from k8e.sessions.exchanges import Exchange, Open, decode, granted

GRACE = 15.0  # seconds that a guest has to end a program after its time-out
TAIL = 2000  # bytes of an error text that are kept
ENV = {
    "GZIP": "",
    "LC_ALL": "C.UTF-8",
    "LD_PRELOAD": "",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "TAR_OPTIONS": "",
}
"""So that a session's own variables do not change what these programs do."""


class NotStarted(Exception):
    """A program could not be started in the sandbox. Not an OSError: those are the host's own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.missing = isinstance(error, FileNotFoundError)


class _Exec(Exchange):
    def _failure(self, error: Exception) -> Exception:
        return NotStarted(error) if isinstance(error, OSError) else error


Take = Callable[[bytes], Awaitable[None]]
Feed = Callable[[int], Awaitable[bytes]]
"""Gives at most so many bytes; nothing at the end."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int
    timed_out: bool
    denials: tuple[str, ...]
    """What the session's egress policy refused meanwhile, as ``name:port``."""


async def _drop(data: bytes) -> None:
    """Take output that nobody wants."""


async def run(
    opening: Open,
    argv: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    feed: Feed | None = None,
    take: Take = _drop,
    hear: Take = _drop,
) -> Ended:
    """Run a program to its end.

    Args:
        opening: what starts it.
        argv: the program and its arguments; no shell is involved.
        seconds: after which it is killed.
        env: variables beside those of the session.
        cwd: where it starts; relative to the workspace.
        feed: gives its standard input.
        take: gets its standard output.
        hear: gets its standard error.

    Raises:
        NotStarted: it could not be started.
        GuestFailed: the guest does not answer, or with nonsense.
    """
    call: dict[str, Any] = {
        "op": "exec",
        "argv": list(argv),
        "env": {**ENV, **(env or {})},
        "cwd": cwd,
        "timeout": seconds,
        "stdin": feed is not None,
        "kill_on_disconnect": True,
        "own": True,  # it is not in the session's transcript
        "most_output": 1 << 62,  # what we asked for is no flood
        "kill_on_loss": True,  # a gateway that dies is the only one who would ever read it
    }
    try:
        async with asyncio.timeout(seconds + GRACE), _Exec(opening, call) as running:
            await running.result()
            return await _talk(running, feed, {wire.OUT: take, wire.ERR: hear})
    except TimeoutError:
        raise errors.GuestFailed(f"the guest did not end {argv[0]} in time") from None


async def _talk(running: Exchange, feed: Feed | None, takers: dict[int, Take]) -> Ended:
    room = wire.WINDOW
    while True:
        while feed is not None and room > 0:
            data = await feed(min(room, wire.CHUNK))
            if data:
                running.send(wire.STDIN, data)
                room -= len(data)
            else:
                running.send(wire.STDIN_END)
                feed = None
        frame = await running.receive()
        if frame.kind in takers:
            data = frame.body[wire.SEQ.size :]
            await takers[frame.kind](data)
            running.consumed(len(data))
        elif frame.kind == wire.EXIT:
            return _ended(frame.body)
        else:
            room += granted(frame)


def _ended(body: bytes) -> Ended:
    told = decode(body)
    code = told.get("code")
    if not isinstance(code, int) or not 0 <= code < 1 << 16:
        raise errors.GuestFailed("the guest reported no exit code")
    denials = [_denied(item) for item in told.get("denials") or ()]  # the gateway's own words
    return Ended(code, told.get("status") == "timed_out", tuple(dict.fromkeys(denials)))


def _denied(denial: dict[str, Any]) -> str:
    host = str(denial.get("name") or denial.get("address"))
    # A question for a name has the resolver's port, which says nothing.
    return host if denial.get("protocol") == "dns" else f"{host}:{denial.get('port')}"


class Tail:
    """The last words of a program."""

    def __init__(self) -> None:
        self._data = b""

    async def hear(self, data: bytes) -> None:
        self.add(data)

    def add(self, data: bytes) -> None:
        self._data = (self._data + data)[-TAIL:]

    def text(self) -> str:
        """On one line, with nothing in it that a terminal would act on."""
        lines = self._data.decode("utf-8", "replace").splitlines()
        joined = "; ".join(line.strip() for line in lines if line.strip())
        return "".join(char if char.isprintable() else "\ufffd" for char in joined)
