"""Places whose sandboxes have a network; it leads nowhere, and not through this machine's."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.conformance.lab.ports import free_port
from k8e.egress import namespaces
from tests.places import Place

NOWHERE = "192.0.2.1"  # set aside for documents; nobody is there
CONNECT = f"""
import socket, sys
try:
    socket.create_connection(({NOWHERE!r}, 443), timeout=20)
except ConnectionRefusedError:
    sys.exit(3)
"""
"""Python code that must be refused, and then exits with 3."""
_SILENT = "http://127.0.0.1:9/"
INDEXES = {"PIP_INDEX_URL": _SILENT, "npm_config_registry": _SILENT}
"""pip and npm are asked what ``default`` means; here nobody answers them, and quickly."""


@contextlib.contextmanager
def world() -> Generator[Path]:
    """A network namespace that stands for this machine's, where uplinks may do as they like."""
    with tempfile.TemporaryDirectory(prefix="k8e-world-") as folder:
        path = Path(folder, "net")
        namespaces.make(path)
        try:
            yield path
            left = namespaces.run_in(path, socket.if_nameindex)
        finally:
            namespaces.unmount(path)
    assert [name for _, name in left if name.startswith("k8e")] == []


@contextlib.contextmanager
def networked(**environ: str) -> Generator[Place]:
    """A place with a gRPC endpoint, whose sandboxes get whatever policy they ask for."""
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with world() as path:
        settings = {
            "K8E_LISTEN": f"127.0.0.1:{free_port()}",
            "K8E_UPLINK_NAMESPACE": str(path),
            **INDEXES,
            **environ,
        }
        place = Place(**settings)
        yield place
        place.close()
