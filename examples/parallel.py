"""Runs many programs at once in one session, from one thread."""

import asyncio

from k8e import AsyncSandboxClient


async def main() -> None:
    """Square ten numbers, each in a program of its own."""
    async with AsyncSandboxClient() as client:
        session_id = await client.create_session(limits={"cpus": 2, "memory": "512M"})
        try:
            programs = [f"print({number} ** 2)" for number in range(10)]
            async with asyncio.TaskGroup() as group:
                runs = [
                    group.create_task(client.run(program, "python", session_id=session_id))
                    for program in programs
                ]
            print([int(run.result().stdout) for run in runs])
        finally:
            await client.destroy_session(session_id)


asyncio.run(main())
