"""Real sandboxes of a real gateway, on an internet out of network namespaces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import pytest

from k8e.conformance.lab.rooms import QUICKLY, Attempts, Room, Scene, Words

__all__ = ["QUICKLY", "RUNTIMES", "Attempts", "Room", "Scene", "Words", "opened", "reset"]

RUNTIMES = ("container", "gvisor")


@contextlib.contextmanager
def opened() -> Generator[Scene]:
    """A scene that leaves nothing behind."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces and the local runtimes need root")
    scene = Scene()
    try:
        yield scene
    finally:
        scene.close()


@contextlib.contextmanager
def reset(room: Room) -> Generator[Room]:
    """A room as if it were new, and nothing of it seen yet."""
    room.reset()
    yield room
    room.reset()
