"""The Kubernetes API over a few connections: small enough for a supervisor that idles.

Only what our own programs need: requests, server-side apply, and following a list. A controller's
caches stand on :meth:`Api.lines` (``k8e.controller.cache``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import h11

from k8e import errors

MANAGER = "k8e"
_SECONDS = 30.0
_WATCH_SECONDS = 240
_CHUNK = 1 << 16
_MOST_IDLE = 4
_ACCEPTED = "application/json, application/jwk-set+json;q=0.5"
"""Keys of service accounts have a type of their own."""
_TOKEN_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_CLOCKS_APART_SECONDS = 10.0
FORBIDDEN, NOT_FOUND, CONFLICT, GONE = 403, 404, 409, 410

Object = dict[str, Any]


class ApiError(errors.K8eError):
    """What the API server answered that is no success."""

    def __init__(self, status: int, body: Object, what: str) -> None:
        message = str(body.get("message") or body.get("reason") or "no reason given")
        super().__init__(f"the API server refused {what} ({status}): {message}")
        self.status = status
        self.body = body


class ApiUnreachable(errors.K8eError):
    """The API server does not answer."""

    def __init__(self, server: str, error: BaseException | str) -> None:
        super().__init__(
            f"the API server {server} does not answer: {error}",
            hint="k8e status shows what runs; its log is kube-apiserver.log",
        )


def section(found: Object, *names: str) -> Object:
    """A part of an object, by the names on the way to it; empty where there is none."""
    for name in names:
        found = found.get(name) or {}
    return found


def entries(found: Object, *names: str) -> list[Object]:
    """A list in an object, by the names on the way to it; empty where there is none."""
    return section(found, *names[:-1]).get(names[-1]) or []


class Certificate:
    """A caller's certificate in files, from which it is read anew after it was renewed."""

    def __init__(self, *, authority: Path, certificate: Path, key: Path) -> None:
        self._authority, self._certificate, self._key = authority, certificate, key
        self._read = self._mark()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """For the next connection; another object than before if the files have changed."""
        with contextlib.suppress(OSError):  # half replaced: the next connection looks again
            if (mark := self._mark()) != self._read:
                self._context = self._load()
                self._read = mark
        return self._context

    def _mark(self) -> list[tuple[int, int]]:
        found = (path.stat() for path in (self._certificate, self._key))
        return [(item.st_ino, item.st_mtime_ns) for item in found]

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self._authority))
        context.load_cert_chain(self._certificate, self._key)
        return context


class Api:
    """One caller at one API server."""

    def __init__(
        self,
        server: str,
        identity: Certificate | ssl.SSLContext,
        *,
        token: str | Callable[[], str] = "",
        most_idle: int = _MOST_IDLE,
        reuse_for_posts: bool = False,
    ) -> None:
        """A caller; ``token`` may be a function, since tokens of service accounts are renewed.

        A POST on a connection that the server has just closed is lost without a trace of whether
        it was done. Callers who can live with that (whose names are chosen before, so that a
        second POST conflicts) save a TLS handshake each time by ``reuse_for_posts``.
        """
        self.server = server.rstrip("/")
        parts = urlsplit(self.server)
        self._host, self._port = parts.hostname or "", parts.port or 6443
        self.heard_at = float("-inf")
        """When the server last answered, or said something on a list that is followed."""
        self._identity = identity
        self._context = identity if isinstance(identity, ssl.SSLContext) else identity.context()
        self._token = token
        self._most_idle, self._reuse_for_posts = most_idle, reuse_for_posts
        self._plurals: dict[tuple[str, str], tuple[str, bool]] = {}
        self._idle: list[_Connection] = []
        self._ahead = 0.0

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: str = "application/json",
        seconds: float = _SECONDS,
    ) -> Object:
        """One request; the answer, which must be a success."""
        data = json.dumps(body).encode() if body is not None else b""
        try:
            async with asyncio.timeout(seconds):
                status, answer = await self._exchange(method, path, data, kind)
        except (OSError, TimeoutError, h11.ProtocolError, EOFError) as error:
            raise ApiUnreachable(self.server, error or "no answer in time") from None
        self._heard()
        read = _decode(answer)
        if status >= 300:
            raise ApiError(status, read, f"{method} {path.partition('?')[0]}")
        return read

    async def _exchange(self, method: str, path: str, data: bytes, kind: str) -> tuple[int, bytes]:
        self._renew()
        while self._idle and (method != "POST" or self._reuse_for_posts):
            connection = self._idle.pop()
            # The server may have closed it meanwhile; whatever else was done can be done twice.
            with contextlib.suppress(OSError, h11.ProtocolError, EOFError):
                return await self._on(connection, method, path, data, kind)
            connection.close()
        return await self._on(await self._connect(), method, path, data, kind)

    async def _on(
        self, connection: _Connection, method: str, path: str, data: bytes, kind: str
    ) -> tuple[int, bytes]:
        try:
            status = await self._ask(connection, method, path, data, kind)
            answer = b"".join([part async for part in connection.body()])
        except BaseException:
            connection.close()
            raise
        if connection.again() and len(self._idle) < self._most_idle:
            self._idle.append(connection)
        else:
            connection.close()
        return status, answer

    async def _ask(
        self, connection: _Connection, method: str, path: str, data: bytes, kind: str
    ) -> int:
        """Send a request; the status of the answer."""
        status = await connection.send(method, path, self._headers(data, kind), data)
        with contextlib.suppress(ValueError):
            theirs = parsedate_to_datetime(connection.date).timestamp()
            self._ahead = theirs - time.time()
        return status

    def clock(self) -> float:
        """Seconds since the epoch by the server's clock, as far as ours is wrong by much.

        Times in objects are the server's. What it says has whole seconds and took a while, so it
        only counts where the two are clearly apart.
        """
        far = abs(self._ahead) > _CLOCKS_APART_SECONDS
        return time.time() + (self._ahead if far else 0.0)

    def _renew(self) -> None:
        """Leave connections of a certificate that was renewed: the old one will expire."""
        if isinstance(self._identity, Certificate):
            context = self._identity.context()
            if context is not self._context:
                self._context = context
                self.close()

    async def _connect(self) -> _Connection:
        self._renew()
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._context, limit=_CHUNK
        )
        return _Connection(reader, writer)

    def _headers(self, data: bytes, kind: str) -> list[tuple[str, str]]:
        headers = [("Host", f"{self._host}:{self._port}"), ("Accept", _ACCEPTED)]
        if token := self._token if isinstance(self._token, str) else self._token():
            headers.append(("Authorization", f"Bearer {token}"))
        if data:
            headers += [("Content-Type", kind), ("Content-Length", str(len(data)))]
        return headers

    def _heard(self) -> None:
        self.heard_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # Reading.

    async def get(self, path: str) -> Object:
        return await self.call("GET", path)

    async def find(self, path: str) -> Object | None:
        """An object, or None where there is none."""
        try:
            return await self.call("GET", path)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    async def list(self, path: str) -> list[Object]:
        return entries(await self.call("GET", path), "items")

    async def follow(self, path: str, **query: str) -> AsyncGenerator[tuple[str, Object]]:
        """What is there, and then each change, for ever: ``ADDED``, ``MODIFIED``, ``DELETED``.

        After a lost connection all is told again as ``ADDED``, and what is gone since as
        ``DELETED``, by its name alone; ``SYNCED`` ends each list.
        """
        pause = _FIRST_PAUSE
        known: set[tuple[str, str]] = set()
        while True:
            try:
                listed = await self.call("GET", _with(path, query))
                there = {_name_of(item) for item in entries(listed, "items")}
                for namespace, name in known - there:
                    yield "DELETED", {"metadata": {"namespace": namespace, "name": name}}
                known = there
                for item in entries(listed, "items"):
                    yield "ADDED", item
                yield "SYNCED", {}
                pause = _FIRST_PAUSE
                version = str(listed["metadata"]["resourceVersion"])
                async with contextlib.aclosing(self._watch(path, query, version)) as events:
                    async for change, item in events:
                        (known.discard if change == "DELETED" else known.add)(_name_of(item))
                        yield change, item
            except (ApiError, ApiUnreachable):
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def _watch(
        self, path: str, query: dict[str, str], version: str
    ) -> AsyncGenerator[tuple[str, Object]]:
        while True:
            asked = {**query, "watch": "1", "allowWatchBookmarks": "true"}
            asked |= {"resourceVersion": version, "timeoutSeconds": str(_WATCH_SECONDS)}
            async with contextlib.aclosing(self.lines(_with(path, asked))) as lines:
                async for line in lines:
                    event: Object = json.loads(line)
                    found: Object = event["object"]
                    if event["type"] == "ERROR":
                        raise ApiError(int(found.get("code", GONE)), found, f"watching {path}")
                    version = found["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event["type"], found

    async def lines(
        self, path: str, *, quiet_seconds: float = _WATCH_SECONDS + _SECONDS
    ) -> AsyncGenerator[bytes]:
        """An answer that goes on for minutes, line by line.

        It is given up where nothing at all was said for ``quiet_seconds``: a server that vanished
        without closing the connection would be listened to for ever.
        """
        try:
            async with asyncio.timeout(_SECONDS):
                connection = await self._connect()
        except (OSError, TimeoutError) as error:
            raise ApiUnreachable(self.server, error or "no answer in time") from None
        try:
            async with asyncio.timeout(_SECONDS):
                status = await self._ask(connection, "GET", path, b"", "")
            if status >= 300:
                answer = b"".join([part async for part in connection.body()])
                raise ApiError(status, _decode(answer), f"watching {path.partition('?')[0]}")
            rest = b""
            self._heard()
            async with asyncio.timeout(quiet_seconds) as patience:
                async for part in connection.body():
                    self._heard()
                    patience.reschedule(self.heard_at + quiet_seconds)
                    if b"\n" not in part:
                        rest += part
                        continue
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        yield line
        except (OSError, TimeoutError, h11.ProtocolError, EOFError) as error:
            raise ApiUnreachable(self.server, error or "no answer in time") from None
        finally:
            connection.close()

    async def wait_until(
        self, path: str, holds: Callable[[Object], bool], *, seconds: float, **query: str
    ) -> Object:
        """Follow a list until one of its objects is as wanted; TimeoutError if none is in time."""
        async with (
            asyncio.timeout(seconds),
            contextlib.aclosing(self.follow(path, **query)) as all_,
        ):
            async for change, found in all_:
                if change in ("ADDED", "MODIFIED") and holds(found):
                    return found
        raise AssertionError("a list is followed for ever")

    # Writing.

    async def apply(self, wanted: Object) -> Object:
        """Server-side apply of one object, whose other owners' fields stay theirs."""
        path = await self.path_of(wanted)
        query = urlencode({"fieldManager": MANAGER, "force": "true"})
        return await self.call(
            "PATCH", f"{path}?{query}", wanted, kind="application/apply-patch+yaml"
        )

    async def delete(self, wanted: Object) -> bool:
        """Delete an object; False if there was none."""
        try:
            path = await self.path_of(wanted)
            await self.call("DELETE", f"{path}?propagationPolicy=Background")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return False
        return True

    async def path_of(self, wanted: Object) -> str:
        """Where an object is, by its kind, namespace and name."""
        version, kind = str(wanted["apiVersion"]), str(wanted["kind"])
        plural, namespaced = await self._plural(version, kind)
        metadata = wanted["metadata"]
        base = _group(version)
        if namespaced:
            base += f"/namespaces/{quote(metadata.get('namespace') or 'default', safe='')}"
        return f"{base}/{plural}/{quote(str(metadata['name']), safe='')}"

    async def _plural(self, version: str, kind: str) -> tuple[str, bool]:
        if (version, kind) not in self._plurals:
            listed = await self.get(_group(version))
            for item in entries(listed, "resources"):
                if "/" not in item["name"]:
                    self._plurals[version, item["kind"]] = item["name"], bool(item["namespaced"])
        try:
            return self._plurals[version, kind]
        except KeyError:
            body = {"message": f"there is no kind {kind} in {version}"}
            raise ApiError(NOT_FOUND, body, f"{kind} of {version}") from None


class _Connection:
    """One HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.date = ""
        """When the last answer was sent, as the server says."""

    async def send(
        self, method: str, path: str, headers: list[tuple[str, str]], data: bytes
    ) -> int:
        """Send a request; the status of the answer."""
        request = h11.Request(method=method, target=path, headers=headers)
        out = self._http.send(request) or b""
        if data:
            out += self._http.send(h11.Data(data=data)) or b""
        self._writer.write(out + (self._http.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                dates = (value for name, value in event.headers if name == b"date")
                self.date = next(dates, b"").decode("ascii", "replace")
                return event.status_code

    async def body(self) -> AsyncGenerator[bytes]:
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_CHUNK))
        if isinstance(event, h11.ConnectionClosed):
            raise EOFError("it closed the connection")
        return event

    def again(self) -> bool:
        """Whether another request may follow on this connection."""
        try:
            self._http.start_next_cycle()
        except h11.ProtocolError:
            return False
        return True

    def close(self) -> None:
        self._writer.transport.abort()


def _name_of(item: Object) -> tuple[str, str]:
    return item["metadata"].get("namespace") or "", item["metadata"]["name"]


def _decode(answer: bytes) -> Object:
    try:
        read: Any = json.loads(answer) if answer else {}
    except ValueError:
        read = {"message": answer[:500].decode("utf-8", "replace")}
    return read if isinstance(read, dict) else {"value": read}  # pyright: ignore[reportUnknownVariableType]


def _group(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _with(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def by_certificate(server: str, *, authority: Path, certificate: Path, key: Path) -> Api:
    """A caller who is told by a client certificate."""
    return Api(server, Certificate(authority=authority, certificate=certificate, key=key))


def by_kubeconfig(path: Path) -> Api:
    """The caller of a kubeconfig's current context."""
    server, identity, token = read_kubeconfig(path)
    return Api(server, identity, token=token)


Token = str | Callable[[], str]


def read_kubeconfig(path: Path) -> tuple[str, Certificate | ssl.SSLContext, Token]:
    """Server, certificate and token of a kubeconfig's current context."""
    import yaml

    config: Any = yaml.safe_load(path.read_bytes())
    named = section(_named(config.get("contexts"), config.get("current-context")), "context")
    cluster = _named(config["clusters"], named.get("cluster"))["cluster"]
    user = section(_named(config["users"], named.get("user")), "user")
    if "exec" in user or "auth-provider" in user:
        raise errors.InvalidRequest(
            f"the kubeconfig {path} gets its credentials from another program",
            hint="use one with a client certificate or a token",
        )
    token: Token = str(user.get("token") or "")
    if file := user.get("tokenFile"):
        token = TokenFile(path.parent / file)
    server = str(cluster["server"])
    if not urlsplit(server).port:
        server = f"{server.rstrip('/')}:443"
    return server, _identity(cluster, user, path), token


def _identity(cluster: Object, user: Object, path: Path) -> Certificate | ssl.SSLContext:
    files = (cluster, "certificate-authority"), (user, "client-certificate"), (user, "client-key")
    if all(part.get(name) and not part.get(f"{name}-data") for part, name in files):
        authority, certificate, key = (path.parent / part[name] for part, name in files)
        return Certificate(authority=authority, certificate=certificate, key=key)
    known = _content(cluster, "certificate-authority", path).decode()
    context = ssl.create_default_context(cadata=known or None)
    if content := _content(user, "client-certificate", path):
        _load_pair(context, content, _content(user, "client-key", path))
    return context


def _named(listed: Any, name: str | None) -> Object:
    """The entry of a kubeconfig's list with this name; the first where none is named."""
    found = [item for item in entries({"in": listed}, "in") if name in (None, "", item["name"])]
    return found[0] if found else {}


def _content(part: Object, name: str, config: Path) -> bytes:
    """What a kubeconfig has in itself or in a file beside it; empty if neither."""
    import base64

    if data := part.get(f"{name}-data"):
        return base64.b64decode(data)
    return (config.parent / part[name]).read_bytes() if part.get(name) else b""


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    import os
    import tempfile

    # The library takes a client's certificate from a file alone.
    with tempfile.NamedTemporaryFile(suffix=".pem") as pair:
        os.fchmod(pair.fileno(), 0o600)
        pair.write(certificate + b"\n" + key)
        pair.flush()
        context.load_cert_chain(pair.name)


class TokenFile:
    """A token that somebody renews, such as the kubelet that of a service account."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read, self._at = "", float("-inf")

    def __call__(self) -> str:
        now = time.monotonic()
        if now - self._at > _TOKEN_SECONDS:
            self._read, self._at = self._path.read_text("ascii").strip(), now
        return self._read
