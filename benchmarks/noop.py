"""A gRPC server that does nothing, over TLS: the least that a call from elsewhere can cost."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

METHOD = "/benchmarks.Noop/Call"
START_SECONDS = 30.0


class _Handler(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        library: Any = grpc
        return library.unary_unary_rpc_method_handler(_answer)


async def _answer(request: bytes, context: object) -> bytes:
    return request


async def _serve(folder: Path) -> None:
    pair = ((folder / "server.key").read_bytes(), (folder / "server.crt").read_bytes())
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(),))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    os.write(1, f"{port}\n".encode())
    await server.wait_for_termination()


@contextmanager
def calling(folder: Path) -> Generator[Callable[[], bytes]]:
    """A call of nothing, to a server in a process of its own with the certificate in ``folder``."""
    argv = [sys.executable, "-m", "benchmarks.noop", str(folder)]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        ready, _, _ = select.select([server.stdout], [], [], START_SECONDS)
        port = int(server.stdout.readline()) if ready else 0
        credentials = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            opened: Any = channel
            call = opened.unary_unary(METHOD)
            yield lambda: call(b"")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(START_SECONDS)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
