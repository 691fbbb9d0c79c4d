"""A client of registries: the pulling half of the OCI distribution API, in blocking calls.

A registry is as hostile as its content: every answer is bounded in size and time, and counts only
if its digest is the one that was asked for.

The time-out of a socket is for each byte, and a hostile server sends one just in time, again and
again. So another thread cuts the connection when the time of the whole call is over, or when the
gateway stops.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import re
import socket
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO, cast

from k8e import access, errors
from k8e._version import __version__
from k8e.images import manifest as images_manifest
from k8e.images.manifest import Blob, Reference


def failed(host: str, why: str) -> errors.ImageUnusable:
    return errors.ImageUnusable(
        f"the registry {host} failed: {why}",
        hint="try again; if it fails again, ask the registry's operator",
    )


class RegistryCall:
    """The connections of one call: one for each redirect."""

    def __init__(self) -> None:
        self.ended = ""
        """Why they were cut, if they were."""
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()

    def handlers(self) -> list[urllib.request.BaseHandler]:
        """What makes a urllib opener use connections that can be cut."""
        return [_Plain(self), _Tls(self)]

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            # A second descriptor: TLS takes the first one away.
            self._sockets.append(connection.dup())
            if self.ended:
                self._cut()

    def end(self, why: str) -> None:
        with self._lock:
            self.ended = self.ended or why
            self._cut()

    def _cut(self) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets.clear()


class Calls:
    """All calls that are under way."""

    def __init__(self) -> None:
        self._open: set[RegistryCall] = set()
        self._stopped = ""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def begin(self, host: str, seconds: float) -> Generator[RegistryCall]:
        """Begin a call of a registry; any failure after its time is over counts as a time-out."""
        call = RegistryCall()
        with self._lock:
            call.ended = self._stopped
            self._open.add(call)
        timer = threading.Timer(seconds, call.end, (f"it took more than {seconds:g} s",))
        timer.daemon = True
        timer.start()
        try:
            yield call
        except Exception:
            if not call.ended:
                raise
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(call)
            call.close()
        if call.ended:
            raise failed(host, call.ended)

    def stop(self) -> None:
        """End all calls under way, and all later ones."""
        with self._lock:
            self._stopped = "the gateway is being stopped"
            for call in self._open:
                call.end(self._stopped)


class _Connection(http.client.HTTPConnection):
    call: RegistryCall | None = None

    def connect(self) -> None:
        super().connect()
        if self.call is not None:
            self.call.watch(self.sock)


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """Watched before TLS begins: its ``connect`` calls the one above."""


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, call: RegistryCall) -> None:
        super().__init__()
        self._make = _maker(_Connection, call)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._make, req)


class _Tls(urllib.request.HTTPSHandler):
    def __init__(self, call: RegistryCall) -> None:
        super().__init__()
        self._make = _maker(_TlsConnection, call)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._make, req)


def _maker(kind: type[_Connection], call: RegistryCall) -> Any:
    def make(host: str, **options: Any) -> _Connection:
        connection = kind(host, **options)
        connection.call = call
        return connection

    return make


CHUNK = 1 << 18
CALL_SECONDS = 30.0  # without a byte
DOCUMENT_SECONDS = 60.0
BLOB_SECONDS = 3600.0  # for one blob
MOST_DOCUMENT = 4 << 20  # bytes of a manifest or configuration
MOST_TOKEN = 1 << 18
MOST_REDIRECTS = 5
TRIES = 3  # of a blob, where the connection breaks
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"([^"]*)"|([^\s,]+))')
_REDIRECTS = (301, 302, 303, 307, 308)

Response = http.client.HTTPResponse | urllib.error.HTTPError


class BrokenConnection(Exception):
    """A connection ended early; it may be worth another try."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the caller must decide which headers may go along."""

    def http_error_302(self, *_: Any, **__: Any) -> None:
        # Nor reads where it would lead: an address that is none would leave the connection open.
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def is_loopback(host: str) -> bool:
    return access.is_loopback(urllib.parse.urlsplit(f"//{host}").hostname or "")


class Registry:
    """One registry, for one pull; safe to use from several threads."""

    def __init__(
        self, host: str, *, plain: bool, credentials: str = "", calls: Calls | None = None
    ) -> None:
        self._host = host
        self._calls = calls or Calls()
        self._plain = plain or is_loopback(host)
        self._credentials = credentials  # user:password as base64
        self._lock = threading.Lock()
        self._scheme = ""
        self._authorization = ""

    # What is asked for.

    def manifest(self, reference: Reference) -> tuple[images_manifest.ImageManifest, str]:
        """The manifest for this machine, and the digest of what the reference named."""
        document, kind, digest = self._document(reference.name, reference.wanted)
        if reference.digest:
            _check(reference.digest, digest, "the manifest")
        if images_manifest.is_index(document, kind):
            chosen = images_manifest.choose(document, images_manifest.architecture())
            document, kind, found = self._document(reference.name, chosen.digest)
            _check(chosen.digest, found, "the manifest for this machine")
        return images_manifest.manifest(document, kind), digest

    def _document(self, name: str, wanted: str) -> tuple[dict[str, Any], str, str]:
        accept = ", ".join(images_manifest.ACCEPTED)
        with self._get(f"/v2/{name}/manifests/{wanted}", accept) as response:
            body = _read(response, MOST_DOCUMENT)
            kind = response.headers.get_content_type()
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        document = images_manifest.parse(body, "its manifest")
        images_manifest.refuse_ambiguous(document)
        return document, kind, digest

    def config(self, name: str, blob: Blob) -> dict[str, Any]:
        with self._get(f"/v2/{name}/blobs/{blob.digest}") as response:
            body = _read(response, MOST_DOCUMENT)
        _check(blob.digest, "sha256:" + hashlib.sha256(body).hexdigest(), "the configuration")
        return images_manifest.parse(body, "its configuration")

    def fetch(self, name: str, blob: Blob, target: BinaryIO, tell: Callable[[int], None]) -> None:
        """Write a blob to ``target``; ``tell`` gets each piece's size and may raise to stop."""
        for left in reversed(range(TRIES)):
            target.seek(0)
            target.truncate()
            got = 0
            try:
                for piece in self._pieces(name, blob):
                    target.write(piece)
                    got += len(piece)
                    tell(len(piece))
                return
            except BrokenConnection as error:
                tell(-got)
                if not left:
                    raise failed(self._host, f"the connection broke: {error}") from None

    def _pieces(self, name: str, blob: Blob) -> Generator[bytes]:
        hashed, got = hashlib.sha256(), 0
        with self._get(f"/v2/{name}/blobs/{blob.digest}", seconds=BLOB_SECONDS) as response:
            if _announced(response) > blob.size:
                raise failed(self._host, "a layer is larger than its manifest says")
            while got < blob.size and (piece := _piece(response)):
                got += len(piece)
                if got > blob.size:
                    raise failed(self._host, "a layer is larger than its manifest says")
                hashed.update(piece)
                yield piece
        if got < blob.size:
            raise BrokenConnection(f"{got} of {blob.size} bytes came")
        _check(blob.digest, "sha256:" + hashed.hexdigest(), "a layer")

    # Calls.

    @contextlib.contextmanager
    def _get(
        self, path: str, accept: str = "*/*", seconds: float | None = None
    ) -> Generator[Response]:
        """An answer with content; errors explain what the registry said."""
        url = f"{self._find_scheme()}://{self._host}{path}"
        known = self._authorization
        with self._calls.begin(self._host, seconds or DOCUMENT_SECONDS) as call:
            response = self._follow(call, url, accept, known)
            if response.status == 401:
                challenge = response.headers.get_all("WWW-Authenticate") or []
                response.close()
                response = self._follow(call, url, accept, self._authorize(challenge, known))
            with response:
                if response.status != 200:
                    raise self._refused(response)
                yield response

    def _follow(self, call: RegistryCall, url: str, accept: str, authorization: str) -> Response:
        home = urllib.parse.urlsplit(url)
        for _ in range(MOST_REDIRECTS):
            here = urllib.parse.urlsplit(url)
            same = (here.scheme, here.netloc) == (home.scheme, home.netloc)
            response = self._send(call, url, accept, authorization if same else "")
            if response.status not in _REDIRECTS:
                if response.status == 401 and not same:
                    response.close()  # another host must not get this one's password
                    raise failed(self._host, "it sends us to a host that asks who we are")
                return response
            location = response.headers.get("Location") or ""
            response.close()
            url = self._check_address(location, url)
        raise failed(self._host, "it redirects again and again")

    def _check_address(self, address: str, base: str = "") -> str:
        """The target of a redirect; refused unless it is TLS, or no less safe than the source."""
        try:
            url = urllib.parse.urljoin(base, address)
            self._check_url(url)
        except ValueError:
            raise failed(self._host, f"it sends us to {address[:80]!r}, no address") from None
        return url

    def _check_url(self, url: str) -> None:
        parts, home = urllib.parse.urlsplit(url), urllib.parse.urlsplit(f"//{self._host}")
        near = parts.hostname == home.hostname or (
            is_loopback(self._host) and is_loopback(parts.netloc)
        )
        plain = parts.scheme == "http" and self._plain and near
        if not plain and parts.scheme != "https":
            raise failed(self._host, f"it sends us to {parts.scheme[:20]}://, not to https://")

    def _send(self, call: RegistryCall, url: str, accept: str, authorization: str) -> Response:
        headers = {"Accept": accept, "User-Agent": f"k8e/{__version__}"}
        if authorization:
            headers["Authorization"] = authorization
        handlers: list[urllib.request.BaseHandler] = [_Stay(), *call.handlers()]
        if is_loopback(urllib.parse.urlsplit(url).netloc):
            handlers.append(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - scheme is checked
        try:
            return urllib.request.build_opener(*handlers).open(request, timeout=CALL_SECONDS)
        except urllib.error.HTTPError as error:
            return error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLError):
                raise _no_tls(self._host, reason) from None
            raise failed(self._host, f"it cannot be reached: {reason}") from None

    def _find_scheme(self) -> str:
        """TLS wherever the registry has it; plain HTTP only where that is allowed."""
        with self._lock:
            if not self._plain:
                self._scheme = "https"
            if not self._scheme:
                try:
                    with self._calls.begin(self._host, DOCUMENT_SECONDS) as call:
                        self._send(call, f"https://{self._host}/v2/", "*/*", "").close()
                    self._scheme = "https"
                except _NoTls:
                    self._scheme = "http"
            return self._scheme

    # Who we are.

    def _authorize(self, challenges: list[str], known: str) -> str:
        """Get the token that a registry asks for."""
        with self._lock:
            if self._authorization not in ("", known):
                return self._authorization  # another thread has got one meanwhile
            for challenge in challenges:
                kind, _, rest = challenge.strip().partition(" ")
                if kind.lower() == "bearer":
                    self._authorization = "Bearer " + self._token(_parameters(rest))
                    return self._authorization
                if kind.lower() == "basic" and self._credentials:
                    self._authorization = "Basic " + self._credentials
                    return self._authorization
        raise _unknown_caller(self._host, bool(self._credentials))

    def _token(self, asked: dict[str, str]) -> str:
        realm = asked.get("realm", "")
        self._check_address(realm)
        query = urllib.parse.urlencode(
            [(key, asked[key]) for key in ("service", "scope") if asked.get(key)]
        )
        url = f"{realm}{'&' if '?' in realm else '?'}{query}"
        basic = "Basic " + self._credentials if self._credentials else ""
        with (
            self._calls.begin(self._host, DOCUMENT_SECONDS) as call,
            self._follow(call, url, "application/json", basic) as response,
        ):
            if response.status != 200:
                raise _unknown_caller(self._host, bool(self._credentials))
            found = images_manifest.parse(_read(response, MOST_TOKEN), "its token")
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise failed(self._host, "it gave no token")
        return token

    def _refused(self, response: Response) -> errors.K8eError:
        if response.status in (401, 403):
            return _unknown_caller(self._host, bool(self._credentials))
        if response.status == 404:
            return errors.ImageNotFound(
                f"{self._host} has no such image", hint="check its name and tag"
            )
        said = ""
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, errors.ImageUnusable):
            said = ": " + str(json.loads(_read(response, MOST_TOKEN))["errors"][0]["message"])[:200]
        return failed(self._host, f"it answers {response.status}{said}")


class _NoTls(errors.ImageUnusable):
    """The registry does not speak TLS, or its certificate is not trusted."""


def _announced(response: Any) -> int:
    """The announced number of bytes, if there is one."""
    length: int | None = response.length
    return length or 0


def _piece(response: Any) -> bytes:
    """The bytes that are there, without waiting for a whole chunk."""
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise BrokenConnection(str(error) or type(error).__name__) from None


def _read(response: Response, most: int) -> bytes:
    body = b""
    try:
        while piece := _piece(response):
            body += piece
            if len(body) > most:
                raise errors.ImageUnusable(f"an answer of the registry has more than {most} bytes")
    except BrokenConnection as error:
        raise errors.ImageUnusable(
            f"the connection to the registry broke: {error}", hint="try again"
        ) from None
    return body


def _parameters(text: str) -> dict[str, str]:
    return {key.lower(): a or b for key, a, b in _PARAMETER.findall(text)}


def _check(wanted: str, found: str, what: str) -> None:
    if wanted != found:
        raise errors.ImageUnusable(
            f"{what} is not what it should be: its digest is {found}, not {wanted}",
            hint="the registry, or a machine on the way to it, changed it; do not use it",
        )


def _no_tls(host: str, why: ssl.SSLError) -> _NoTls:
    return _NoTls(
        f"the registry {host} does not speak TLS that can be trusted: {why.reason or why}",
        hint="K8E_INSECURE_REGISTRIES may list registries that need none",
    )


def _unknown_caller(host: str, tried: bool) -> errors.Denied:
    why = "refuses the password in the file" if tried else "wants a password, or has no such image"
    return errors.Denied(
        f"the registry {host} {why}",
        hint="K8E_REGISTRY_CREDENTIALS names the file with passwords for registries",
    )


MOST_BYTES = 1 << 20


def find(setting: str, host: str) -> str:
    """``user:password`` for a registry, as base64; empty if the file has none.

    Read again each time: a login by another program changes it. Only ``auths`` is looked at;
    programs that keep passwords are not started.
    """
    path = Path(setting) if setting else Path.home() / ".docker/config.json"
    try:
        text = path.read_bytes()[:MOST_BYTES]
    except FileNotFoundError:
        if not setting:
            return ""
        raise _unusable(path, "it is not there") from None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    try:
        found: Any = json.loads(text)
        auths = cast("dict[str, dict[str, Any]]", found.get("auths") or {})
        known = {_host(name): item for name, item in auths.items()}
        auth = str(known[host].get("auth") or "") if host in known else ""
        if auth and b":" not in base64.b64decode(auth, validate=True):
            raise ValueError("an auth is not user:password")
    except errors.UNREADABLE as error:
        raise _unusable(path, str(error)) from None
    return auth


def _host(name: str) -> str:
    """The host of a key of ``auths``: some programs write whole URLs."""
    return name.removeprefix("https://").removeprefix("http://").partition("/")[0].lower()


def _unusable(path: Path, why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"the passwords for registries in {path} cannot be read: {why}",
        hint="correct the file, or set K8E_REGISTRY_CREDENTIALS to another one",
    )
