"""The gateway's HTTP endpoint: the door of every route, who is who, and how it begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import httpx2
import pytest
from mcp_types import Implementation

from k8e import errors, http_connections, settings
from k8e.gateway.http import endpoint
from tests.gateway import http_gateways
from tests.gateway.http_gateways import Caller, HttpGateway
from tests.mcp import connecting
from tests.mcp.connecting import MODERN, refused, told
from tests.places import NewPlace, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
PATIENCE = 30.0
LOADED_LATER = {"uvicorn", "mcp", "starlette", "k8e.mcp", "k8e.a2a", "k8e.gateway.http.app"}
PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
ROUTES = [
    ("GET", "/healthz"),
    ("GET", "/metrics"),
    ("POST", "/mcp"),
    ("GET", "/mcp"),
    ("POST", "/a2a"),
]
CARD = "/.well-known/agent-card.json"
STREAM = {"accept": "text/event-stream"}
EVERY = {"accept": "application/json, text/event-stream"}
HELLO = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


@pytest.fixture(scope="module")
def gateway() -> Generator[HttpGateway]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with http_gateways.started() as running:
        before = running.modules()
        assert not before & LOADED_LATER, "nothing is loaded before somebody comes"
        yield running


@contextlib.asynccontextmanager
async def web(caller: HttpGateway | Caller) -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(headers=caller.headers, timeout=PATIENCE) as client:
        yield client


async def test_health_loads_the_server_but_no_dialect(gateway: HttpGateway) -> None:
    async with web(gateway) as client:
        found = await client.get(f"{gateway.root}/healthz")
        assert (found.status_code, found.json()["status"]) == (200, "ok")
        assert "server" not in found.headers
        assert "uvicorn" in gateway.modules()
        assert not gateway.modules() & {"mcp", "k8e.mcp"}
        assert (await client.post(f"{gateway.root}/healthz")).status_code == 405
        assert (await client.get(f"{gateway.root}/other")).status_code == 404


REFUSED = [
    ({"authorization": ""}, 401),
    ({"authorization": "Bearer wrong"}, 401),
    ({"authorization": "Bearer k8e-" + "0" * 64}, 401),
    ({"host": "evil.example"}, 421),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "http://localhost:3000"}, 403),
    ({"origin": "null"}, 403),
]


@pytest.mark.parametrize(("headers", "status"), REFUSED, ids=str)
async def test_door_is_before_every_route(
    gateway: HttpGateway, headers: dict[str, str], status: int
) -> None:
    async with web(gateway) as client:
        for method, route in [*ROUTES, ("GET", "/other")]:
            found = await client.request(method, gateway.root + route, headers=headers)
            # A flood of wrong credentials is told to stop.
            assert found.status_code in (status, 429 if status == 401 else status), route
            assert found.headers["connection"] == "close"


@pytest.mark.parametrize("path", [CARD, f"/a2a{CARD}"])
async def test_agent_card_is_for_anybody_but_pages_of_other_sites(
    gateway: HttpGateway, path: str
) -> None:
    url = gateway.root + path
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}):  # it is not looked at
            found = await client.get(url, headers=headers)
            assert (found.status_code, found.json()["url"]) == (200, f"{gateway.root}/a2a")
            assert found.headers["cache-control"] == "no-store"
        assert (await client.head(url)).status_code == 200
        assert (await client.post(url)).status_code == 405
        for headers, status in REFUSED:
            if status in (403, 421):
                assert (await client.get(url, headers=headers)).status_code == status
    assert "k8e.a2a.http" not in gateway.modules(), "strangers load no dialect"


async def test_a_caller_without_the_role_agent_has_no_tasks(gateway: HttpGateway) -> None:
    caller = gateway.key("decider", "approver")
    call = {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"id": "x"}}
    async with web(caller) as client:
        found = await client.post(f"{gateway.root}/a2a", json=call)
    assert found.status_code == 403
    assert "needs the role agent" in found.text


async def test_stranger_gets_an_answer_before_the_body_is_read(gateway: HttpGateway) -> None:
    """And so nobody makes us keep what a stranger sends."""
    port = int(gateway.root.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        assert (await reader.readline()).split()[1] in (b"401", b"429")
        await reader.read()
    writer.close()


def dial(gateway: HttpGateway, data: bytes) -> socket.socket:
    """A connection on which this has been said."""
    address = ("127.0.0.1", int(gateway.root.rpartition(":")[2]))
    made = socket.create_connection(address, timeout=PATIENCE)
    made.sendall(data)
    return made


def health(caller: HttpGateway | Caller) -> bytes:
    credential = caller.headers["authorization"]
    return (
        f"GET /healthz HTTP/1.1\r\nHost: localhost\r\nAuthorization: {credential}\r\n\r\n".encode()
    )


@pytest.fixture
def many_files() -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_of_one_caller_that_ask_no_more_lock_nobody_out(
    gateway: HttpGateway, many_files: None
) -> None:
    greedy = health(gateway.key("greedy"))
    right = health(gateway)
    with contextlib.ExitStack() as held:
        for _ in range(http_connections.MAX_CONNECTIONS + 20):
            made = held.enter_context(dial(gateway, greedy))
            assert made.recv(4096).startswith(b"HTTP/1.1 200")
            made.sendall(b"GET /healthz HTTP/1.1\r\nX: ")  # and so on, as slowly as it likes
        for _ in range(3):
            with dial(gateway, right) as made:
                assert made.recv(4096).startswith(b"HTTP/1.1 200")


async def test_body_of_too_many_values_is_never_read(gateway: HttpGateway) -> None:
    """To read it would hold everybody up for seconds, and take the memory of the machine."""
    body = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":[' + b"[]," * 100_000 + b"1]}}"
    async with web(gateway) as client:
        for more in ({}, {"mcp-protocol-version": MODERN}):
            headers = {**EVERY, **more, "content-type": "application/json"}
            found = await client.post(gateway.url, content=body, headers=headers)
            assert (found.status_code, "JSON values" in found.text) == (413, True)


@pytest.mark.parametrize(
    "rest",
    [b"zz\r\n", b"1\r\na\r\n" * 10_000, b"a:\r\n"],
    ids=["no chunk", "single bytes", "trailer"],
)
async def test_what_is_no_http_is_refused_without_a_trace_in_the_log(
    gateway: HttpGateway, rest: bytes
) -> None:
    before = http_gateways.log(gateway.place).read_text()
    for head in (b"", f"Authorization: Bearer {gateway.token}\r\n".encode()):
        start = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\n" + head
        with dial(gateway, start + b"Transfer-Encoding: chunked\r\n\r\n" + rest) as made:
            assert made.recv(4096).startswith(b"HTTP/1.1 400")
    stream = f"GET /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gateway.token}\r\n"
    chunked = f"{stream}Accept: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with dial(gateway, chunked.encode()) as made:
        assert made.recv(4096).startswith(b"HTTP/1.1 200")
        made.sendall(rest)
        with contextlib.suppress(ConnectionResetError):
            while made.recv(4096):
                pass
    assert "Traceback" not in http_gateways.log(gateway.place).read_text()[len(before) :]


async def test_flood_of_wrong_credentials_harms_no_right_one(gateway: HttpGateway) -> None:
    wrong = {"authorization": "Bearer wrong"}
    async with web(gateway) as client:
        found = [
            (await client.get(f"{gateway.root}/healthz", headers=wrong)).status_code
            for _ in range(30)
        ]
        assert found[-1] == 429
        assert (await client.get(f"{gateway.root}/healthz")).status_code == 200


async def test_metrics_are_for_admins(gateway: HttpGateway) -> None:
    """Agents have the token of the file, so that it is no admin's."""
    url = f"{gateway.root}/metrics"
    async with web(gateway) as client:
        assert (await client.get(url)).status_code == 403
    async with web(gateway.key("watcher", "admin")) as client:
        found = await client.get(url)
        assert found.status_code == 200
        assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "k8e_" in found.text
        assert (await client.post(gateway.url, json=PING)).status_code == 403


@pytest.mark.parametrize("mode", [connecting.LEGACY, MODERN])
async def test_official_client_runs_code_over_the_mount(gateway: HttpGateway, mode: str) -> None:
    async with connecting.over_http(gateway, mode=mode) as client:
        found = told(await client.call_tool("sandbox_run", {"code": "echo hi"}))
        assert (found["exit_code"], found["stdout"]) == (0, "hi\n")
        gone = {"session_id": found["session_id"]}
        assert told(await client.call_tool("sandbox_destroy_session", gone))["ok"]


async def opened(client: httpx2.AsyncClient, url: str) -> str:
    """Open a connection of the protocol; its id."""
    found = await client.post(url, json=HELLO, headers=EVERY)
    assert found.status_code == 200, found.text
    return found.headers["mcp-session-id"]


async def test_nobody_can_name_what_another_caller_has(gateway: HttpGateway) -> None:
    key, other = gateway.key("one"), gateway.key("two")
    async with connecting.over_http(key, mode=MODERN) as client:
        made = told(await client.call_tool("sandbox_create_session"))["session_id"]
        listed = gateway.place.json("sandbox", "sessions")["sessions"]
        assert made not in [item["session_id"] for item in listed], "it is the key's, not ours"
        named = {"command": "true", "session_id": made}
        for caller in (other, gateway):
            async with connecting.over_http(caller, mode=MODERN) as stranger:
                assert "not found" in refused(await stranger.call_tool("sandbox_exec", named))
        assert told(await client.call_tool("sandbox_exec", named))["exit_code"] == 0
    for owner, stranger in ((gateway, key), (key, gateway), (key, other)):
        async with web(owner) as client, web(stranger) as foreign:
            session = await opened(client, gateway.url)
            version = {"mcp-session-id": session, "mcp-protocol-version": "2025-06-18"}
            for method in ("POST", "GET", "DELETE"):
                found = await foreign.request(
                    method, gateway.url, json=PING, headers=EVERY | version
                )
                assert found.status_code == 404, (method, found.text)
            assert (
                await client.post(gateway.url, json=PING, headers=EVERY | version)
            ).status_code == 200
            assert (await client.delete(gateway.url, headers=version)).status_code == 200


async def test_sandbox_of_a_client_without_a_connection_is_its_credentials_alone(
    gateway: HttpGateway,
) -> None:
    """The same client name with another credential is another client."""
    one, two = gateway.key("continuous"), gateway.key("imitator")
    mode = {"mode": MODERN, "client_info": Implementation(name="agent", version="1")}
    sessions: list[str] = []
    for caller, code in ((one, "echo mine > a"), (two, "cat a"), (gateway, "cat a")):
        async with connecting.over_http(caller, **mode) as client:
            found = told(await client.call_tool("sandbox_run", {"code": code}))
            assert found["exit_code"] == (0 if caller is one else 1)
            sessions.append(found["session_id"])
            listed = told(await client.call_tool("sandbox_list_sessions"))["sessions"]
            assert [item["session_id"] for item in listed] == [found["session_id"]]
    assert len(set(sessions)) == 3
    for caller, session_id in zip((one, two, gateway), sessions, strict=True):
        async with connecting.over_http(caller, **mode) as client:
            found = told(await client.call_tool("sandbox_run", {"code": "true"}))
            assert found["session_id"] == session_id
            gone = {"session_id": session_id}
            assert told(await client.call_tool("sandbox_destroy_session", gone))["ok"]


async def test_older_streams_are_their_openers_alone(gateway: HttpGateway) -> None:
    key = gateway.key("old")
    async with (
        web(key) as client,
        web(gateway) as foreign,
        client.stream("GET", gateway.url, headers=STREAM) as stream,
    ):
        lines = stream.aiter_lines()
        assert await anext(lines) == "event: session"
        named = {"mcp-session-id": (await anext(lines)).removeprefix("data: ")}
        assert (await foreign.post(gateway.url, json=PING, headers=named)).status_code == 404
        assert (await client.post(gateway.url, json=PING, headers=named)).status_code == 200


async def test_deleted_key_ends_its_open_streams_and_sessions(gateway: HttpGateway) -> None:
    key = gateway.key("gone")
    async with web(key) as client:
        session = await opened(client, gateway.url)
        run = {"name": "sandbox_run", "arguments": {"code": "sleep 100"}}
        call = {"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": run}
        named = EVERY | {"mcp-session-id": session, "mcp-protocol-version": "2025-06-18"}
        async with client.stream("GET", gateway.url, headers=STREAM) as stream:
            running = asyncio.create_task(client.post(gateway.url, json=call, headers=named))
            count = gateway.place.json("status")["sessions"]
            await asyncio.to_thread(
                eventually, lambda: gateway.place.json("status")["sessions"] > count
            )
            gateway.place.json("sandbox", "api-key", "delete", "gone")
            async with asyncio.timeout(PATIENCE):
                async for _ in stream.aiter_bytes():
                    pass
                await asyncio.wait({running})
        assert (await client.get(f"{gateway.root}/healthz")).status_code in (401, 429)
    await asyncio.to_thread(
        eventually, lambda: gateway.place.json("status")["sessions"] == count, PATIENCE
    )


async def test_idle_connection_of_nobody_ends(gateway: HttpGateway) -> None:
    """Anybody on this machine can open connections."""
    port = int(gateway.root.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HT")
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == b""
    writer.close()


async def test_silent_connections_lock_nobody_out(gateway: HttpGateway) -> None:
    """More than all that there is room for, each of which has sent half a request or nothing."""
    port = int(gateway.root.rpartition(":")[2])
    silent: list[asyncio.StreamWriter] = []
    for number in range(1100):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HT"[: number % 9])
        silent.append(writer)
    async with web(gateway) as client:
        for _ in range(3):
            assert (await client.get(f"{gateway.root}/healthz")).status_code == 200
    for writer in silent:
        writer.close()


async def test_calls_are_written_down_with_who_made_them(gateway: HttpGateway) -> None:
    def wrote(**wanted: str) -> bool:
        done = gateway.place.cli("audit", "--json")
        rows = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
        return any(all(f'"{key}":"{wanted[key]}"' in row for key in wanted) for row in rows)

    async with web(gateway) as client:
        wrong = {"host": "evil.example"}
        assert (await client.get(gateway.url, headers=wrong)).status_code == 421
    async with connecting.over_http(gateway, mode=MODERN) as client:
        made = told(await client.call_tool("sandbox_create_session"))["session_id"]
        gone = {"session_id": made}
        assert told(await client.call_tool("sandbox_destroy_session", gone))["ok"]
    await asyncio.to_thread(eventually, lambda: wrote(session=made, via="token", peer="http /mcp"))
    await asyncio.to_thread(eventually, lambda: wrote(action="call.refused", via="http"))


async def test_missing_package_is_told_and_the_rest_works() -> None:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with http_gateways.started(WITHOUT="mcp") as gateway:
        async with web(gateway) as client:
            found = await client.post(gateway.url, json=PING)
            assert found.status_code == 501
            assert "pip install '.[gateway]'" in found.text
            assert (await client.get(f"{gateway.root}/healthz")).status_code == 200


async def test_stop_does_not_wait_for_open_streams() -> None:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with http_gateways.started() as gateway:
        async with web(gateway) as client:
            session = await opened(client, gateway.url)
            named = {"mcp-session-id": session, "mcp-protocol-version": "2025-06-18"}
            run = {"name": "sandbox_create_session"}
            call = {"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": run}
            await client.post(gateway.url, json=call, headers=EVERY | named)
            async with (
                client.stream("GET", gateway.url, headers=STREAM | named) as new,
                client.stream("GET", gateway.url, headers=STREAM) as old,
            ):
                assert (new.status_code, old.status_code) == (200, 200)
                assert gateway.place.json("status")["sessions"] == 1
                began = time.monotonic()
                gateway.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE):
                    for stream in (new, old):
                        async for _ in stream.aiter_bytes():
                            pass
                code = await asyncio.to_thread(gateway.process.wait, PATIENCE)
                assert (code, time.monotonic() - began < 10) == (0, True)
        assert gateway.place.sandboxes(), "there was one"
        # What the connection made went with it, before the gateway left.
        assert gateway.place.json("sandbox", "sessions")["sessions"] == []
        said = http_gateways.log(gateway.place).read_text()
        assert "Traceback" not in said, said


def test_address_must_be_one_with_a_port() -> None:
    assert str(endpoint.parse("localhost:8811")) == "127.0.0.1:8811"
    assert str(endpoint.parse(":1")) == "127.0.0.1:1"
    assert str(endpoint.parse("[::1]:8811")) == "[::1]:8811"
    assert str(endpoint.parse("0.0.0.0:8811")) == "0.0.0.0:8811"
    for wrong in ("127.0.0.1", "name:1", "127.0.0.1:99999"):
        with pytest.raises(errors.InvalidRequest, match="K8E_HTTP"):
            endpoint.parse(wrong)


@pytest.mark.parametrize(
    ("listen", "background", "address"),
    [
        ("127.0.0.1:50051", False, endpoint.DEFAULT),
        ("127.0.0.1:50051", True, "none"),
        ("none", False, "none"),
    ],
)
def test_only_a_gateway_that_stays_and_has_ports_serves_http_unasked(
    listen: str, background: bool, address: str
) -> None:
    found = settings.load({}, listen=listen)
    assert endpoint.usual(found, background=background) == address


def test_taken_port_is_told(new_place: NewPlace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        place = new_place()
        done = place.cli("gateway", "--http", address)
        assert done.returncode != 0
        assert b"is taken by another program (K8E_HTTP)" in done.stderr
        # In the background somebody waits for sandboxes, who may not need it at all.
        place.json("gateway", "--background", "--http", address)
        eventually(lambda: "is taken" in place.json("status")["http"])


def test_token_that_others_can_read_is_refused(new_place: NewPlace) -> None:
    place = new_place(K8E_HTTP="127.0.0.1:0")
    file = Path(place.home, ".k8e", "sandbox", "mcp-token")
    file.parent.mkdir(parents=True)
    file.write_text("a-token-that-others-can-read\n")
    file.chmod(0o644)
    done = place.cli("gateway")
    assert done.returncode != 0
    assert b"other users can read the token" in done.stderr
