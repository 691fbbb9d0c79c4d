"""Callers that nobody knows: what they may cost, how long, and by which way they do not come."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e.auth.keys import Keys
from k8e.auth.store import SqliteKeyStore
from k8e.gateway import identity, tls
from k8e.gateway.identity import UnknownPeer
from k8e.gateway.rpc import front, server
from k8e.gateway.rpc.front import TlsPeer
from k8e.model import Principal
from tests.gateway.devices import REFUSED, WRONG, Metadata, Stub, bearer
from tests.gateway.fronts import Client, serving
from tests.gateway.serving import Running, failing

MIB = 1 << 20
Status = grpc.StatusCode


# Connections.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "STRANGER_SECONDS", 0.2)


def only_peer(found: front.TlsFront) -> str:
    (name,) = found._callers  # pyright: ignore[reportPrivateUsage]
    return f"unix-abstract:{name}"


async def test_a_connection_on_which_nobody_known_calls_is_ended(
    tmp_path: Path, impatient: None
) -> None:
    async with serving(tmp_path) as found:
        client = await Client.dial(found.endpoint, (tmp_path / tls.CA_CERT).read_bytes())
        assert await client.says(b"I only talk") == b"I only talk"
        await client.ends()
        await client.close()


async def test_a_connection_of_somebody_known_stays_until_they_are_known_no_more(
    tmp_path: Path, impatient: None
) -> None:
    async with serving(tmp_path) as found:
        client = await Client.dial(found.endpoint, (tmp_path / tls.CA_CERT).read_bytes())
        assert await client.says(b"hello") == b"hello"
        peer = only_peer(found.front)
        with found.front.recognised(peer, "key:mine"):
            found.front.doubt(peer)  # somebody else tried, by the same proxy
            await asyncio.sleep(0.5)  # longer than a stranger would have
            assert await client.says(b"in a call") == b"in a call"
        with found.front.recognised(peer, "key:mine"):
            pass
        await asyncio.sleep(0.5)
        found.front.doubt_all("key:other")
        assert await client.says(b"still") == b"still"
        found.front.doubt_all("key:mine")
        await client.ends()
        await client.close()


# Web pages.


@pytest.mark.parametrize(
    "headers", [(("origin", "https://evil.example"),), (("sec-fetch-site", "cross-site"),)]
)
def test_a_web_page_is_no_local_user(
    running: Running, stub: Stub, agent: Metadata, headers: Metadata
) -> None:
    asked = pb.ListSessionsRequest()
    stub.ListSessions(asked, timeout=30)
    for metadata in (headers, agent + headers):
        call = functools.partial(stub.ListSessions, asked, metadata=metadata, timeout=30)
        assert failing(call).status in REFUSED


@pytest.mark.parametrize(
    ("name", "ours"), [("localhost", True), ("evil.example", False), ("sub.localhost", False)]
)
async def test_a_foreign_name_that_leads_here_makes_nobody_the_local_user(
    tmp_path: Path, name: str, ours: bool
) -> None:
    async with serving(tmp_path / "tls") as found:
        ca = (tmp_path / "tls" / tls.CA_CERT).read_bytes()
        client = await Client.dial(found.endpoint, ca, name=name)
        assert await client.says(b"hello") == b"hello"
        caller = found.front.caller(only_peer(found.front))
        assert caller is not None
        assert caller.by_our_name is ours
        known = Keys(SqliteKeyStore(tmp_path / "keys.db"))
        if ours:
            async with identity.identified(known, caller, ()) as principal:
                assert principal == identity.LOCAL
        else:
            with pytest.raises(UnknownPeer, match="not one of this gateway"):
                async with identity.identified(known, caller, ()):
                    pass
            made = await known.create("laptop")  # who has a key may call us whatever they like
            async with identity.identified(known, caller, bearer(made.secret)) as principal:
                assert principal.shown == "key:laptop"
        await client.close()


def test_a_wildcard_in_the_certificate_covers_one_label(tmp_path: Path) -> None:
    found = tls.Certificates(tmp_path, ["*.gw.example"])
    assert found.is_for("a.GW.example.")
    assert not found.is_for("gw.example")
    assert not found.is_for("a.b.gw.example")


# Failed attempts.


async def test_strangers_without_credentials_are_counted_too(tmp_path: Path) -> None:
    known = Keys(SqliteKeyStore(tmp_path / "keys.db"))
    far = TlsPeer(identity.endpoint("192.0.2.1", 1), identity.endpoint("192.0.2.2", 50051), None)
    told: list[str] = []
    for _ in range(25):
        with pytest.raises(Exception) as failed:  # noqa: PT011 - which one is what is asked
            async with identity.identified(known, far, ()):
                pass
        told.append(type(failed.value).__name__)
    assert told[0] == "UnknownPeer"
    assert told[-1] == "LimitExceeded"


# Messages.


def peak(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) << 10


def test_large_messages_of_strangers_are_not_read(running: Running) -> None:
    """Eight of 60 MiB each would be half a GiB, before anybody asked who sends them."""
    large = pb.WriteFileRequest(session_id="x", path="x", content_bytes=bytes(60 * MIB))
    Path(f"/proc/{running.pid}/clear_refs").write_text("5")
    before = peak(running.pid)
    told: list[grpc.StatusCode] = []

    def send() -> None:
        from k8e._generated import sandbox_pb2_grpc as pb_grpc

        with running.channel(("grpc.use_local_subchannel_pool", 1)) as channel:
            stub = pb_grpc.SandboxServiceStub(channel)
            told.append(
                failing(lambda: stub.WriteFile(large, metadata=bearer(WRONG), timeout=40)).status
            )

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(told) == 8
    assert set(told) <= set(REFUSED)
    assert peak(running.pid) - before < 60 * MIB


def test_a_large_message_of_somebody_known_arrives(
    stub: Stub, agent: Metadata, session_of: dict[str, str]
) -> None:
    content = bytes(range(256)) * (20 * MIB // 256)
    named: dict[str, Any] = {"session_id": session_of["agent"], "path": "large"}
    call: dict[str, Any] = {"metadata": agent, "timeout": 50}
    assert stub.WriteFile(pb.WriteFileRequest(content_bytes=content, **named), **call).ok
    assert stub.ReadFile(pb.ReadFileRequest(**named), **call).content_bytes == content


@pytest.mark.parametrize("rpc", ["Exec", "ExecStream", "Run"])
@pytest.mark.parametrize("messages", [[], [b"\xff\xff\xff"]], ids=["nothing", "nonsense"])
def test_what_is_no_request_is_refused_and_said_so(
    channel: grpc.Channel, agent: Metadata, rpc: str, messages: list[bytes]
) -> None:
    if rpc == "Run" and not messages:
        return  # a stream that ends before its first frame is one
    dialling: Any = channel
    call = dialling.stream_stream(f"/sandbox.v1.SandboxService/{rpc}")
    failed = failing(lambda: list(call(iter(messages), metadata=agent, timeout=20)))
    assert failed.status is Status.INVALID_ARGUMENT, failed


class Message:
    """A request of some size, which it tells as those of protobuf do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def ByteSize(self) -> int:  # noqa: N802 - its name there
        return self.size


async def messages_of(items: Iterable[Message]) -> AsyncGenerator[Message]:
    for item in items:
        yield item


async def test_one_caller_has_few_places_for_large_requests_and_others_have_theirs() -> None:
    receiver = server.Receiver()
    mine, other = Principal("key:mine"), Principal("key:other")

    def asking(principal: Principal, size: int) -> Any:
        return receiver.request(principal, messages_of([Message(size)]))

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(server.PLACES):
            await stack.enter_async_context(asking(mine, server.LARGE))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), asking(mine, 1):
                pass
        async with asyncio.timeout(10), asking(other, server.LARGE):
            pass
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(10):
        for _ in range(3 * server.PLACES):
            await stack.enter_async_context(asking(mine, 1))


async def test_a_request_that_never_comes_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "SECONDS", 0.01)

    async def never() -> AsyncGenerator[None]:
        await asyncio.Event().wait()
        yield

    with pytest.raises(server.errors.TimedOut):
        async with asyncio.timeout(10), server.Receiver().request(Principal("key:x"), never()):
            pass
