"""The official SDK's client runs code tasks, in both versions of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest
from a2a.client.errors import A2AClientError
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import (
    InvalidParamsError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from google.protobuf.struct_pb2 import Value

from k8e.a2a.tasks import COMPLETED, Task
from tests.a2a.servers import (
    OVER,
    VERSIONS,
    A2aGateway,
    code,
    finished,
    message,
    result,
    running,
    text,
)
from tests.places import eventually

pytestmark = pytest.mark.anyio
versions = pytest.mark.parametrize("version", VERSIONS)

WAITS = """import os, time
print({0!r}, flush=True)
while not os.path.exists("/workspace/go"):
    time.sleep(0.05)
print({1!r})
"""


@pytest.fixture(scope="module")
def server() -> Generator[A2aGateway]:
    with running() as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncIterator[None]:
    yield  # noqa: PT022 - the loop lives as long as this fixture


@versions
@pytest.mark.parametrize("streaming", [True, False])
async def test_code_runs_and_its_output_comes_back(
    server: A2aGateway, version: str, streaming: bool
) -> None:
    async with server.client(version, streaming=streaming) as client:
        task = await finished(
            client, message(code("import sys\nprint('grüße')\nprint('bad', file=sys.stderr)"))
        )
    assert task.status.state == pb.TASK_STATE_COMPLETED
    assert text(task) == "grüße\n"
    assert text(task, "stderr") == "bad\n"
    assert result(task)["exit_code"] == 0


@versions
async def test_output_is_streamed_while_the_code_runs(server: A2aGateway, version: str) -> None:
    """The code waits for us to answer its first line, so the line came before the end."""
    waits = WAITS.format("first", "second")
    async with server.client(version) as client, asyncio.timeout(30):
        seen: list[str] = []
        task_id = ""
        async for event in client.send_message(message(code(waits))):
            task_id = task_id or event.task.id
            update = event.artifact_update
            if update.artifact.artifact_id != "stdout":
                continue
            seen.append(update.artifact.parts[0].text)
            assert update.append == (len(seen) > 1)
            if seen == ["first\n"]:
                go = message(code("touch go", "bash"), context=update.context_id)
                await finished(client, go)
        assert "".join(seen) == "first\nsecond\n"
        assert text(await client.get_task(pb.GetTaskRequest(id=task_id))) == "first\nsecond\n"


@versions
async def test_messages_of_a_context_share_files_and_others_do_not(
    server: A2aGateway, version: str
) -> None:
    file = pb.Part(raw=b"\0binary\xff", filename="../../data.bin")
    shows = code("print(open('/workspace/data.bin', 'rb').read().hex(), end='')")
    async with server.client(version) as client:
        first = await finished(client, message(file, shows))
        assert text(first) == b"\0binary\xff".hex()
        again = await finished(client, message(shows, context=first.context_id))
        assert text(again) == text(first)
        assert again.context_id == first.context_id
        elsewhere = await finished(client, message(shows))
        assert elsewhere.status.state == pb.TASK_STATE_FAILED
        assert "FileNotFoundError" in text(elsewhere, "stderr")


@versions
async def test_code_as_data_has_its_own_language_and_timeout(
    server: A2aGateway, version: str
) -> None:
    asked = Value()
    asked.struct_value.update({"code": "sleep 60", "language": "bash", "timeout": 0.5})
    async with server.client(version) as client:
        task = await finished(client, message(pb.Part(data=asked)))
    assert task.status.state == pb.TASK_STATE_FAILED
    assert result(task)["status"] == "timed_out"
    assert "timed out" in task.status.message.parts[0].text


async def test_template_of_a_message_is_what_its_sandbox_is_made_from(server: A2aGateway) -> None:
    place = server.gateway.place
    (place.data / "templates").mkdir(exist_ok=True)
    (place.data / "templates" / "marked.toml").write_text('[env]\nMARK = "yes"\n')
    shows = code("echo mark=$MARK", "bash")
    async with server.client("1.0") as client:
        first = await finished(client, message(shows, template="marked"))
        assert text(first) == "mark=yes\n"
        again = await finished(client, message(shows, context=first.context_id))
        assert text(again) == "mark=yes\n"
        with pytest.raises(InvalidParamsError, match="begin another context"):
            await finished(client, message(shows, context=first.context_id, template="other"))
        missing = await finished(client, message(shows, template="missing"))
        assert missing.status.state == pb.TASK_STATE_FAILED
        assert "missing" in missing.status.message.parts[0].text


@versions
async def test_code_that_fails_is_a_failed_task_with_its_exit_code(
    server: A2aGateway, version: str
) -> None:
    async with server.client(version) as client:
        task = await finished(client, message(code("echo no >&2; exit 7", "bash")))
    assert task.status.state == pb.TASK_STATE_FAILED
    assert result(task)["exit_code"] == 7
    assert "exit code 7" in task.status.message.parts[0].text


@versions
async def test_cancelling_kills_the_command(server: A2aGateway, version: str) -> None:
    async with server.client(version) as client, asyncio.timeout(30):
        mark = f"k8e-a2a-{version}"
        events = client.send_message(message(code(f"exec -a {mark} sleep 600", "bash")))
        first = await anext(events)
        task_id = first.task.id
        async for event in events:
            if event.status_update.status.state == pb.TASK_STATE_WORKING:
                break
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        eventually(lambda: _runs(mark))
        done = await client.cancel_task(pb.CancelTaskRequest(id=task_id))
        assert done.status.state == pb.TASK_STATE_CANCELED
        assert not _runs(mark)
        with pytest.raises(TaskNotCancelableError):
            await client.cancel_task(pb.CancelTaskRequest(id=task_id))


def _runs(mark: str) -> bool:
    """Whether a process of this name runs on this machine; sandboxes hide nothing from root."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if file.read_bytes().startswith(mark.encode() + b"\0"):
                return True
    return False


@versions
async def test_tasks_of_another_caller_do_not_exist(server: A2aGateway, version: str) -> None:
    async with server.client(version) as client, server.client(version, "other") as other:
        task = await finished(client, message(code("print('mine')")))
        with pytest.raises(TaskNotFoundError):
            await other.get_task(pb.GetTaskRequest(id=task.id))
        with pytest.raises(TaskNotFoundError):
            await other.cancel_task(pb.CancelTaskRequest(id=task.id))
        with pytest.raises(TaskNotFoundError):
            await finished(other, message(code("print(1)"), task=task.id))
        # The same context id is another context, in another sandbox.
        await finished(client, message(code("touch secret", "bash"), context=task.context_id))
        found = await finished(other, message(code("ls -a", "bash"), context=task.context_id))
        assert "secret" not in text(found)


async def test_who_gets_the_name_of_a_deleted_key_finds_nothing(server: A2aGateway) -> None:
    others = server.sessions()
    async with server.client("1.0", "lent") as before, asyncio.timeout(60):
        events = before.send_message(message(code(WAITS.format("secret", "ended"))))
        task = (await anext(events)).task
        async for event in events:
            if event.artifact_update.artifact.artifact_id == "stdout":
                break
        await asyncio.to_thread(server.delete, "lent")
        with contextlib.suppress(A2AClientError):  # the stream breaks, or ends with the task
            async for event in events:  # though nobody let the program go on
                assert "ended" not in str(event)
        await asyncio.to_thread(eventually, lambda: server.sessions() <= others)
    async with server.client("1.0", "lent") as after:
        with pytest.raises(TaskNotFoundError):
            await after.get_task(pb.GetTaskRequest(id=task.id))
        assert (await finished(after, message(code("print(1)")))).status.state in OVER
    await asyncio.to_thread(server.delete, "lent")


async def test_output_of_what_is_over_is_kept_in_one_piece() -> None:
    task = Task("context")
    following = task.follow(task.mark(), 5)
    for number in range(3):
        task.printed("stdout", b"%d" % number)
        assert await anext(following)
    assert len(task.log) == 3
    task.change(COMPLETED)
    assert len(task.log) == 4  # somebody has a place in it
    await following.aclose()
    assert [type(item).__name__ for item in task.log] == ["TaskOutput", "TaskStatus"]
    assert task.text("stdout") == "012"


@versions
async def test_words_without_code_are_rejected_with_help(server: A2aGateway, version: str) -> None:
    async with server.client(version) as client:
        task = await finished(client, message(pb.Part(text="What is 6 times 7?")))
        assert task.status.state == pb.TASK_STATE_REJECTED
        assert "fenced block" in task.status.message.parts[0].text


@versions
async def test_stream_can_be_joined_again(server: A2aGateway, version: str) -> None:
    waits = WAITS.format("begun", "ended")
    async with server.client(version) as client, asyncio.timeout(30):
        events = client.send_message(message(code(waits)))
        first = (await anext(events)).task
        async for event in events:
            if event.artifact_update.artifact.artifact_id == "stdout":
                break
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        seen: list[str] = []
        last = pb.TASK_STATE_UNSPECIFIED
        async for event in client.subscribe(pb.SubscribeToTaskRequest(id=first.id)):
            if event.task.id:
                seen.append(text(event.task))
                await finished(client, message(code("touch go", "bash"), context=first.context_id))
            elif event.artifact_update.artifact.artifact_id == "stdout":
                seen.append(event.artifact_update.artifact.parts[0].text)
            elif event.status_update.task_id:
                last = event.status_update.status.state
        assert "".join(seen) == "begun\nended\n"
        assert last in OVER
        with pytest.raises(UnsupportedOperationError):
            async for _ in client.subscribe(pb.SubscribeToTaskRequest(id=first.id)):
                pass


@versions
async def test_message_for_a_task_that_is_over_is_refused(server: A2aGateway, version: str) -> None:
    async with server.client(version) as client:
        task = await finished(client, message(code("print(1)")))
        with pytest.raises(UnsupportedOperationError):
            await finished(client, message(code("print(2)"), task=task.id))


async def test_so_many_tasks_at_once_and_no_more(server: A2aGateway) -> None:
    asked = {
        "message": {
            "messageId": "m",
            "role": "user",
            "parts": [{"kind": "data", "data": {"code": "sleep 20"}}],
        },
        "configuration": {"blocking": False},
    }
    ids: list[str] = []
    for _ in range(4):
        task = server.call("message/send", asked, "other")["result"]
        assert task["status"]["state"] in ("submitted", "working")
        ids.append(task["id"])
    refused = server.call("message/send", asked, "other")
    assert "4 tasks run already" in refused["error"]["message"]
    assert "error" not in server.call(
        "message/send",
        {
            "message": {
                "messageId": "m",
                "role": "user",
                "parts": [{"kind": "data", "data": {"code": "true"}}],
            }
        },
    )  # somebody else's are not counted
    for task_id in ids:
        done = server.call("tasks/cancel", {"id": task_id}, "other")["result"]
        assert done["status"]["state"] == "canceled"


async def test_output_without_end_is_cut(server: A2aGateway) -> None:
    async with server.client("1.0") as client:
        task = await finished(
            client, message(code("head -c 3000000 /dev/zero | tr '\\0' x", "bash"))
        )
    assert task.status.state == pb.TASK_STATE_COMPLETED
    assert result(task)["truncated"] is True
    assert 200_000 < len(text(task)) < 300_000
