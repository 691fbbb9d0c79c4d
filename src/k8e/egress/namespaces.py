"""Network namespaces: made, kept alive by a mount, entered by threads of the gateway."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MNT_DETACH = 2
OWN = Path("/proc/self/ns/net")
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _thread_namespace() -> str:
    return f"/proc/self/task/{threading.get_native_id()}/ns/net"


def make(path: Path, then: Callable[[], object] | None = None) -> None:
    """Make an empty network namespace that lives as long as it is mounted at ``path``.

    ``then`` runs inside of it. If that fails, the namespace is removed.
    """

    def in_thread() -> None:
        # Only this thread moves, and it ends right after, so no other code ever runs in there.
        _check(_libc.unshare(CLONE_NEWNET), "unshare")
        result = _libc.mount(_thread_namespace().encode(), bytes(path), None, MS_BIND, None)
        _check(result, "mounting a network namespace")
        if then is not None:
            then()

    path.touch(mode=0o600)
    try:
        run_apart(in_thread)
    except BaseException:
        unmount(path)
        raise


def unmount(path: Path) -> None:
    """Unmount a namespace; it ends when its last process and thread have left. Works twice."""
    if _libc.umount2(bytes(path), MNT_DETACH):
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOENT):  # it is not, or no more, a mount
            raise OSError(number, f"unmounting a network namespace: {os.strerror(number)}")
    path.unlink(missing_ok=True)


def is_mounted(path: Path) -> bool:
    """Whether a namespace is mounted at ``path``."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return any(line.split(" ")[4] == str(path) for line in file)


def run_apart(function: Callable[[], T]) -> T:
    """Run ``function`` in a fresh thread, which may change its namespaces."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def enter(descriptor: int) -> None:
    """Move the calling thread into a network namespace."""
    _check(_libc.setns(descriptor, CLONE_NEWNET), "entering a network namespace")


def run_in(path: Path, function: Callable[[], T]) -> T:
    """Run ``function`` in the namespace that is mounted at ``path``."""

    def in_thread() -> T:
        with open(path, "rb") as file:
            enter(file.fileno())
        return function()

    return function() if path == OWN else run_apart(in_thread)


def socket_in(path: Path, family: int, kind: int) -> socket.socket:
    """A socket of the namespace that is mounted at ``path``."""
    return run_in(path, lambda: socket.socket(family, kind))


class Resident:
    """A thread that stays in one namespace and runs functions there, in order."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, "k8e-netns", initializer=enter, initargs=(self._descriptor,)
        )

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        return self._pool.submit(function, *arguments).result()

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)
