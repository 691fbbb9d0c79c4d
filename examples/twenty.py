"""Runs a program in each of 20 sandboxes at once."""

import asyncio

import k8e


async def square(number: int, client: k8e.AsyncSandboxClient) -> int:
    """Square a number in a sandbox of its own."""
    async with k8e.AsyncSandbox(client=client, memory="128M") as sb:
        return int((await sb.exec(f"echo $(({number} * {number}))")).stdout)


async def main() -> None:
    """Square twenty numbers; if one fails, the others end with their sandboxes."""
    async with k8e.AsyncSandboxClient() as client, asyncio.TaskGroup() as group:
        runs = [group.create_task(square(number, client)) for number in range(20)]
    print([run.result() for run in runs])


asyncio.run(main())
