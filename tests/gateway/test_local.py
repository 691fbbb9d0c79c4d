"""The unix socket: what connections on it may cost that say nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator

import pytest

from k8e import SandboxClient
from k8e.gateway import local
from tests.gateway.test_rpc_front import is_open
from tests.places import Place, eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root")


@pytest.fixture
def place() -> Generator[Place]:
    place = Place()
    yield place
    place.close()


def test_silent_local_connections_are_bounded_and_end_nobody_who_has_called(place: Place) -> None:
    place.json("sandbox", "status")  # starts it
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(SandboxClient(endpoint=place.endpoint))
        assert client.list_sessions() == []
        silent = [
            stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(local.MAX_SILENT + 40)
        ]
        for number, item in enumerate(silent):
            item.connect(str(place.socket))
            item.sendall(b"\0" * (number % 3))  # or they have begun to say something
        eventually(lambda: sum(map(is_open, silent)) <= local.MAX_SILENT)
        assert client.list_sessions() == []
        place.json("sandbox", "status")
