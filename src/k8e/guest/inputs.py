"""What a program is given to read: bytes that wait until it takes them, and its terminal."""

from __future__ import annotations

import errno
import os
from typing import Any

from k8e.guest.loop import WRITE, Loop
from k8e.guest.wire import CREDIT, CREDIT_BODY

TIOCSWINSZ = 0x5414
TIOCGPTN = 0x80045430


class Input:
    """The input of one program; without a descriptor (``fd``), what comes is swallowed."""

    def __init__(self, loop: Loop) -> None:
        self.fd = -1
        self._loop = loop
        self._pending: list[tuple[bytes, Any]] = []  # with the channel that each came from

    @property
    def held(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return sum(len(data) for data, _ in self._pending)

    def feed(self, data: bytes, channel: Any) -> None:
        if self.fd < 0:
            self._give_credit(channel, len(data))
        elif data:  # nothing pending but the end is empty
            self._pending.append((data, channel))
            self._write(0)

    def end(self, last: bytes) -> None:
        """After ``last``, which a terminal takes for the end; a pipe has nothing last."""
        if self.fd >= 0:
            self._pending.append((last, None))
            self._write(0)

    def _give_credit(self, channel: Any, count: int) -> None:
        """Let the client send as much again as was taken of what it sent."""
        if count and channel is not None:
            channel.send(CREDIT, CREDIT_BODY.pack(count))

    def _write(self, _: int) -> None:
        while self._pending:
            data, channel = self._pending[0]
            try:
                count = os.write(self.fd, data) if data else 0
            except BlockingIOError:
                self._loop.watch(self.fd, WRITE, self._write)
                return
            except OSError:  # the program closed its stdin: swallow the rest
                count = len(data)
            self._give_credit(channel, count)
            if count < len(data):
                self._pending[0] = (data[count:], channel)
                continue
            del self._pending[0]
            if not data:
                self.close()
                return
        self._loop.unwatch(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            self._loop.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1
        for data, channel in self._pending:
            self._give_credit(channel, len(data))
        self._pending.clear()


def open_terminal() -> tuple[int, int]:
    """Both ends of a new terminal."""
    try:
        return os.openpty()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What the kernel says of terminals would be taken for a full disk.
        text = "the sandbox has as many terminals as it may have; end some of them"
        raise OSError(errno.EMFILE, text) from None


def set_terminal_size(fd: int, rows: int, cols: int) -> None:
    from fcntl import ioctl
    from struct import pack as pack_struct

    ioctl(fd, TIOCSWINSZ, pack_struct("HHHH", rows, cols, 0, 0))


def terminal_name(master: int) -> str:
    """The path of a terminal's other end; ``ttyname`` would look it up in ``/proc/self``."""
    from fcntl import ioctl
    from struct import unpack as unpack_struct

    number = unpack_struct("i", ioctl(master, TIOCGPTN, b"\0\0\0\0"))[0]
    return f"/dev/pts/{number}"
