"""The guest in a pod: gateways dial it, and both ends prove who they are inside TLS.

Whoever dials answers as the TLS *server*, with a certificate of the authority whose certificate
stands in the pod's environment. So the pod needs no certificate of its own, and its token, which is
as good as a password, is sent only where that certificate was shown. Code in the sandbox reaches
the port, as does whoever the cluster's policies let in: all that they can do is fail a handshake.

The key of the link is given once, in that channel. A guest that has one takes no other, so what was
one session's is never handed to another, and a container that was started anew is found out.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from k8e.guest.link import GuestLink
from k8e.guest.loop import READ, WRITE, Loop
from k8e.guest.main import Guest
from k8e.guest.spawn import GID, TOOLS, UID, WORKSPACE
from k8e.guest.wire import IDENTITY, LINK_KEY, Splitter, WireError, frame

POD_PORT = 7411
POD_TOKEN = "/run/k8e/identity/token"  # noqa: S105 - a path
GATEWAY_NAME = "gateway.link.k8e.internal"
CHALLENGE_SECONDS = 10.0
MOST_CALLERS = 8  # that have not shown a certificate; one more would be everybody's memory
LONGEST_TOKEN = 8 << 10
LINK_KEY_SIZE = 32
_SHARED_FOLDERS = ("/tmp", "/var/tmp")
# What the cluster and we put into the environment, and no image did.
_NOT_AN_IMAGES = ("KUBERNETES_", "K8E_", "MALLOC_")
SILENCED = {"LD_PRELOAD": "", "LD_AUDIT": "", "OPENSSL_CONF": "/dev/null"}
"""What pods set, so that no image can: the loader and OpenSSL would load libraries of the image.

Programs do without these. ``LD_LIBRARY_PATH`` and Python's own variables do no harm: the guest is
started with ``--library-path`` and ``-I``.
"""
_OURS = ("LC_ALL", "TZ", "HOSTNAME", "HOME", *SILENCED)


class TlsStream:
    """A TLS connection by the methods of a socket that a link uses."""

    def __init__(self, tls: Any, waits: Any) -> None:
        """``waits`` are the errors by which the library says that it would block."""
        self._tls = tls
        self._waits = waits

    def fileno(self) -> int:
        number: int = self._tls.fileno()
        return number

    def shake_hands(self) -> None:
        self._tls.do_handshake()

    def recv(self, size: int) -> bytes:
        """What has come. Nothing of it stays in the library, where epoll would not see it."""
        parts: list[bytes] = []
        got = 0
        while got < size or self._tls.pending():
            try:
                data = self._tls.recv(size)
            except self._waits:
                break
            if not data:
                return b"".join(parts)
            parts.append(data)
            got += len(data)
        if not parts:
            raise BlockingIOError
        return b"".join(parts)

    def send(self, data: Any) -> int:
        try:
            sent: int = self._tls.send(data)
        except self._waits:
            raise BlockingIOError from None
        return sent

    def close(self) -> None:
        self._tls.close()


class PodLink(GuestLink):
    """The link of a pod's guest: the newest of the gateways that have proved themselves has it."""

    key = b""

    def dial(self) -> None:
        """Wait to be dialled."""
        address = os.environ["K8E_LINK_ADDRESS"]  # the pod's own
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, POD_PORT))
        listener.listen(MOST_CALLERS)
        listener.setblocking(False)
        self._listener = listener
        self._callers: list[Caller] = []
        # Loaded only here, after the port is open: it takes longer than everything before it.
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks names and certificates
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=os.environ["K8E_LINK_AUTHORITY"])
        self._context = context
        self._waits = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
        self._wants_write = ssl.SSLWantWriteError
        self._loop.watch(listener.fileno(), READ, self._on_call)

    def _on_call(self, _: int) -> None:
        connection = None
        try:
            connection, _address = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = self._context.wrap_socket(
                connection,
                do_handshake_on_connect=False,
                server_hostname=GATEWAY_NAME.encode(),  # text would need a codec that is not there
            )
        except OSError:  # it has gone again
            if connection is not None:
                connection.close()
            return
        if len(self._callers) >= MOST_CALLERS:
            self._callers[0].close()  # the oldest had its time; a gateway needs milliseconds
        caller = Caller(self._loop, self, TlsStream(tls, self._waits))
        self._callers.append(caller)
        caller.advance(0)

    def forget(self, caller: Caller) -> None:
        if caller in self._callers:
            self._callers.remove(caller)

    def wants_write(self, error: BaseException) -> bool:
        return isinstance(error, self._wants_write)

    def waits(self, error: BaseException) -> bool:
        return isinstance(error, self._waits)

    def accept_key(self, body: bytes) -> None:
        """Take the key of the link, which is given once."""
        if len(body) == LINK_KEY_SIZE and not self.key:
            self.key = body
        elif body or not self.key:
            raise WireError("the key of a link is given once")

    def take(self, stream: TlsStream) -> None:
        """Let a gateway that has proved itself have the link."""
        if self._socket is not None:
            self._lose()
        self._loop.watch(stream.fileno(), READ, self._on_event)
        self._begin(stream)

    def _read_key(self) -> bytes:
        return self.key

    def _retry_later(self) -> None:
        """The gateway dials again."""


class Caller:
    """A connection whose other end has not shown yet that it is a gateway."""

    def __init__(self, loop: Loop, link: PodLink, stream: TlsStream) -> None:
        self._loop = loop
        self._link = link
        self._stream = stream
        self._splitter = Splitter(LINK_KEY_SIZE)
        self._proved = False
        self._patience = loop.later(CHALLENGE_SECONDS, self.close)

    def advance(self, _: int) -> None:
        """Go on with whatever the other end has sent."""
        try:
            if not self._proved:
                self._prove()
            if self._proved:
                self._receive()
        except Exception as error:
            if not self._link.waits(error):
                self.close()  # a stranger may provoke as many errors as it likes: not a word
                return
            wanted = READ | WRITE if self._link.wants_write(error) else READ
            self._loop.watch(self._stream.fileno(), wanted, self.advance)

    def _prove(self) -> None:
        """See the gateway's certificate, and only then show the pod's token."""
        self._stream.shake_hands()
        self._proved = True
        has_key = b"\1" if self._link.key else b"\0"
        body = frame(IDENTITY, 0, has_key + read_token(POD_TOKEN))
        if self._stream.send(body) != len(body):
            raise WireError("a token that is too long to be sent at once")
        self._loop.watch(self._stream.fileno(), READ, self.advance)

    def _receive(self) -> None:
        try:
            data = self._stream.recv(LONGEST_TOKEN)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        for kind, _, body in self._splitter.feed(data):
            if kind != LINK_KEY:
                raise WireError("the gateway gave no key")
            self._link.accept_key(body)
            self._leave()
            self._link.take(self._stream)
            return

    def _leave(self) -> None:
        self._patience.cancel()
        self._link.forget(self)
        self._loop.unwatch(self._stream.fileno())

    def close(self) -> None:
        self._leave()
        self._stream.close()


def read_token(path: str) -> bytes:
    """The pod's token, which the kubelet renews; never one that programs could read too."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise PermissionError("the pod's token can be read by programs of its user")
        return os.read(fd, LONGEST_TOKEN).strip()
    finally:
        os.close(fd)


def image_env(environ: Any) -> dict[str, str]:
    """What of the guest's environment is its image's; programs see that, and nothing else."""
    found = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_NOT_AN_IMAGES) and name not in _OURS
    }
    if found.get("PATH"):
        found["PATH"] += ":" + TOOLS
    return found


class PodGuest(Guest):
    """PID 1 of a pod's container."""

    link_class = PodLink

    def run(self) -> None:
        read_token(POD_TOKEN)  # rather no sandbox than one whose programs could pass for it
        os.setgroups([])  # programs would inherit root's
        own_folders()
        super().run()

    def _settle(self, channel: Any, spec: dict[str, Any]) -> None:
        super()._settle(channel, with_image_env(spec))

    def _bind(self, channel: Any, spec: dict[str, Any]) -> None:
        super()._bind(channel, with_image_env(spec))


def with_image_env(spec: dict[str, Any]) -> dict[str, Any]:
    """A call whose environment has the image's too; what the host says comes before it."""
    env: dict[str, str] = dict(image_env(os.environ))
    env.update(spec.get("env") or {})
    return dict(spec, env=env)


def own_folders() -> None:
    """Give the volumes of the pod, which are root's, to whom they are for."""
    os.chmod(WORKSPACE, 0o755)  # noqa: S103 - its owner is the user
    os.chown(WORKSPACE, UID, GID)
    for path in _SHARED_FOLDERS:
        os.chmod(path, 0o1777)  # noqa: S103 - as on any system


if __name__ == "__main__":
    PodGuest().run()
