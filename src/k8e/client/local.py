"""A connection to the gateway of this machine.

The CLI's quick path is built on this module, so it imports nothing that takes time: ``_socket`` is
what ``socket`` wraps, and errors are imported when one happens.
"""

from __future__ import annotations

import _socket

from k8e.guest import wire

try:
    import posix
except ImportError:
    from k8e.client import portable as posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e import errors

_PEER = wire.Struct("3i")  # pid, uid, gid
SMALL_READ = 64 << 10
LARGE_READ = 256 << 10  # once a small read came back full, a file or a long output is under way
_CAN_SERVE = hasattr(_socket, "SO_PEERCRED") and posix.__name__ == "posix"
_PEEK = _socket.MSG_PEEK | getattr(_socket, "MSG_DONTWAIT", 0)


class NoGateway(Exception):
    """No gateway listens on the socket, so one has to be started."""


def default_socket() -> bytes:
    """The gateway's socket, unless a configuration file says otherwise."""
    folder = posix.environ.get(b"K8E_RUN_DIR")
    if not folder:
        uid = posix.geteuid()
        if uid == 0:
            folder = b"/run/k8e"
        else:
            folder = posix.environ.get(b"XDG_RUNTIME_DIR") or b"/tmp/k8e-%d" % uid
            folder += b"/k8e"
    return folder + b"/gateway.sock"


def dial(path: bytes | str) -> _socket.socket:
    """A connected socket whose other end is ours; NoGateway where none listens."""
    if not _CAN_SERVE:
        raise unreachable(
            "this host cannot run sandboxes: that needs Linux",
            "set K8E_SANDBOX_ENDPOINT to a gateway elsewhere, or log in to one: k8e sandbox login",
        )
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        raise NoGateway from None
    except OSError as error:
        sock.close()
        raise unreachable(f"the gateway's socket cannot be used: {error}") from None
    check_peer(sock)
    return sock


def check_peer(sock: _socket.socket) -> None:
    """Refuse a socket that another user put where ours should be."""
    peer = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER.size)
    uid: int = _PEER.unpack(peer)[1]
    if uid not in (0, posix.geteuid()):
        sock.close()
        raise unreachable(
            f"the gateway's socket belongs to uid {uid}, not to this user",
            "set K8E_RUN_DIR to a folder that only you can write to",
        )


class Connection:
    """A blocking connection, used by one operation at a time."""

    __slots__ = ("_buffer", "_channel", "_frames", "_socket", "_splitter", "_unsent")

    def __init__(self, sock: _socket.socket) -> None:
        self._socket = sock
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._frames: list[tuple[int, int, bytes]] = []
        self._buffer: bytearray | None = None  # once there is much to read
        self._channel = 0
        self._unsent = False

    def begin(self) -> None:
        """Start a new operation: late frames of the one before are ignored."""
        self._channel += 1

    def send(self, kind: int, body: bytes | memoryview) -> None:
        header = wire.HEADER.pack(len(body), kind, self._channel)
        try:
            if len(body) < SMALL_READ:
                self._socket.sendall(header + body)
            else:
                self._socket.sendall(header)
                self._socket.sendall(body)
        except (BrokenPipeError, ConnectionResetError):
            self._unsent = True  # what the gateway said before it closed is still to be read

    def receive(self) -> tuple[int, bytes]:
        """The next frame of the current operation; GatewayUnreachable if the connection ended."""
        while True:
            while not self._frames:
                self._read()
            kind, channel, body = self._frames.pop()
            if channel == self._channel:
                return kind, body

    def _read(self) -> None:
        unread = self._unsent
        try:
            data = self._take()
            if data:
                self._frames = self._splitter.feed(data)
                self._frames.reverse()
                return
        except ConnectionResetError:
            unread = True  # the kernel reports that if a socket is closed with something unread
        except wire.WireError as error:
            raise unreachable(
                f"the gateway sent bytes that are not k8e's protocol: {error}"
            ) from None
        raise closed(unread=unread)

    def _take(self) -> bytes | memoryview:
        """Read what is there; large reads share a buffer, since new memory is slow memory."""
        if self._buffer is None:
            data = self._socket.recv(SMALL_READ)
            if len(data) == SMALL_READ:
                self._buffer = bytearray(LARGE_READ)
            return data
        return memoryview(self._buffer)[: self._socket.recv_into(self._buffer)]

    def is_fresh(self) -> bool:
        """Whether nothing was received, not even an end, since the last operation."""
        if self._frames:
            return False
        try:
            self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._socket.close()


_HINT = "k8e status shows the gateway's state; its log is gateway.log in the data folder"


def closed(*, unread: bool) -> errors.ConnectionLost:
    from k8e import errors

    error = errors.ConnectionLost("the gateway closed the connection", hint=_HINT)
    error.unread = unread
    return error


def unreachable(message: str, hint: str = "") -> errors.GatewayUnreachable:
    from k8e import errors

    return errors.GatewayUnreachable(message, hint=hint or _HINT)
