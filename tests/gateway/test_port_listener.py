"""Who of the strangers at exposed ports has to leave when there are too many."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from k8e.admission import Admission
from k8e.gateway.ports import exposures
from k8e.gateway.ports.listener import PortListener
from k8e.sessions.exposures import Exposure

PATIENCE = 60.0
ROOM = 20


def exposure(place: exposures.ListenSocket, port: int) -> Exposure:
    return Exposure(
        session_id="sess-a",
        sandbox_id="sb-a",
        owner="me",
        port=port,
        host="127.0.0.1",
        address=place.address,
        listen_port=place.port,
        token="token",
        started_at=0,
        cookie_key="key",
    )


async def opened(port: int, places: Admission) -> PortListener:
    place = exposures.find_place()
    door = PortListener(cast("Any", None), exposure(place, port), places)
    await door.open(place.socket)
    return door


async def test_a_flood_at_one_port_drives_out_nobody_at_another() -> None:
    places = Admission(ROOM, ROOM)
    flooded, quiet = [await opened(port, places) for port in (1, 2)]
    try:
        where = (quiet.exposure.address, quiet.exposure.listen_port)
        reader, writer = await asyncio.open_connection(*where)
        target = (flooded.exposure.address, flooded.exposure.listen_port)
        flood = [await asyncio.open_connection(*target) for _ in range(3 * ROOM)]
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            assert (await reader.readline()).startswith(b"HTTP/1.1 4"), "it was heard"
            left = [await gone(item[0]) for item in flood]
        assert sum(left) >= 2 * ROOM
        assert len(places) <= ROOM
        for _, item in [(reader, writer), *flood]:
            item.close()
    finally:
        for door in (flooded, quiet):
            door.close()
            await door.closed()
    assert not len(places)


async def gone(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.05):
            await reader.read(1)
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True
