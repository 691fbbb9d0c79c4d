"""Opening the endpoint: addresses, taken ports, missing packages, renewed certificates, errors."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import logging
import socket
import ssl
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from k8e import errors, settings
from k8e.auth.keys import Keys
from k8e.auth.store import SqliteKeyStore
from k8e.gateway import identity, tls
from k8e.gateway.rpc import endpoint as rpc_endpoint
from k8e.gateway.rpc import errors as rpc_errors
from k8e.gateway.rpc import server
from k8e.gateway.service import Gateway
from k8e.sessions.approvals import Approvals
from k8e.sessions.exchange import GuestOSError
from k8e.sessions.service import Sessions


@pytest.fixture
async def gateway(tmp_path: Path) -> Gateway:
    return without_sessions(tmp_path, "127.0.0.1:0")


def without_sessions(folder: Path, listen: str) -> Gateway:
    """A gateway on which nobody makes a call."""
    config = settings.load({}, data_dir=folder, run_dir=folder / "run", listen=listen)
    nobody = Keys(SqliteKeyStore(folder / "keys.db"))
    return Gateway(config, cast("Sessions", None), cast("Approvals", None), nobody)


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("localhost:0", "127.0.0.1:0"),
        ("[::1]:9", "[::1]:9"),
        ("127.8.8.8:9", "127.8.8.8:9"),
        ("0.0.0.0:50051", "0.0.0.0:50051"),
        ("[::]:50051", "[::]:50051"),
        ("192.0.2.1:50051", "192.0.2.1:50051"),
    ],
)
def test_addresses_are_taken(listen: str, address: str) -> None:
    assert str(rpc_endpoint.parse(listen)) == address


@pytest.mark.parametrize("listen", ["", "50051", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="K8E_LISTEN"):
        rpc_endpoint.parse(listen)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_named_with_its_setting(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, reuse_port=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.Conflict, match=f"port {port} is taken .*K8E_LISTEN"):
            rpc_endpoint.check_free(rpc_endpoint.parse(f"[{host}]:{port}"))


async def test_a_gateway_on_a_taken_port_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(errors.Conflict, match="is taken"):
            await rpc_endpoint.listen(without_sessions(tmp_path, address))


async def test_a_taken_port_is_noticed_even_if_it_was_just_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_away(_: identity.TcpEnd) -> None:
        """Somebody else was quicker after this."""

    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(rpc_endpoint, "check_free", look_away)
        with pytest.raises(errors.K8eError, match="cannot listen"):
            await rpc_endpoint.listen(without_sessions(tmp_path, address))


async def test_without_the_extra_the_gateway_goes_on(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec

    def find_all_but_grpc(name: str) -> ModuleSpec | None:
        return None if name == "grpc" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_grpc)
    with caplog.at_level(logging.WARNING):
        server = await rpc_endpoint.listen(gateway)
    assert server.address.startswith("none:")
    assert "grpc not installed" in caplog.text
    await server.close()


def serial(endpoint: identity.TcpEnd, ca: Path) -> str:
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection((str(endpoint.address), endpoint.port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as secured,
    ):
        return str((secured.getpeercert() or {})["serialNumber"])


async def test_new_connections_see_the_renewed_certificate(gateway: Gateway) -> None:
    folder = gateway.settings.data_dir / "tls"
    certificates = tls.Certificates(folder)
    await certificates.load()
    endpoint = rpc_endpoint.parse(gateway.settings.listen)
    running = await server.start(gateway, endpoint, certificates)
    assert running is not None
    try:
        first = await asyncio.to_thread(serial, running.endpoint, folder / "ca.crt")
        assert await asyncio.to_thread(serial, running.endpoint, folder / "ca.crt") == first
        record = json.loads((folder / "server.json").read_text())
        (folder / "server.json").write_text(json.dumps({**record, "not_after": time.time()}))
        await certificates.load()
        second = await asyncio.to_thread(serial, running.endpoint, folder / "ca.crt")
        assert second != first
    finally:
        await running.stop(0)


@pytest.mark.parametrize(
    ("error", "status", "details", "code"),
    [
        (
            errors.SessionNotFound("session x not found", hint="look"),
            grpc.StatusCode.NOT_FOUND,
            "session x not found (look)",
            "session_not_found",
        ),
        (
            GuestOSError(OSError(errno.ENOSPC, "No space")),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "No space",
            "ENOSPC",
        ),
        (
            GuestOSError(OSError(errno.EXDEV, "far")),
            grpc.StatusCode.FAILED_PRECONDITION,
            "far",
            "EXDEV",
        ),
        (identity.UnknownPeer("who"), grpc.StatusCode.UNAUTHENTICATED, "who", "unauthenticated"),
        (
            OSError(errno.ENOENT, "secret host path"),
            grpc.StatusCode.INTERNAL,
            "internal error; the gateway's log has it",
            "internal",
        ),
        (
            ZeroDivisionError("secret"),
            grpc.StatusCode.INTERNAL,
            "internal error; the gateway's log has it",
            "internal",
        ),
    ],
    ids=["ours", "disk", "other", "stranger", "host", "bug"],
)
def test_errors_become_statuses_and_keep_our_own_to_ourselves(
    error: Exception, status: grpc.StatusCode, details: str, code: str
) -> None:
    assert rpc_errors.describe(error) == (status, details, code)


def test_every_error_of_ours_has_a_grpc_status() -> None:
    kinds: list[type[errors.K8eError]] = [errors.K8eError, *errors.K8eError.__subclasses__()]
    kinds = [k for k in kinds if k.__module__ == errors.__name__]  # others are on no wire
    for kind in kinds:
        assert isinstance(rpc_errors.describe(kind("x")).status, grpc.StatusCode)


def test_text_that_is_no_utf8_can_be_sent() -> None:
    text: Any = b"a\xff".decode("utf-8", "surrogateescape")
    assert rpc_errors.as_text(text) == "a\ufffd"
