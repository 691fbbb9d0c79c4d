"""The host's end of the guest protocol: one connection, many operations at once.

The host listens and the guest dials, so a link comes back by itself after a restart of the gateway
and after a restore. The guest is hostile: its frames are bounded, its credit is counted, and the
first breach ends the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from k8e import errors
from k8e.guest import wire

log = logging.getLogger(__name__)

MAX_PUT_OFF = 8
"""Frames that wait for the end of a batch; with more of them the other side may begin."""


class Batch(threading.local):
    """Delays sends to the end of a batch: each is a system call that wakes another process.

    Input is handled in a batch, and frames that are sent meanwhile leave together at its end.
    Outside of a batch they leave at once. Each thread, and so each event loop, has its own.
    """

    def __init__(self) -> None:
        self._open = False
        self._later: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *_: object) -> None:
        self._open = False
        later, self._later = self._later, []
        for work in later:
            try:
                work()
            except Exception:  # of one operation; the others have nothing to do with it
                log.exception("what was put off failed")

    def afterwards(self, work: Callable[[], None]) -> None:
        if self._open:
            self._later.append(work)
        else:
            work()


batch = Batch()


class Outgoing:
    """The frames that wait to be sent on a connection."""

    __slots__ = ("_frames", "transport")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._frames: list[bytes] = []

    def send(self, kind: int, channel: int, body: bytes) -> None:
        self._frames += (wire.HEADER.pack(len(body), kind, channel), body)
        if len(self._frames) == 2:
            batch.afterwards(self._flush)
        elif len(self._frames) >= 2 * MAX_PUT_OFF:
            self._flush()

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and self.transport is not None and not self.transport.is_closing():
            self.transport.writelines(frames)

    @property
    def unread(self) -> int:
        """Bytes that the other side has not read yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0


NONCE_SIZE = 16
HANDSHAKE_SECONDS = 10.0
MAX_GREETING = 64  # bytes of a frame from somebody who has not proved itself
MAX_STRANGERS = 4  # connections of one sandbox that have not proved themselves
KEY_SIZE = 32
# What a guest may send that counts against the credit it was given, and the bytes before the data.
_COUNTED = {wire.OUT: wire.SEQ.size, wire.ERR: wire.SEQ.size, wire.SHOW: wire.SEQ.size}
_COUNTED[wire.DATA] = 0

MAX_TURN = 256
"""Frames of one guest that are handled before all others have their turn: they may be of nine bytes
each, and a read has room for thousands."""
MAX_STRAYS = 1 << 18
"""Frames for operations that have ended. Some cross with the end of an operation; a guest
that sends so many within ``STRAY_SECONDS`` only keeps us busy."""
STRAY_SECONDS = 10.0
MAX_UNREAD = 32 << 20
"""Bytes that a guest has not read yet, above which it is asked for nothing more."""
MAX_UNREAD_EVER = 4 * MAX_UNREAD
"""The same, above which its link is given up: the operations that it has cannot go on."""

FrameSink = Callable[[int, bytes], None]


class Channel:
    """One operation on the guest. Frames arrive at ``on_frame``; a lost link at ``on_lost``."""

    __slots__ = ("_allowance", "_link", "number", "on_frame", "on_lost")

    def __init__(
        self,
        link: Link,
        number: int,
        *,
        window: int,
        on_frame: FrameSink,
        on_lost: Callable[[], None],
    ) -> None:
        self.number = number
        self.on_frame = on_frame
        self.on_lost = on_lost
        self._link = link
        self._allowance = window

    def send(self, kind: int, body: bytes = b"") -> None:
        if kind == wire.CREDIT:
            count = wire.CREDIT_BODY.unpack(body)[0]
            if not count:
                return  # for nothing, and there could be any number of them
            self._allowance += count
            if self._allowance > wire.MAX_WINDOW:
                raise errors.InvalidRequest("the client gave more credit than it may")
        self._link.send(kind, self.number, body)

    def close(self) -> None:
        """Stop listening to this operation; the guest is told separately, by CANCEL."""
        self._link.forget(self.number)

    def receive(self, kind: int, body: bytes) -> None:
        overhead = _COUNTED.get(kind)
        if overhead is not None:
            # An empty frame would cost the guest nothing, and a client's memory all the same.
            if len(body) <= overhead:
                raise wire.WireError("the guest sent an empty frame")
            self._allowance -= len(body) - overhead
            if self._allowance < 0:
                raise wire.WireError("the guest sent more than it was given credit for")
        self.on_frame(kind, body)


class Link(asyncio.Protocol):
    """One connection of a guest, from its handshake to its loss."""

    def __init__(
        self,
        key: bytes,
        on_ready: Callable[[Link], None],
        on_lost: Callable[[Link], None],
        *,
        strangers: set[Link] | None = None,
        on_breach: Callable[[str], None] | None = None,
    ) -> None:
        """``strangers`` are the connections of a sandbox that have not authenticated yet.

        ``on_breach`` hears what a guest did that no guest of ours does.
        """
        self._key = key
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_breach = on_breach
        self._strangers = set[Link]() if strangers is None else strangers
        self._splitter = wire.Splitter(MAX_GREETING)
        self._channels: dict[int, Channel] = {}
        self._next = 1
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        self._greeted = False
        self._ready = False
        self._transport: asyncio.Transport | None = None
        self._outgoing = Outgoing()
        self._patience: asyncio.TimerHandle | None = None
        self._left: memoryview | None = None  # of what was read, for the next turn
        self._choked = False
        self._strays = 0
        self._strays_since = 0.0

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._outgoing.transport = cast("asyncio.Transport", transport)
        self._strangers.add(self)
        if len(self._strangers) > MAX_STRANGERS:  # all sessions share the gateway's descriptors
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(MAX_UNREAD)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(HANDSHAKE_SECONDS, self._transport.abort)

    def data_received(self, data: bytes | memoryview) -> None:
        try:
            with batch:
                frames, left = self._splitter.take(data, MAX_TURN)
                for kind, number, body in frames:
                    if self._ready:
                        channel = self._channels.get(number)
                        if channel is not None:
                            channel.receive(kind, body)
                        else:
                            self._count_stray()
                    else:
                        self._greet(kind, body)
        except wire.WireError as error:
            self.close()
            if self._ready and self._on_breach is not None:
                self._on_breach(str(error))
            return
        if left is not None and self._transport is not None:
            self._left = left
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Handle more of the bytes that were read, after other tasks had their turn."""
        left, self._left = self._left, None
        if left is None or self._transport is None or self._transport.is_closing():
            return
        try:
            self.data_received(left)
        except BaseException:
            self.close()  # asyncio would do so for data that has just come
            raise
        if self._left is None:
            self._transport.resume_reading()

    def _count_stray(self) -> None:
        self._strays += 1
        if self._strays >= MAX_STRAYS:
            now = asyncio.get_running_loop().time()
            if now < self._strays_since + STRAY_SECONDS:
                raise wire.WireError("the guest goes on answering what nobody asked")
            self._strays, self._strays_since = 0, now

    def pause_writing(self) -> None:
        self._choked = True

    def resume_writing(self) -> None:
        self._choked = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = None
        if self._patience is not None:
            self._patience.cancel()
        self._strangers.discard(self)
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.on_lost()
        if self._ready:
            self._on_lost(self)
        self._ready = False

    def _greet(self, kind: int, body: bytes) -> None:
        if not self._greeted and kind == wire.HELLO and len(body) == NONCE_SIZE:
            self._greeted = True
            answer = self._nonce + wire.proof(self._key, body, b"host")
            self.send(wire.WELCOME, 0, answer)
        elif (
            self._greeted
            and kind == wire.PROOF
            and wire.equal(body, wire.proof(self._key, self._nonce, b"guest"))
        ):
            self._ready = True
            self._splitter = wire.Splitter(wire.MAX_REPLY + wire.HEADER_SIZE)
            self._strangers.discard(self)
            if self._patience is not None:
                self._patience.cancel()
            self._on_ready(self)
        else:
            raise wire.WireError("the guest did not prove itself")

    # Called by the host's code.

    def send(self, kind: int, number: int, body: bytes) -> None:
        self._outgoing.send(kind, number, body)
        if self._choked and self._outgoing.unread > MAX_UNREAD_EVER:
            log.warning("a guest does not read what it is sent; its link is given up")
            self.close()

    def open(
        self,
        call: dict[str, Any],
        on_frame: FrameSink,
        on_lost: Callable[[], None],
        body: bytes = b"",
    ) -> Channel:
        """Start an operation; ``on_frame`` gets its RESULT or ERROR and whatever it streams.

        ``body`` is the call as ``wire.pack`` makes it, from whoever has done that already.
        """
        self.check_room()
        number = self._next
        self._next = number + 1 if number < 0xFFFFFFFF else 1
        window = int(call.get("window") or wire.WINDOW)
        channel = Channel(self, number, window=window, on_frame=on_frame, on_lost=on_lost)
        self._channels[number] = channel
        self.send(wire.CALL, number, body or wire.pack(call))
        return channel

    def check_room(self) -> None:
        """Raise GuestFailed while the guest does not read earlier frames."""
        if self._choked:
            raise errors.GuestFailed(
                f"the sandbox has more than {MAX_UNREAD >> 20} MiB waiting that it does not read",
                hint="wait until it has caught up, or destroy the session",
            )

    def forget(self, number: int) -> None:
        self._channels.pop(number, None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Listener:
    """Waits for one sandbox's guest to dial, and holds its newest link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: asyncio.Server | None = None
        self._link: Link | None = None
        self._strangers: set[Link] = set()
        self._changed = asyncio.Event()
        self._closed_because: Exception | None = None
        self.on_breach: Callable[[str], None] | None = None
        """Called with what the guest did, when it breaks the protocol."""

    @staticmethod
    def prepare(folder: Path, *, owner: int) -> None:
        """Make the directory that is mounted into the sandbox, with a fresh key."""
        folder.mkdir()
        folder.chmod(0o755)  # whatever our umask is: the guest has a uid of its own
        key = folder / "key"
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
            file.write(secrets.token_bytes(KEY_SIZE))
        os.chown(key, owner, owner)

    async def listen(self) -> None:
        """Bind the socket; after a restart this replaces that of the earlier gateway."""
        key = (self._folder / "key").read_bytes()
        path = self._folder / "sock"
        scratch = self._folder / f"sock.{os.getpid()}"
        owner = (self._folder / "key").stat().st_uid
        for stale in self._folder.glob("sock.*"):
            stale.unlink()

        def make() -> Link:
            return Link(
                key,
                self._on_ready,
                self._on_lost,
                strangers=self._strangers,
                on_breach=self._breached,
            )

        # Bound under another name first: the guest may only ever see the socket with its final
        # owner and mode.
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(make, scratch)
        scratch.chmod(0o600)
        os.chown(scratch, owner, owner)
        scratch.rename(path)

    def _on_ready(self, link: Link) -> None:
        old, self._link = self._link, link
        if old is not None:
            old.close()
        self._changed.set()

    def _on_lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._changed.clear()

    def _breached(self, what: str) -> None:
        log.warning("the guest in %s broke the protocol: %s", self._folder.parent.name, what)
        if self.on_breach is not None:
            self.on_breach(what)

    @property
    def link(self) -> Link | None:
        return self._link

    async def ready(self, seconds: float) -> Link:
        """The live link; waits for it as long as a guest may take to dial."""
        if self._link is None and self._closed_because is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        if self._closed_because is not None:
            raise self._closed_because
        if self._link is None:
            raise errors.GuestFailed(f"the guest did not connect within {seconds:g} seconds")
        return self._link

    def close(self, because: Exception) -> None:
        """Stop listening; tasks that wait for the guest get the error ``because``."""
        self._closed_because = because
        self._changed.set()
        if self._server is not None:
            self._server.close()
        if self._link is not None:
            self._link.close()


async def request(link: Link, call: dict[str, Any], *, seconds: float = 30.0) -> dict[str, Any]:
    """Make one call and return its answer."""
    answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def on_frame(kind: int, body: bytes) -> None:
        if answer.done():
            return
        try:
            value = wire.unpack_dict(body)
        except wire.WireError as error:
            answer.set_exception(errors.GuestFailed(f"the guest answered nonsense: {error}"))
            return
        if kind == wire.RESULT:
            answer.set_result(value)
        else:
            answer.set_exception(errors.from_wire(value))

    def on_lost() -> None:
        if not answer.done():
            answer.set_exception(errors.GuestFailed("the link to the guest was lost"))

    channel = link.open(call, on_frame, on_lost)
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise errors.GuestFailed(f"the guest did not answer {call.get('op')!r} in time") from None
    finally:
        channel.close()
