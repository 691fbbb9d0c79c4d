"""Dialling the guest of a pod: TLS, the pod's token, the key of the link, and then the link.

The gateway opens the connection and is its TLS server all the same (``guest/pod.py`` says why).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from k8e import errors
from k8e.guest import wire
from k8e.guest.pod import LONGEST_TOKEN, POD_PORT
from k8e.link import Link
from k8e.runtimes.kubernetes.identity import IdentityRefused, TokenExpired

log = logging.getLogger(__name__)

INTRODUCTION_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0


class GuestReplaced(Exception):
    """The guest has lost the key, or has another one: it is not the guest that it was."""


@dataclass(frozen=True)
class Introduction:
    """What a guest says of itself before it is trusted."""

    has_key: bool
    token: bytes


class _Introducing(asyncio.Protocol):
    """The first frame of a connection, whose other end has proved nothing yet."""

    def __init__(self) -> None:
        self.made: asyncio.Future[Introduction] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self._splitter = wire.Splitter(LONGEST_TOKEN + 1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._splitter.feed(data)
            if not frames:
                return
            (kind, _, body), *more = frames
            if more or self.made.done() or kind != wire.IDENTITY or body[:1] not in (b"\0", b"\1"):
                raise wire.WireError("the pod did not say who it is")
            self.made.set_result(Introduction(body[:1] == b"\1", body[1:]))
        except wire.WireError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the pod closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self.made.done():
            self.made.set_exception(error)
        if self.transport is not None:
            self.transport.abort()


Verify = Callable[[bytes], Awaitable[None]]
"""Raises IdentityRefused unless a token is that of the pod that was dialled."""


async def introduce(
    address: str, context: ssl.SSLContext, verify: Verify
) -> tuple[asyncio.Transport, Introduction]:
    """A connection to a pod that has proved which one it is; it waits for the key of its link."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(INTRODUCTION_SECONDS):
            await loop.sock_connect(opened, (address, POD_PORT))
            transport, protocol = await loop.connect_accepted_socket(
                _Introducing, opened, ssl=context, ssl_handshake_timeout=INTRODUCTION_SECONDS
            )
            said = await protocol.made
            await verify(said.token)
        return transport, said
    except BaseException:
        if transport is not None:
            transport.abort()
        opened.close()
        raise


class Dialler:
    """Keeps the link to the guest of one pod: dials it, and again whenever the link is lost."""

    def __init__(
        self,
        address: str,
        *,
        context: Callable[[], ssl.SSLContext],
        verify: Verify,
        key: bytes,
        is_taken: bool,
    ) -> None:
        """``key`` is that of the link, kept already; ``is_taken`` if the guest surely has it."""
        self._address, self._context, self._verify = address, context, verify
        self._key, self._is_taken = key, is_taken
        self._opened_at = float("-inf")
        self._link: Link | None = None
        self._changed = asyncio.Event()
        self._closed_because: Exception | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._why = ""
        self.on_breach: Callable[[str], None] | None = None
        """Called with what the guest did, when it breaks the protocol or is not who it was."""

    @property
    def link(self) -> Link | None:
        return self._link

    def start(self) -> None:
        """Dial in the background, until there is a link."""
        if self._closed_because is None and (self._dialling is None or self._dialling.done()):
            self._dialling = asyncio.create_task(self._dial())

    async def _dial(self) -> None:
        pause = FIRST_PAUSE
        if asyncio.get_running_loop().time() - self._opened_at < LONGEST_PAUSE:
            await asyncio.sleep(LONGEST_PAUSE)  # a guest that loses each link keeps nobody busy
        while self._closed_because is None:
            try:
                await self._open()
                return
            except TokenExpired as error:  # nothing is believed before there is a new one
                self._why = str(error)
            except (IdentityRefused, GuestReplaced) as error:
                self._breached(str(error))
                return
            except (OSError, EOFError, TimeoutError, wire.WireError, errors.K8eError) as error:
                self._why = str(error) or type(error).__name__
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _open(self) -> None:
        transport, said = await introduce(self._address, self._context(), self._verify)
        if self._is_taken and not said.has_key:
            transport.abort()
            raise GuestReplaced("its guest was started anew, and what ran in it is lost")
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_ready(link: Link) -> None:
            self._link, self._is_taken = link, True
            self._opened_at = asyncio.get_running_loop().time()
            if not ready.done():
                ready.set_result(None)
            self._changed.set()

        link = Link(self._key, on_ready, self._on_lost, on_breach=self._breached)
        transport.set_protocol(link)
        link.connection_made(transport)
        transport.write(wire.frame(wire.LINK_KEY, 0, b"" if said.has_key else self._key))
        try:
            async with asyncio.timeout(INTRODUCTION_SECONDS):
                await ready
        except BaseException:
            link.close()
            raise

    def _on_lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._changed.clear()
            self.start()

    def _breached(self, what: str) -> None:
        log.warning("the guest at %s broke the protocol: %s", self._address, what)
        if self.on_breach is not None:
            self.on_breach(what)

    async def ready(self, seconds: float) -> Link:
        """The live link; waits for it as long as a guest may take to answer."""
        if self._link is None and self._closed_because is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        if self._closed_because is not None:
            raise self._closed_because
        if self._link is None:
            why = f": {self._why}" if self._why else ""
            raise errors.GuestFailed(
                f"the guest in the pod did not answer within {seconds:g} seconds{why}"
            )
        return self._link

    def close(self, because: Exception) -> None:
        """Stop dialling; tasks that wait for the guest get the error ``because``."""
        self._closed_because = because
        self._changed.set()
        if self._dialling is not None and self._dialling is not asyncio.current_task():
            self._dialling.cancel()
        if self._link is not None:
            self._link.close()
