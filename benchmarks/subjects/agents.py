"""What an agent waits for: the handshake of ``k8e sandbox-mcp``, and what a tool call adds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from mcp import Client, StdioServerParameters

from benchmarks import timing
from benchmarks.stage import Stage
from k8e import AsyncSandboxClient
from k8e.bench.measure import Goal, Series, TableRow

STARTS = 30
CALLS = 200
HANDSHAKE = Goal("ratio", 15)
ADDED = Goal("most", 5)
PEER = "python3 -c pass"
CODE = "true"
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "benchmark", "version": "1"},
    },
}


def measure(stage: Stage) -> Iterator[TableRow]:
    stage.gateway()
    command = [sys.executable, "-I", str(stage.launcher), "sandbox-mcp"]
    env = stage.environment()
    took = timing.interleave(
        stage.rounds(STARTS),
        {"hello": lambda: _handshake(command, env), PEER: timing.python_pass(env)},
        warm_up=2,
    )
    ours = Series("initialize answered", "ms", timing.milliseconds(took["hello"]))
    yield TableRow("mcp", "", ours, Series(PEER, "ms", timing.milliseconds(took[PEER])), HANDSHAKE)
    yield asyncio.run(_adding(stage, command))


def _handshake(command: list[str], env: dict[str, str]) -> float:
    """Seconds from the start of the server to its answer; its end is off the clock."""
    pipe = subprocess.PIPE
    began = time.perf_counter()
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(HELLO).encode() + b"\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        took = time.perf_counter() - began
        server.kill()
    if b"protocolVersion" not in answer:
        raise timing.ProgramFailed(answer.decode())
    return took


async def _adding(stage: Stage, command: list[str]) -> TableRow:
    """A tool call and the SDK's own call of the same code, in turns and in the same session."""
    server = StdioServerParameters(command=command[0], args=command[1:], env=stage.environment())
    plain: list[float] = []
    added: list[float] = []
    async with AsyncSandboxClient(stage.local_endpoint) as sdk, Client(server) as agent:
        first = await agent.call_tool("sandbox_run", {"code": CODE})
        told: dict[str, Any] = first.structured_content or {}
        session_id = str(told["session_id"])
        for turn in range(stage.rounds(CALLS) + 5):
            began = time.perf_counter()
            await sdk.run(CODE, session_id=session_id)
            middle = time.perf_counter()
            done = await agent.call_tool("sandbox_run", {"code": CODE})
            end = time.perf_counter()
            if done.is_error:
                raise timing.ProgramFailed(str(done.content))
            if turn >= 5:
                plain.append(middle - began)
                added.append(end - middle - (middle - began))
    ours = Series("sandbox_run adds", "ms", timing.milliseconds(added))
    return TableRow(
        "mcp", "", ours, Series("run of the SDK", "ms", timing.milliseconds(plain)), ADDED
    )
