"""A gateway that dies at a chosen step: run as a program, with a ready descriptor and a fuse.

The steps are what others can see of a gateway: files that it makes, renames or removes, statements
of its databases, programs that it starts, system calls for mounts and namespaces, changes of the
kernel's network, and what it asks of guests. Production code knows nothing of this.
"""

from __future__ import annotations

import functools
import inspect
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = frozenset(
    "os.mkdir os.rename os.remove os.rmdir os.chmod os.chown os.truncate os.symlink os.posix_spawn "
    "subprocess.Popen socket.bind shutil.rmtree fcntl.ioctl fcntl.flock".split()
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OFF = -1


class Fuse:
    """A number in a file that two processes see: so many steps until the end."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(OFF.to_bytes(8, sys.byteorder, signed=True))
        with open(path, "r+b") as file:
            self._word = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    @property
    def left(self) -> int:
        return self._word[0]

    @left.setter
    def left(self, steps: int) -> None:
        self._word[0] = steps

    def step(self) -> None:
        left = self._word[0]
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        elif left > 0:
            self._word[0] = left - 1


class _Stepping:
    """A library whose every call is a step before and one after."""

    def __init__(self, library: Any, step: Callable[[], None]) -> None:
        self._library = library
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return _stepping(getattr(self._library, name), self._step)


def _stepping(function: Callable[..., Any], step: Callable[[], None]) -> Callable[..., Any]:
    async def call_later(*arguments: Any, **named: Any) -> Any:
        step()
        try:
            return await function(*arguments, **named)
        finally:
            step()

    def call(*arguments: Any, **named: Any) -> Any:
        step()
        try:
            return function(*arguments, **named)
        finally:
            step()

    return call_later if inspect.iscoroutinefunction(function) else call


def _listen(fuse: Fuse, made: Path) -> None:
    """Have Python tell of files and programs; note the sandboxes that come to be."""
    known = os.open(made, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            flags = arguments[2]
            if isinstance(flags, int) and flags & WRITING:
                fuse.step()
        elif event in EVENTS:
            fuse.step()
            if event == "os.mkdir" and "/sandboxes/sb-" in os.fspath(arguments[0]):
                os.write(known, f"{os.getpid()} {Path(arguments[0]).name}\n".encode())

    sys.addaudithook(hear)


def _wrap(fuse: Fuse) -> None:
    """What Python does not tell of."""
    from k8e import database, link
    from k8e.egress import namespaces, netlink, nftables
    from k8e.runtimes import mounts, tools
    from k8e.sessions import operations

    for module in (mounts, namespaces):
        vars(module)["_libc"] = _Stepping(vars(module)["_libc"], fuse.step)
    for owner, name in (
        (nftables.Elements, "change"),
        (netlink.Netlink, "_do"),
        (link, "request"),
        (link.Link, "open"),
        (operations.Operation, "receive"),
        (operations.Operation, "send"),
        (tools, "run_tool"),
    ):
        setattr(owner, name, _stepping(getattr(owner, name), fuse.step))
    connect = database.connect

    @functools.wraps(connect)
    def traced(*arguments: Any, **named: Any) -> Any:
        found = connect(*arguments, **named)
        found.set_trace_callback(lambda _: fuse.step())
        return found

    setattr(database, "connect", traced)  # noqa: B010 - as a hook, not as an attribute of ours


def main() -> int:
    fuse = Fuse(Path(sys.argv[2]))
    _wrap(fuse)
    _listen(fuse, Path(sys.argv[3]))
    from k8e import settings
    from k8e.gateway import app

    return app.run(settings.load(), background=True, ready_fd=int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
