"""Calls and their answers, for one caller. No call of these tests reaches a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from k8e import AsyncSandboxClient
from k8e.a2a import message, rpc
from k8e.a2a.message import Job, TaskMessage
from k8e.a2a.rpc import RpcCall, RpcRefusal, RpcService
from k8e.a2a.runner import TaskRunner, TaskTerms

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
CALL = {"jsonrpc": "2.0", "id": 7, "method": "tasks/get", "params": {"id": "none"}}


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncGenerator[TaskRunner]:
    async with AsyncSandboxClient(f"unix:{tmp_path}/nobody") as client:
        made = TaskRunner(client, TaskTerms(running=1))
        yield made
        await made.close()


def asked(*, template: str = "", context: str = "", blocking: bool = False) -> TaskMessage:
    return TaskMessage(Job("x", "bash", 1, (), template), context, "", blocking=blocking)


async def refused(runner: TaskRunner, body: Any, version: str = "") -> dict[str, Any]:
    """The error that a call is answered with."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RpcRefusal) as caught:
        await RpcService(runner).answer(RpcCall(content, version))
    return json.loads(caught.value.body)


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
async def test_bad_call_is_answered_with_its_number(
    runner: TaskRunner, body: Any, code: int
) -> None:
    found = (await refused(runner, body))["error"]
    assert found["code"] == code
    assert found["message"]


async def test_refusal_names_the_call(runner: TaskRunner) -> None:
    assert (await refused(runner, CALL))["id"] == 7


async def test_version_that_does_not_have_the_method_is_told(runner: TaskRunner) -> None:
    assert (await refused(runner, CALL, "1.0"))["error"]["code"] == message.VERSION
    assert (await refused(runner, CALL, "0.3"))["error"]["code"] == message.TASK_NOT_FOUND


async def test_task_that_is_cancelled_before_it_began_is_over(runner: TaskRunner) -> None:
    for _ in range(3):  # each one makes room for the next
        task = runner.submit(asked())
        assert (await runner.cancel(task.id)).status.state == "canceled"


async def test_task_has_only_so_many_streams_and_one_that_ends_makes_room(
    runner: TaskRunner,
) -> None:
    service = RpcService(runner)
    task = runner.submit(asked())  # it has not begun, and does not while we do not wait
    wanted = {"jsonrpc": "2.0", "id": 1, "method": "tasks/resubscribe"}
    body = json.dumps({**wanted, "params": {"id": task.id}}).encode()
    streams: list[AsyncGenerator[bytes]] = []
    for _ in range(rpc.MAX_STREAMS):
        found = await service.answer(RpcCall(body, ""))
        assert not isinstance(found, bytes)
        assert (await anext(found)).startswith(b"data: ")
        streams.append(found)
    with pytest.raises(RpcRefusal, match="8 streams"):
        await service.answer(RpcCall(body, ""))
    await streams.pop().aclose()
    assert not isinstance(await service.answer(RpcCall(body, "")), bytes)
    for found in streams:
        await found.aclose()


async def test_gateway_that_does_not_answer_fails_the_task(runner: TaskRunner) -> None:
    task = runner.submit(asked(blocking=True))
    async with asyncio.timeout(30):
        await task.ended()
    assert task.status.state == "failed"
    assert "the sandbox failed" in task.status.text


async def test_context_keeps_its_template(runner: TaskRunner) -> None:
    task = runner.submit(asked(template="one"))
    await runner.cancel(task.id)
    with pytest.raises(message.Fault, match="made from the template 'one'"):
        runner.submit(asked(template="two", context=task.context_id))
    for template in ("", "one"):
        again = runner.submit(asked(template=template, context=task.context_id))
        await runner.cancel(again.id)


async def test_closing_ends_what_runs(tmp_path: Path) -> None:
    async with AsyncSandboxClient(f"unix:{tmp_path}/nobody") as client:
        runner = TaskRunner(client, TaskTerms())
        task = runner.submit(asked())
        await runner.close()
        assert task.over
