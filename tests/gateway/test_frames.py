"""Calls of a client that end as nobody expected."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest

from k8e import errors, settings
from k8e.auth.keys import Keys
from k8e.gateway.frames import ClientConnection
from k8e.gateway.identity import LOCAL
from k8e.gateway.operations import ANY, NoRow, operation
from k8e.gateway.service import Gateway
from k8e.guest import wire
from k8e.model import Principal, Role, Scope
from k8e.sessions.approvals import Approvals
from k8e.sessions.service import Sessions

PATH = "/srv/private/keys.db"
SURPRISES = (
    OSError(2, "No such file or directory", PATH),
    sqlite3.OperationalError(f"unable to open {PATH}"),
    ZeroDivisionError(PATH),
)


class BrokenSessions:
    """Sessions whose every use fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def open_now(self, *_: object) -> None:
        raise self._error


class Client:
    """One connection, and what was answered on it."""

    def __init__(self, folder: Path, error: Exception, principal: Principal = LOCAL) -> None:
        config = settings.load({"K8E_DATA_DIR": str(folder), "K8E_RUN_DIR": str(folder)})
        sessions = cast("Sessions", BrokenSessions(error))
        gateway = Gateway(config, sessions, cast("Approvals", None), cast("Keys", None))

        class Broken:
            @operation(roles=ANY, audit=NoRow.READS)
            async def breaks(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
                raise error

        gateway.operations.add(Broken())
        self.answers: asyncio.Queue[tuple[int, int, bytes]] = asyncio.Queue()
        self._client = ClientConnection(gateway, principal, self._take)

    def _take(self, kind: int, channel: int, body: bytes) -> None:
        self.answers.put_nowait((kind, channel, body))

    async def ask(self, **call: Any) -> tuple[int, int, dict[str, Any]]:
        self._client.receive(wire.CALL, 1, wire.pack(call))
        async with asyncio.timeout(10):
            kind, channel, body = await self.answers.get()
        return kind, channel, wire.unpack_dict(body)


@pytest.mark.parametrize("error", SURPRISES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "call",
    [{"op": "breaks"}, {"op": "ping", "session": {"id": "s-1"}}],
    ids=["of-the-gateway", "of-a-guest"],
)
async def test_a_surprise_is_for_the_log_and_the_caller_is_told_no_more(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    call: dict[str, Any],
) -> None:
    client = Client(tmp_path, error)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):  # the connection goes on
            kind, channel, told = await client.ask(**call)
            assert (kind, channel) == (wire.ERROR, 1)
            assert told == {"code": "internal", "message": errors.INTERNAL, "hint": ""}
    assert PATH in caplog.text


async def test_a_token_is_for_a_session_by_its_id_and_for_no_standing_one(tmp_path: Path) -> None:
    scope = Scope("s-1", frozenset({"exec"}))
    caller = Principal("me", frozenset({Role.AGENT}), scope=scope)
    client = Client(tmp_path, ZeroDivisionError(), caller)
    for target in ({"id": "s-1", "auto": "default"}, {"auto": "default"}, {"id": "s-2"}, "s-1"):
        _, _, told = await client.ask(op="exec", session=target)
        assert told["code"] == "token_refused", target
    _, _, told = await client.ask(op="exec", session={"id": "s-1"})
    assert told["code"] == "internal"  # it came as far as the sessions, which are broken
