"""HTTP between a client and a server in a sandbox, neither of which is trusted.

Both sides are read and written by h11, so that what one calls a request or an answer is one for the
other too. Each request has a connection of its own into the sandbox: what a server sends beside its
answer is part of no other. Only bytes that are on their way are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import logging
import os
from collections.abc import Callable
from typing import Any, cast

import h11

from k8e import errors, websockets
from k8e.bounded_sockets import SLOW_SECONDS, Gone
from k8e.gateway.ports import access
from k8e.gateway.ports.access import Admitted, PortAccess, PortRefusal
from k8e.gateway.ports.listener import ClientSocket
from k8e.gateway.ports.tunnel import BrokenTunnel, Tunnel
from k8e.http_headers import Headers
from k8e.http_messages import CRUMBS, CRUMBS_PAUSE, TURN, HttpStream, joined

log = logging.getLogger(__name__)

MAX_HEAD = 64 << 10
"""Bytes of a request's or an answer's head."""
HEAD_SECONDS = 30.0
"""How long a client may take for a request's head, or wait before its next request."""
LINGER_SECONDS = 2.0
"""How long we take bytes from a client that we will not use."""
LINGER_BYTES = 4 << 20
VERSIONS = (b"1.0", b"1.1")
MAX_INFORMATION = 16  # answers before the answer, such as 100 and 103

OpenTunnel = Callable[[], Tunnel]


class Visit:
    """One client's requests, one after the other."""

    def __init__(
        self,
        door: PortAccess,
        visitor: ClientSocket,
        open_tunnel: OpenTunnel,
        admit: Callable[[], bool],
    ) -> None:
        """``admit`` is told that the client has shown the token; False if there is no room."""
        self._door = door
        self._visitor = visitor
        self._open_tunnel = open_tunnel
        self._admit = admit
        self._http = HttpStream(h11.SERVER, max_incomplete_event_size=MAX_HEAD)

    async def run(self) -> None:
        """Serve until either side has had enough."""
        try:
            while await self._serve():
                self._http.start_next_cycle()
            await self._linger()
            self._visitor.close()
        except (Gone, TimeoutError):
            self._visitor.abort()
        except (h11.ProtocolError, BrokenTunnel) as error:
            log.debug("%s: a connection was cut off: %s", self._door.authority.decode(), error)
            self._visitor.abort()
        except BaseException:
            self._visitor.abort()
            raise

    async def _serve(self) -> bool:
        """Answer one request; whether another may follow."""
        try:
            request = await self._next_request()
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint or 400
            await self._refuse(PortRefusal(status, f"This is not HTTP as it should be: {error}"))
            return False
        if request is None:
            return False
        if self._http.their_http_version not in VERSIONS:
            await self._refuse(PortRefusal(505, "This service speaks HTTP/1.1."))
            return False
        verdict = access.judge(self._door, request)
        match verdict:
            case PortRefusal():
                await self._refuse(verdict)
            case access.Greeted():
                await self._send_page(access.greeting(self._door, verdict))
            case Admitted() if self._admit():
                await self._forward(verdict)
            case _:
                await self._refuse(PortRefusal(503, "This service has too many connections open."))
        with contextlib.suppress(h11.RemoteProtocolError):
            self._http.next_event()  # the end of a request without a body, where nobody read it
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _next_request(self) -> access.VisitRequest | None:
        async with asyncio.timeout(HEAD_SECONDS):
            event = await self._next_event()
        if not isinstance(event, h11.Request):
            return None
        headers = event.headers.raw_items()
        return access.VisitRequest(event.method, event.target, headers, self._visitor.user())

    async def _next_event(self) -> Any:
        """The next event of the client's side."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._visitor.receive())
        return event

    # Our own answers.

    async def _refuse(self, refused: PortRefusal) -> None:
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._send_page(access.refusal(refused))

    async def _send_page(self, page: access.PortPage) -> None:
        reason = http.HTTPStatus(page.status).phrase.encode()
        await self._send(h11.Response(status_code=page.status, headers=page.headers, reason=reason))
        if page.body:  # to a HEAD, h11 sends none of it
            await self._send(h11.Data(data=page.body))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: Any) -> None:
        await self._visitor.send(cast("bytes", self._http.send(event)))

    async def _linger(self) -> None:
        """Take the bytes that the client still sends, because a reset could overtake our answer."""
        if self._http.our_state not in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            return
        self._visitor.end()
        left = LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while left > 0 and (data := await self._visitor.receive()):
                    left -= len(data)

    # The sandbox's answers.

    async def _forward(self, admitted: Admitted) -> None:
        """Pass one request on, and its answer back."""
        try:
            async with self._open_tunnel() as tunnel:
                exchange = HttpExchange(self._http, self._visitor, tunnel, admitted)
                await exchange.run(self._next_event)
        except (BrokenTunnel, errors.K8eError, OSError, h11.ProtocolError) as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            if self._http.our_state is not h11.SEND_RESPONSE:
                raise BrokenTunnel(str(error)) from None  # half an answer has gone out already
            await self._refuse(_explain(error))


class HttpExchange:
    """One request and its answer, each passed on as it comes."""

    def __init__(
        self, http: h11.Connection, visitor: ClientSocket, tunnel: Tunnel, admitted: Admitted
    ) -> None:
        self._http = http
        self._visitor = visitor
        self._tunnel = tunnel
        self._admitted = admitted
        self._server = HttpStream(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)

    async def run(self, next_event: Callable[[], Any]) -> None:
        asked = self._admitted
        request = h11.Request(method=asked.method, target=asked.target, headers=asked.headers)
        await self._tunnel.send(self._server.send(request))
        if asked.websocket:  # the switch is only good when all of the request was said
            await self._feed_body(next_event)
        feeding = asyncio.create_task(self._feed(next_event))
        try:
            switched = await self._pass_answer()
        finally:
            feeding.cancel()
            await asyncio.wait((feeding,))
        if switched:
            client_said, server_said = (
                side.trailing_data[0] for side in (self._http, self._server)
            )
            await websockets.relay(
                self._visitor, self._tunnel, client_said=client_said, server_said=server_said
            )

    async def _feed(self, next_event: Callable[[], Any]) -> None:
        """Pass the request's body on; then, tell if the client does not wait for its answer."""
        try:
            if not self._admitted.websocket:
                await self._feed_body(next_event)
            await self._visitor.left.wait()
            raise Gone
        except TimeoutError:
            self._tunnel.fail(Gone())
        except (Gone, BrokenTunnel, errors.K8eError, OSError, h11.ProtocolError) as error:
            self._tunnel.fail(Gone() if isinstance(error, h11.ProtocolError) else error)

    async def _feed_body(self, next_event: Callable[[], Any]) -> None:
        events = size = 0
        while True:
            async with asyncio.timeout(SLOW_SECONDS):
                event = await next_event()
            if isinstance(event, h11.EndOfMessage):
                await self._to_server(h11.EndOfMessage())
                return
            if not isinstance(event, h11.Data):
                raise Gone
            await self._to_server(h11.Data(data=event.data))
            events += 1
            size += len(event.data)
            if events == TURN:  # what is here already comes without a moment for anybody else
                await asyncio.sleep(CRUMBS_PAUSE if size < CRUMBS else 0)
                events = size = 0

    async def _to_server(self, event: Any) -> None:
        await self._tunnel.send(cast("bytes", self._server.send(event)))

    async def _pass_answer(self) -> bool:
        """Send the answer on, piece by piece; whether the two now speak something else."""
        hints = 0
        async for event in joined(self._server, self._receive):
            if self._server.their_http_version not in VERSIONS:
                raise BrokenTunnel("it does not speak HTTP/1.1")
            match event:
                case h11.InformationalResponse(status_code=101):
                    await self._switch(event)
                    return True
                case h11.InformationalResponse():
                    hints += 1
                    if hints > MAX_INFORMATION:
                        raise BrokenTunnel("it sent too many answers before its answer")
                    await self._pass_hint(event)
                case h11.Response():
                    headers = access.answer_headers(event.headers.raw_items())
                    await self._send(
                        h11.Response(
                            status_code=event.status_code, headers=headers, reason=event.reason
                        )
                    )
                case bytes():
                    await self._send(h11.Data(data=event))
                case h11.EndOfMessage():
                    await self._send(h11.EndOfMessage())
                    return False
                case _:
                    raise BrokenTunnel("it went on after its answer")
        return False

    async def _receive(self) -> bytes:
        data = await self._tunnel.receive()
        silent = self._server.their_state is h11.SEND_RESPONSE and not self._server.trailing_data[0]
        if not data and silent:
            raise BrokenTunnel("it closed the connection without a word")
        return data

    async def _pass_hint(self, event: h11.InformationalResponse) -> None:
        # Older clients know no answers before the answer.
        if self._http.their_http_version == b"1.1":
            headers = access.hint_headers(event.headers.raw_items())
            await self._send(
                h11.InformationalResponse(
                    status_code=event.status_code, headers=headers, reason=event.reason
                )
            )

    async def _send(self, event: Any) -> None:
        await self._visitor.send(cast("bytes", self._http.send(event)))

    # WebSockets.

    async def _switch(self, event: h11.InformationalResponse) -> None:
        given = event.headers.raw_items()
        ready = self._server.our_state is h11.SWITCHED_PROTOCOL
        if not (ready and self._admitted.websocket and access.is_websocket(given)):
            raise BrokenTunnel("it changed to a protocol that was not asked for")
        headers: Headers = [
            *access.hint_headers(given),
            (b"Connection", b"Upgrade"),
            (b"Upgrade", access.WEBSOCKET),
        ]
        await self._send(
            h11.InformationalResponse(status_code=101, headers=headers, reason=event.reason)
        )


def _explain(error: Exception) -> PortRefusal:
    """Why there is no answer, for a person who waits for one."""
    if isinstance(error, errors.K8eError):
        return PortRefusal(503, f"{error.message}. {error.hint}".strip())
    if isinstance(error, ConnectionRefusedError):
        return PortRefusal(
            502, "Nothing listens on this port in the sandbox (yet). Start the server, and reload."
        )
    if isinstance(error, OSError):
        if error.errno == errno.EAGAIN:
            return PortRefusal(503, "The sandbox has too many connections open.")
        code = error.errno or errno.EIO
        return PortRefusal(
            504 if code == errno.ETIMEDOUT else 502,
            f"The server in the sandbox did not answer: {os.strerror(code)}.",
        )
    return PortRefusal(502, f"The server in the sandbox gave no proper answer: {error}.")
