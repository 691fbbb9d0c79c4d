"""Who gets in: tokens, hosts, origins, sizes, and requests that are none. Needs no sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from k8e import AsyncSandboxClient
from k8e.a2a import http, message, rpc, server
from k8e.a2a.runner import TaskRunner, TaskTerms
from k8e.a2a.tokens import A2aCaller, Tokens
from tests.a2a import certificates

pytestmark = pytest.mark.anyio
ME = A2aCaller("me", "1")
CALL = {"jsonrpc": "2.0", "id": 7, "method": "tasks/get", "params": {"id": "none"}}


class Front:
    """A server in this process; no call of these tests reaches a gateway."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            try:
                return await reader.read()
            except ConnectionResetError:
                return b""
            finally:
                writer.close()

    async def send(
        self,
        body: Any = CALL,
        method: str = "POST",
        path: str = "/",
        /,
        **headers: str | None,
    ) -> tuple[int, bytes]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        told: dict[str, str | None] = {
            "Host": f"127.0.0.1:{self.port}",
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Connection": "close",
        }
        told |= {key.replace("_", "-"): value for key, value in headers.items()}
        lines = [f"{key}: {value}" for key, value in told.items() if value is not None]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""])
        answer = await self.raw(head.encode("latin-1") + content)
        first, _, rest = answer.partition(b"\r\n")
        return int(first.split()[1]), rest.partition(b"\r\n\r\n")[2]

    async def rpc(self, body: Any, **headers: str) -> dict[str, Any]:
        status, found = await self.send(body, **headers)
        assert status == 200
        return json.loads(found)


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, **secured: str) -> AsyncGenerator[Front]:
    tokens = Tokens(tmp_path / "tokens")
    where: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        server.serve(
            server.place("127.0.0.1:0", **secured),
            tokens,
            TaskTerms(),
            lambda: AsyncSandboxClient(f"unix:{tmp_path}/nobody"),
            lambda told: where.set_result(told["url"]),
            stop,
        )
    )
    async with asyncio.timeout(10):
        url = await where
    try:
        yield Front(int(url.rstrip("/").rpartition(":")[2]), tokens.token("default"))
    finally:
        stop.set()
        async with asyncio.timeout(10):
            await task


@pytest.fixture
async def front(tmp_path: Path) -> AsyncGenerator[Front]:
    async with serving(tmp_path) as found:
        yield found


async def test_call_with_a_token_is_answered(front: Front) -> None:
    found = await front.rpc(CALL)
    assert found["id"] == 7
    assert found["error"]["code"] == -32001


async def test_card_needs_no_token(front: Front) -> None:
    path = "/.well-known/agent-card.json"
    status, body = await front.send(b"", "GET", path, Authorization=None, Content_Type=None)
    assert status == 200
    assert json.loads(body)["url"] == f"http://127.0.0.1:{front.port}/"


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (401, {"Authorization": None}),
        (401, {"Authorization": "Bearer wrong"}),
        (401, {"Authorization": "Basic {token}"}),
        (401, {"Authorization": "{token}"}),
        (421, {"Host": "evil.example"}),
        (421, {"Host": "evil.example:80@127.0.0.1"}),
        (421, {"Host": "127.0.0.1.evil.example"}),
        (421, {"Host": "["}),
        (403, {"Origin": "http://evil.example"}),
        (403, {"Origin": "null"}),
        (403, {"Origin": "http://127.0.0.1:1"}),
        (403, {"Sec_Fetch_Site": "cross-site"}),
        (403, {"Sec_Fetch_Site": "same-site"}),
        (415, {"Content_Type": "text/plain"}),
        (415, {"Content_Type": None}),
    ],
)
async def test_request_is_refused(
    front: Front, status: int, headers: dict[str, str | None]
) -> None:
    filled = {
        key: value and value.replace("{token}", front.token) for key, value in headers.items()
    }
    assert (await front.send(CALL, **filled))[0] == status


async def test_own_pages_and_own_names_pass(front: Front) -> None:
    own = f"localhost:{front.port}"
    assert (await front.send(CALL, Host=own, Origin=f"http://{own}"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 405), ("POST", "/x", 404), ("DELETE", "/.well-known/agent-card.json", 405)],
)
async def test_other_paths_and_verbs_are_refused(
    front: Front, method: str, path: str, status: int
) -> None:
    assert (await front.send(CALL, method, path))[0] == status


async def test_header_that_is_there_twice_is_refused(front: Front) -> None:
    twice = "Authorization: a\r\nAuthorization: b\r\n"
    head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\n{twice}\r\n"
    assert b" 400 " in (await front.raw(head.encode())).splitlines()[0]


async def test_body_is_not_read_without_a_token(front: Front) -> None:
    head = (
        f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\n"
        f"Content-Length: {http.MAX_BODY}\r\n\r\n"
    )
    assert b" 401 " in (await front.raw(head.encode())).splitlines()[0]


async def test_body_that_is_too_large_is_refused(front: Front) -> None:
    assert (await front.send(b"x" * (http.MAX_BODY + 1)))[0] == 413


@pytest.mark.parametrize("data", [b"\0\1\2\r\n\r\n", b"GET /\r\n\r\n", b"x" * 70_000])
async def test_what_is_no_http_ends_the_connection(front: Front, data: bytes) -> None:
    answer = await front.raw(data)
    assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"\xff", -32700),
        (b"[" * 200_000, -32700),
        (b"[]", -32600),
        (b"3", -32600),
        ({"method": "tasks/get"}, -32600),
        ({"jsonrpc": "2.0", "method": 3}, -32600),
        ({"jsonrpc": "2.0", "method": "nothing"}, -32601),
        ({"jsonrpc": "2.0", "method": "tasks/get", "params": []}, -32602),
        ({"jsonrpc": "2.0", "method": "tasks/get", "params": {"id": 3}}, -32602),
        ({"jsonrpc": "2.0", "method": "message/send", "params": {}}, -32602),
        ({"jsonrpc": "2.0", "method": "tasks/pushNotificationConfig/set", "params": {}}, -32003),
        ({"jsonrpc": "2.0", "method": "ListTasks", "params": {}}, -32004),
        ({"jsonrpc": "2.0", "method": "GetExtendedAgentCard"}, -32007),
    ],
)
async def test_bad_call_is_answered_with_its_number(front: Front, body: Any, code: int) -> None:
    found = await front.rpc(body)
    assert found["error"]["code"] == code
    assert found["error"]["message"]


async def test_version_that_does_not_have_the_method_is_told(front: Front) -> None:
    assert (await front.rpc(CALL, A2A_Version="1.0"))["error"]["code"] == -32009
    assert (await front.rpc(CALL, A2A_Version="0.3"))["error"]["code"] == -32001


async def test_many_connections_do_not_block_each_other(front: Front) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(60)]
    try:
        found = await asyncio.gather(*(front.rpc(CALL) for _ in range(50)))
        assert all(item["error"]["code"] == -32001 for item in found)
    finally:
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize("secured", [False, True])
async def test_silent_connections_lock_nobody_out(tmp_path: Path, secured: bool) -> None:
    certificate, key = certificates.make(tmp_path)
    more = {"certificate": certificate, "key": key} if secured else {}
    trusting = ssl.create_default_context(cafile=certificate) if secured else None
    async with serving(tmp_path, **more) as front:
        silent = [
            await asyncio.open_connection(
                "127.0.0.1", front.port, local_addr=(f"127.8.{n % 4}.1", 0)
            )
            for n in range(http.MAX_STRANGERS + 64)
        ]
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1",
                front.port,
                ssl=trusting,
                server_hostname="localhost" if secured else None,
            )
            path = "/.well-known/agent-card.json"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, item in [*silent, (reader, writer)]:
            item.close()


async def test_connections_of_callers_that_ask_no_more_lock_nobody_out(front: Front) -> None:
    body = json.dumps(CALL).encode()
    head = f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {front.token}\r\n"
    sized = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    held: list[asyncio.StreamWriter] = []
    async with asyncio.timeout(30):
        for _ in range(http.MAX_CONNECTIONS + 10):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            held.append(writer)
            writer.write(sized.encode() + body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert (await front.rpc(CALL))["error"]["code"] == -32001
    for writer in held:
        writer.close()


async def test_task_that_is_cancelled_before_it_began_is_over(tmp_path: Path) -> None:
    async with AsyncSandboxClient(f"unix:{tmp_path}/nobody") as client:
        desk = TaskRunner(client, TaskTerms(running=1))
        ask = message.TaskMessage(message.Job("x", "bash", 1), "", "", blocking=False)
        for _ in range(3):  # each one makes room for the next
            task = desk.submit(ME, ask)
            assert (await desk.cancel(ME, task.id)).status.state == "canceled"
        await desk.close()


async def test_task_has_only_so_many_streams_and_one_that_ends_makes_room(tmp_path: Path) -> None:
    async with AsyncSandboxClient(f"unix:{tmp_path}/nobody") as client:
        desk = TaskRunner(client, TaskTerms())
        service = rpc.RpcService(desk)
        ask = message.TaskMessage(message.Job("x", "bash", 1), "", "", blocking=False)
        task = desk.submit(ME, ask)  # it has not begun, and does not while we do not wait
        wanted = {"jsonrpc": "2.0", "id": 1, "method": "tasks/resubscribe"}
        body = json.dumps({**wanted, "params": {"id": task.id}}).encode()
        streams: list[AsyncGenerator[bytes]] = []
        for _ in range(rpc.MAX_STREAMS):
            found = await service.answer(ME, rpc.RpcCall(body, ""))
            assert not isinstance(found, bytes)
            assert (await anext(found)).startswith(b"data: ")
            streams.append(found)
        with pytest.raises(rpc.RpcRefusal, match="8 streams"):
            await service.answer(ME, rpc.RpcCall(body, ""))
        await streams.pop().aclose()
        assert not isinstance(await service.answer(ME, rpc.RpcCall(body, "")), bytes)
        for found in streams:
            await found.aclose()
        await desk.close()


async def test_gateway_that_does_not_answer_fails_the_task(tmp_path: Path) -> None:
    async with AsyncSandboxClient(f"unix:{tmp_path}/nobody") as client:
        desk = TaskRunner(client, TaskTerms())
        ask = message.TaskMessage(message.Job("x", "bash", 1), "", "", blocking=True)
        task = desk.submit(ME, ask)
        async with asyncio.timeout(30):
            await task.ended()
        assert task.status.state == "failed"
        assert "the sandbox failed" in task.status.text
        await desk.close()


async def test_with_a_certificate_it_speaks_tls(tmp_path: Path) -> None:
    certificate, key = certificates.make(tmp_path)
    async with serving(tmp_path, certificate=certificate, key=key) as front:
        trusting = ssl.create_default_context(cafile=certificate)
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", front.port, ssl=trusting, server_hostname="localhost"
            )
            path = "/.well-known/agent-card.json"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"url": "https://127.0.0.1:' in answer
