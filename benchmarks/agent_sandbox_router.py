"""What ``k8e router`` adds to a request, and how many it passes on in a second.

    python -m benchmarks.agent_sandbox_router --rounds 5 --requests 2000

The router, a pod's server (as small as one can be) and this client are three processes on one
machine: they share its CPUs. Each round asks the server directly and then through the router, so
that both see the same load, which is printed with the numbers. The API server has no part in a
request and is left out: the router's cache is filled by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from tests.agent_sandbox import serving

_BODY = b'{"exists": true}'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(_BODY)
_WAYS = ("direct", "router")


class _PodServer(asyncio.Protocol):
    """Answers each request with the same bytes, and closes where it is asked to."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # pyright: ignore[reportAttributeAccessIssue]
        self._heard = b""

    def data_received(self, data: bytes) -> None:
        self._heard += data
        while b"\r\n\r\n" in self._heard:
            head, _, self._heard = self._heard.partition(b"\r\n\r\n")
            if b"connection: close" in head.lower():
                self._transport.write(_HEAD + b"Connection: close\r\n\r\n" + _BODY)
                self._transport.close()
                return
            self._transport.write(_HEAD + b"\r\n" + _BODY)


def _pod(told: Connection, address: str, _: object) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_PodServer, address, 8888, backlog=1024)
        told.send(8888)
        await server.serve_forever()

    asyncio.run(serve())


def _router(told: Connection, address: str, access: dict[str, Any]) -> None:
    async def serve() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with serving.routed(Path(folder), access) as router:
                router.add(serving.sandbox("box", address))
                told.send(router.port)
                await asyncio.Event().wait()

    asyncio.run(serve())


async def _load(host: str, port: int, *, requests: int, clients: int) -> tuple[float, list[float]]:
    """Requests a second, and how long each took, of some clients at once."""
    took: list[float] = []
    asked = serving.head("GET /exists/a HTTP/1.1", "X-Sandbox-Port: 8888", "Accept: */*")

    async def client(count: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for _ in range(count):
            began = time.perf_counter()
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(_BODY))
            took.append(time.perf_counter() - began)
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"no good answer: {head!r}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client(requests // clients) for _ in range(clients)))
    return len(took) / (time.perf_counter() - began), took


def _cpu_seconds(pid: int) -> float:
    """The CPU time of a process, which other programs' load changes little."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _measure(
    places: dict[str, tuple[str, int]], router: int, options: argparse.Namespace
) -> dict[str, object]:
    before = _cpu_seconds(router)
    count = options.rounds * (200 + options.requests // options.clients * options.clients)
    alone: dict[str, list[float]] = {way: [] for way in _WAYS}
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}
    for _ in range(options.rounds):
        for way in _WAYS:
            _, took = asyncio.run(_load(*places[way], requests=200, clients=1))
            alone[way] += took
        for way in _WAYS:
            work = _load(*places[way], requests=options.requests, clients=options.clients)
            rates[way].append(asyncio.run(work)[0])
    medians = {way: statistics.median(alone[way]) * 1000 for way in _WAYS}
    seconds = {way: statistics.median(rates[way]) for way in _WAYS}
    return {
        "one_client_p50_ms": {way: round(medians[way], 3) for way in _WAYS},
        "one_client_p99_ms": {
            way: round(statistics.quantiles(alone[way], n=100)[98] * 1000, 3) for way in _WAYS
        },
        "adds_ms": round(medians["router"] - medians["direct"], 3),
        f"{options.clients}_clients_per_second": {way: round(seconds[way]) for way in _WAYS},
        "router_cpu_ms_per_request": round((_cpu_seconds(router) - before) / count * 1000, 3),
        "ratio": round(seconds["direct"] / seconds["router"], 1),
        "load": round(os.getloadavg()[0], 2),
        "cpus": os.cpu_count(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_sandbox_router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000, help="of each way and round")
    parser.add_argument("--clients", type=int, default=16, help="at once")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    address = "127.69.0.1"
    places: dict[str, tuple[str, int]] = {}
    processes: list[SpawnProcess] = []
    try:
        for way, serve, host in (("direct", _pod, address), ("router", _router, "127.0.0.1")):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, address, serving.ACCESS), daemon=True
            )
            process.start()
            processes.append(process)
            if not ours.poll(60):
                raise SystemExit(f"{way} does not start")
            places[way] = host, ours.recv()
        router = processes[-1].pid or 0
        print(json.dumps(_measure(places, router, options), indent=2))
    finally:
        for process in processes:
            process.terminate()
            process.join(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
