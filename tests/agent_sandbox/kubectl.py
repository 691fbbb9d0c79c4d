"""``kubectl`` for the client's tunnel, where no kubelet runs: forwards to the router itself.

    kubectl.py ROUTER_PORT KUBECTL ARGUMENTS...

Everything but ``port-forward`` is the real kubectl's.
"""

from __future__ import annotations

import asyncio
import os
import sys


async def forward(listen: int, port: int, address: str = "127.0.0.1") -> None:
    """Carry connections at an address to a port of this machine, for ever."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, sending = await asyncio.open_connection("127.0.0.1", port)
        ways = (carry(reader, sending), carry(upstream, writer))
        await asyncio.gather(*ways, return_exceptions=True)

    async with await asyncio.start_server(serve, address, listen) as server:
        await server.serve_forever()


def main() -> None:
    port, kubectl, *arguments = sys.argv[1:]
    if arguments[:2] != ["port-forward", "svc/sandbox-router-svc"]:
        os.execv(kubectl, [kubectl, *arguments])
    asyncio.run(forward(int(arguments[2].partition(":")[0]), int(port)))


if __name__ == "__main__":
    main()
