"""Exposed ports through the SDK, over both wires and on both runtimes; their life and their end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from k8e import AsyncSandboxClient, SandboxClient, errors
from tests.gateway.exposed import PATIENCE, Service, start_server
from tests.places import NewPlace, Place, eventually

PORT = 8200
SLOW_MACHINE = 120


def is_closed(service: Service) -> bool:
    """Whether nobody listens there any more."""
    try:
        service.raw().close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        pass  # it was being closed
    return False


def read_all(stream: http.client.HTTPResponse) -> None:
    while stream.read(1 << 20):
        pass


def test_a_server_is_reached_by_its_url_and_by_headers(
    client: SandboxClient, session_id: str
) -> None:
    exposed = client.expose(session_id, PORT)
    assert (exposed.port, exposed.host, exposed.session_id) == (PORT, "127.0.0.1", session_id)
    assert exposed.url == f"{exposed.base_url}?k8e-token={exposed.token}"
    assert len(exposed.token) == 40
    address = urlsplit(exposed.url)
    assert address.hostname
    assert address.hostname.startswith("127.")
    assert not address.hostname.startswith("127.0.")
    with pytest.raises(urllib.error.HTTPError, match="502"):
        urllib.request.urlopen(exposed.url, timeout=PATIENCE)
    start_server(client, session_id, PORT)
    with urllib.request.urlopen(exposed.url, timeout=PATIENCE) as answer:
        assert answer.status == 200
    request = urllib.request.Request(exposed.base_url, headers=exposed.headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert answer.status == 200
    client.unexpose(session_id, PORT)
    assert is_closed(Service(exposed))
    client.exec(session_id, "pkill -f echo_server.py")


def test_exposing_twice_gives_the_same_url_and_another_host_is_a_conflict(
    client: SandboxClient, session_id: str
) -> None:
    exposed = client.expose(session_id, PORT)
    assert client.expose(session_id, PORT, "127.0.0.1") == exposed
    with pytest.raises(errors.Conflict, match=r"exposed already, on host 127\.0\.0\.1"):
        client.expose(session_id, PORT, "localhost")
    second = client.expose(session_id, PORT + 1, "localhost")
    assert urlsplit(second.url).hostname != urlsplit(exposed.url).hostname
    assert second.token != exposed.token
    assert client.list_exposed(session_id) == [exposed, second]
    assert {item.url for item in client.list_exposed()} >= {exposed.url, second.url}
    for port in (PORT, PORT + 1):
        client.unexpose(session_id, port)
    assert client.list_exposed(session_id) == []
    with pytest.raises(errors.NotExposed, match=f"port {PORT} of session"):
        client.unexpose(session_id, PORT)
    again = client.expose(session_id, PORT)
    assert again.token != exposed.token
    client.unexpose(session_id, PORT)


def test_a_server_that_comes_later_is_waited_for(client: SandboxClient, session_id: str) -> None:
    with pytest.raises(errors.TimedOut, match=f"nothing listens on port {PORT + 5} of session"):
        client.wait_for_port(session_id, PORT + 5, timeout=0.1)
    serve = f"sleep 0.3; exec python3 -m http.server {PORT + 5} --bind ::1"
    server = client.start(session_id, serve)
    client.wait_for_port(session_id, PORT + 5, "localhost", timeout=SLOW_MACHINE)
    assert server.poll().status == "running"
    assert client.exec(session_id, "echo on").stdout == "on\n", "the same connection goes on"
    server.kill()


async def test_a_wait_for_a_server_ends_with_its_session(place: Place, runtime: str) -> None:
    async with AsyncSandboxClient(place.endpoint) as client:
        session_id = await client.create_session(runtime)
        waiting = asyncio.create_task(client.wait_for_port(session_id, PORT, timeout=PATIENCE))
        assert (await client.exec(session_id, "echo on")).stdout == "on\n", "nobody is held up"
        await client.destroy_session(session_id)
        with pytest.raises((errors.SandboxDied, errors.SessionNotFound)):
            await waiting


@pytest.mark.parametrize(
    ("port", "host"),
    [
        (0, "127.0.0.1"),
        (-1, "127.0.0.1"),
        (65536, "127.0.0.1"),
        (True, "127.0.0.1"),
        ("80", "127.0.0.1"),
        (80, "0.0.0.0"),
        (80, "10.0.0.1"),
        (80, "example.org"),
        (80, "169.254.169.254"),
        (80, "::ffff:127.0.0.1"),
        (80, "127.0.0.1\0"),
    ],
)
def test_only_ports_of_the_sandboxs_own_loopback_can_be_exposed(
    client: SandboxClient, session_id: str, port: int, host: str
) -> None:
    with pytest.raises(errors.InvalidRequest):
        client.expose(session_id, port, host)
    assert client.list_exposed(session_id) == []


def test_sessions_that_are_not_there_expose_nothing(client: SandboxClient) -> None:
    with pytest.raises(errors.SessionNotFound):
        client.expose("no-such-session", PORT)
    with pytest.raises(errors.SessionNotFound):
        client.unexpose("no-such-session", PORT)
    with pytest.raises(errors.SessionNotFound):
        client.list_exposed("no-such-session")
    with pytest.raises(errors.InvalidRequest):
        client.expose("", PORT)


def test_a_session_exposes_so_many_ports_and_no_more(
    client: SandboxClient, session_id: str
) -> None:
    for port in range(1000, 1032):
        client.expose(session_id, port)
    with pytest.raises(errors.LimitExceeded, match="32 ports"):
        client.expose(session_id, 1032)
    assert client.expose(session_id, 1031).port == 1031, "what is exposed already still is"
    for port in range(1000, 1032):
        client.unexpose(session_id, port)


async def test_the_asynchronous_client_exposes_lists_and_ends(
    place: Place, session_id: str
) -> None:
    async with AsyncSandboxClient(place.endpoint) as client:
        exposed = await client.expose(session_id, PORT)
        assert await client.list_exposed(session_id) == [exposed]
        await client.unexpose(session_id, PORT)
        assert await client.list_exposed(session_id) == []


def test_a_url_ends_with_its_session_and_cuts_off_who_is_there(place: Place, runtime: str) -> None:
    with SandboxClient(place.endpoint) as client:
        session_id = client.create_session(runtime)
        start_server(client, session_id, PORT)
        service = Service(client.expose(session_id, PORT))
        with contextlib.closing(service.connect()) as connection:
            connection.request("GET", "/endless", headers=service.exposed.headers)
            with connection.getresponse() as stream:
                assert stream.read(10)
                client.destroy_session(session_id)
                eventually(lambda: is_closed(service))
                with pytest.raises((ConnectionError, http.client.IncompleteRead)):
                    read_all(stream)
        assert session_id not in [item.session_id for item in client.list_exposed()]


def test_a_url_ends_when_the_sandbox_dies(new_place: NewPlace) -> None:
    place = new_place()
    with SandboxClient(place.endpoint) as client:
        place.json("gateway", "--background")
        session_id = client.create_session("container")
        service = Service(client.expose(session_id, PORT))
        (sandbox_id,) = place.sandboxes()
        for folder in Path("/proc").glob("[0-9]*"):
            if is_guest_of(folder, sandbox_id):
                os.kill(int(folder.name), 9)
        eventually(lambda: is_closed(service))
        assert client.list_exposed() == []


def is_guest_of(folder: Path, sandbox_id: str) -> bool:
    """Whether a process is the first one of a sandbox."""
    try:
        status = (folder / "status").read_text()
        inside = [line.split()[-1] for line in status.splitlines() if line.startswith("NSpid")]
        return inside == ["1"] and sandbox_id in (folder / "cgroup").read_text()
    except OSError:
        return False


def test_urls_survive_a_crash_of_the_gateway(new_place: NewPlace, runtime: str) -> None:
    place = new_place()
    place.json("gateway", "--background")
    with SandboxClient(place.endpoint) as client:
        session_id = client.create_session(runtime)
        start_server(client, session_id, PORT)
        exposed = client.expose(session_id, PORT)
        ended = client.expose(session_id, PORT + 1)
        client.unexpose(session_id, PORT + 1)
    service = Service(exposed)
    with contextlib.closing(service.connect()) as connection:
        connection.request("GET", "/hold", headers=exposed.headers)
        eventually(lambda: service.state()["requests"] >= 2)
        place.kill_gateway()
        with pytest.raises(OSError):  # noqa: PT011 - reset or closed, as the kernel likes
            connection.getresponse()
    assert is_closed(service)
    place.json("gateway", "--background")
    state = eventually(lambda: service.ask("/state").json())
    assert state["left"] == 1, "the server heard that the gateway was gone"
    assert service.ask("/", token=False).status == 403
    assert is_closed(Service(ended))
    with SandboxClient(place.endpoint) as client:
        assert client.list_exposed() == [exposed]
        client.destroy_session(session_id)
        assert is_closed(service)
    place.kill_gateway()
    place.json("gateway", "--background")
    assert is_closed(service)


def test_a_url_whose_place_was_taken_meanwhile_is_dropped_and_that_is_told(
    new_place: NewPlace,
) -> None:
    place = new_place()
    place.json("gateway", "--background")
    with SandboxClient(place.endpoint) as client:
        session_id = client.create_session("container")
        service = Service(client.expose(session_id, PORT))
    place.kill_gateway()
    assert service.url.hostname
    with socket.create_server((service.url.hostname, service.url.port or 0)):
        place.json("gateway", "--background")
        with SandboxClient(place.endpoint) as client:
            assert client.list_exposed(session_id) == []
            new = client.expose(session_id, PORT)
    assert new.token != service.token
    assert f"port {PORT} of session {session_id} is no longer exposed" in (
        place.data / "gateway.log"
    ).read_text("utf-8")


READ = "import os, sys; os.setuid(65534); open(sys.argv[1], 'rb')"


def test_other_users_can_read_no_tokens(place: Place, session_id: str) -> None:
    with SandboxClient(place.endpoint) as client:
        exposed = client.expose(session_id, PORT)
        files = [path for path in place.data.iterdir() if path.name.startswith("exposures.db")]
        assert exposed.token.encode() in b"".join(path.read_bytes() for path in files)
        for path in files:
            assert path.stat().st_mode & 0o777 == 0o600
            argv = [sys.executable, "-IS", "-c", READ, str(path)]
            done = subprocess.run(argv, capture_output=True, check=False, timeout=PATIENCE)
            assert b"PermissionError" in done.stderr
        client.unexpose(session_id, PORT)
    assert exposed.token not in (place.data / "gateway.log").read_text("utf-8")
