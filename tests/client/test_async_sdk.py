"""What is different when the SDK is awaited: cancelling, tasks, async sources."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator

import pytest

from k8e import AsyncSandboxClient, Exit, Stdout, errors
from tests.places import NewPlace, Place

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncIterator[None]:
    """One event loop for all tests: gRPC's events may arrive after a loop was closed."""
    yield  # noqa: PT022 - the loop lives as long as this fixture


@pytest.fixture
async def aclient(endpoint: str) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(endpoint) as client:
        yield client


async def until(status: str, client: AsyncSandboxClient, session_id: str, exec_id: str) -> None:
    """Wait until a command has a status; the guest reports that to nobody who does not ask."""
    async with asyncio.timeout(10):
        while True:
            for item in await client.execs(session_id):
                if (item.exec_id, item.status) == (exec_id, status):
                    return
            await asyncio.sleep(0.02)


async def test_commands_run_at_the_same_time(aclient: AsyncSandboxClient, session_id: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(aclient.exec(session_id, f"echo {n}")) for n in range(20)]
    assert [task.result().stdout for task in running] == [f"{n}\n" for n in range(20)]


async def test_run_shares_one_session_of_its_own(aclient: AsyncSandboxClient) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(aclient.run(f"print({n})", "python")) for n in range(4)]
    assert len({task.result().session_id for task in running}) == 1
    await aclient.destroy_session(running[0].result().session_id)
    assert (await aclient.run("echo again")).stdout == "again\n"


async def test_cancelling_kills_the_command(aclient: AsyncSandboxClient, session_id: str) -> None:
    name = f"cancel-{time.time_ns()}"
    task = asyncio.create_task(aclient.exec(session_id, "sleep 60", exec_id=name))
    await until("running", aclient, session_id, name)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until("killed", aclient, session_id, name)


async def test_a_time_limit_of_the_caller_kills_the_command(
    aclient: AsyncSandboxClient, session_id: str
) -> None:
    name = f"limit-{time.time_ns()}"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await aclient.exec(session_id, "sleep 60", exec_id=name)
    await until("killed", aclient, session_id, name)


async def test_events_and_text_are_iterated(aclient: AsyncSandboxClient, session_id: str) -> None:
    found = [event async for event in aclient.exec_events(session_id, "echo a; exit 3")]
    assert isinstance(found[0], Stdout)
    assert isinstance(found[-1], Exit)
    assert found[-1].exit_code == 3
    text = [piece async for piece in aclient.exec_stream(session_id, "printf 'h\\303\\251'")]
    assert "".join(text) == "hé"


async def test_files_come_from_any_source(aclient: AsyncSandboxClient, session_id: str) -> None:
    async def pieces() -> AsyncIterator[bytes | str]:
        for _ in range(3):
            yield "text "
            yield b"x" * 1_000_000

    assert await aclient.write_file(session_id, "pieces", pieces()) == 3_000_015
    assert len(await aclient.read_bytes(session_id, "pieces")) == 3_000_015
    file = io.BytesIO(b"y" * 2_000_000)
    assert (await aclient.upload(session_id, file, "pieces")).bytes == 2_000_000
    target = io.BytesIO()
    assert (await aclient.download(session_id, "pieces", target)).bytes == 2_000_000
    assert target.getvalue() == file.getvalue()
    found = await aclient.exec(session_id, "cat", stdin=pieces(), output_limit=10)
    assert (found.stdout, found.truncated) == ("text xxxxx", True)
    with pytest.raises(FileNotFoundError):
        await aclient.read_file(session_id, "nowhere")


async def test_a_lost_gateway_is_told(new_place: NewPlace) -> None:
    place = new_place()
    created = await asyncio.to_thread(place.json, "sandbox", "create", "--runtime", "container")
    session_id = created["session_id"]
    async with AsyncSandboxClient(place.endpoint) as client:
        events = client.exec_events(session_id, "echo begun; sleep 60", exec_id="long")
        assert isinstance(await anext(events), Stdout)
        await asyncio.to_thread(place.kill_gateway)
        with pytest.raises(errors.GatewayUnreachable, match="long ran in session"):
            async for _ in events:
                pass


async def test_a_client_works_in_one_event_loop_after_another(
    place: Place, session_id: str
) -> None:
    client = AsyncSandboxClient(place.endpoint)

    def elsewhere() -> str:
        return asyncio.run(client.exec(session_id, "echo hello")).stdout

    assert await asyncio.to_thread(elsewhere) == "hello\n"
    assert (await client.exec(session_id, "echo again")).stdout == "again\n"
    await client.close()
