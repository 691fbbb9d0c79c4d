"""A call that meets a dying gateway: what it never read is sent anew, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from k8e import AsyncSandboxClient, SandboxClient, errors
from k8e.cli import fast
from k8e.client import local
from k8e.guest import wire


class Gateway:
    """Takes connections, and treats each as the next of ``manners`` says; counts calls it read."""

    def __init__(self, path: Path, manners: tuple[str, ...]) -> None:
        self.calls = 0
        self.path = path
        self._manners: list[Callable[[socket.socket], None]] = [
            getattr(self, name) for name in manners
        ]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for manner in self._manners:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                manner(connection)

    def close(self) -> None:
        # Whatever was not used up is, so that the thread ends.
        while self._thread.is_alive():
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as last:
                last.connect(str(self.path))
                last.sendall(b"x" * 9)
            self._thread.join(0.05)
        self._listener.close()

    # Manners.

    def leave_unread(self, connection: socket.socket) -> None:
        """Close without having read what came: wait until there is something."""
        connection.recv(1, socket.MSG_PEEK)

    def read_and_leave(self, connection: socket.socket) -> None:
        if connection.recv(65536):
            self.calls += 1

    def answer(self, connection: socket.socket) -> None:
        if connection.recv(65536):
            self.calls += 1
        told = wire.pack({"id": "e", "pid": 1, "session_id": "s", "pid_of": 1})
        connection.sendall(wire.frame(wire.RESULT, 1, told))
        end = {"code": 0, "status": "completed", "signal": 0, "duration_ms": 1, "truncated": False}
        connection.sendall(wire.frame(wire.EXIT, 1, wire.pack(end)))
        connection.recv(1)


@contextlib.contextmanager
def serving(path: Path, *names: str) -> Generator[Gateway]:
    gateway = Gateway(path, names)
    try:
        yield gateway
    finally:
        gateway.close()


def by_sdk(path: Path) -> int:
    with SandboxClient(f"unix:{path}") as client:
        return client.exec("s", "true").exit_code


def by_async_sdk(path: Path) -> int:
    async def work() -> int:
        async with AsyncSandboxClient(f"unix:{path}") as client:
            return (await client.exec("s", "true")).exit_code

    return asyncio.run(work())


def by_command(path: Path) -> int:
    options = fast.defaults() | {"code": b"true", "session_id": "s", "tenant": ""}
    fast.check(options)
    return fast._run(  # pyright: ignore[reportPrivateUsage]
        options, lambda: local.Connection(local.dial(str(path)))
    )


WAYS = [by_sdk, by_async_sdk, by_command]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_never_read_is_sent_to_the_next_gateway(
    way: Callable[[Path], int], tmp_path: Path
) -> None:
    with serving(tmp_path / "s", "leave_unread", "leave_unread", "answer") as gateway:
        assert way(tmp_path / "s") == 0
    assert gateway.calls == 1


@pytest.mark.parametrize("way", WAYS)
def test_what_may_have_been_read_is_never_sent_again(
    way: Callable[[Path], int], tmp_path: Path
) -> None:
    with serving(tmp_path / "s", "read_and_leave", "answer") as gateway:
        with pytest.raises(errors.GatewayUnreachable, match="closed the connection"):
            way(tmp_path / "s")
        assert gateway.calls == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_gateway_that_dies_again_and_again_is_given_up(
    way: Callable[[Path], int], tmp_path: Path
) -> None:
    with serving(tmp_path / "s", *["leave_unread"] * 5) as gateway:
        with pytest.raises(errors.GatewayUnreachable):
            way(tmp_path / "s")
        assert gateway.calls == 0
