"""The cache of what the API server has, against a server that says what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from k8e.controller import cache as caches
from k8e.controller.cache import Cache
from k8e.controller.resources import SANDBOX
from k8e.distro import certificates
from k8e.distro.certificates import Subject
from k8e.kubernetes.api import Api

pytestmark = pytest.mark.anyio
Object = dict[str, Any]
PATIENCE = 20.0
KEY = "default", "one"


def item(version: int, name: str = "one", uid: str = "") -> Object:
    metadata = {"namespace": "default", "name": name, "uid": uid or f"uid-{name}"}
    return {"metadata": {**metadata, "resourceVersion": str(version)}}


class Server:
    """An API server of one kind: lists and watches are answered as a test puts them."""

    def __init__(self) -> None:
        self.lists: asyncio.Queue[Object] = asyncio.Queue()
        self.events: asyncio.Queue[Object | None] = asyncio.Queue()
        self.watched: asyncio.Queue[str] = asyncio.Queue()

    def put_list(self, version: int, *items: Object, more: str = "") -> None:
        metadata = {"resourceVersion": str(version), **({"continue": more} if more else {})}
        self.lists.put_nowait({"metadata": metadata, "items": list(items)})

    def say(self, kind: str, found: Object) -> None:
        self.events.put_nowait({"type": kind, "object": found})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ")[1].decode()
                if "watch=true" in path:
                    await self._watch(path, writer)
                    break
                body = json.dumps(await self.lists.get()).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()

    async def _watch(self, path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        await writer.drain()
        version = path.partition("resourceVersion=")[2].partition("&")[0]
        self.watched.put_nowait(version)
        while (event := await self.events.get()) is not None:
            writer.write(json.dumps(event).encode() + b"\n")
            await writer.drain()


class Follower:
    """A cache that follows a server, and the changes that it tells."""

    def __init__(self, server: Server, cache: Cache) -> None:
        self.server, self.cache = server, cache
        self._changes: asyncio.Queue[str] = asyncio.Queue()
        cache.tell(lambda before, after: self._changes.put_nowait(_words(before, after)))

    async def told(self) -> str:
        return await asyncio.wait_for(self._changes.get(), PATIENCE)

    async def watched(self) -> str:
        return await asyncio.wait_for(self.server.watched.get(), PATIENCE)


def _words(before: Object | None, after: Object | None) -> str:
    verb = "changed" if before and after else "added" if after else "gone"
    return f"{verb} {(after or before or {})['metadata']['name']}"


@pytest.fixture
async def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Follower]:
    monkeypatch.setattr(caches, "_FIRST_PAUSE", 0.01)
    signer = certificates.authority(tmp_path, "ca")
    certificates.leaf(signer, Subject("web", hosts=("127.0.0.1",)), tmp_path / "web", days=1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "web.crt", tmp_path / "web.key")
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    known = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    api = Api(f"https://127.0.0.1:{port}", known)
    cache = Cache(api, SANDBOX, quiet_seconds=1.0)
    task = asyncio.create_task(cache.run())
    yield Follower(server, cache)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    api.close()
    server.events.put_nowait(None)
    listener.close()


async def test_an_answer_that_comes_after_an_objects_end_does_not_bring_it_back(
    follower: Follower,
) -> None:
    server, cache = follower.server, follower.cache
    server.put_list(10)
    server.say("ADDED", item(11))
    server.say("DELETED", item(13))
    assert [await follower.told(), await follower.told()] == ["added one", "gone one"]
    # The answer to a patch of ours, which another connection has delivered later.
    cache.absorb(item(12))
    assert cache.get(KEY) is None
    # A selector of labels takes an object away that can come back: a later version is believed.
    server.say("ADDED", item(14))
    assert await follower.told() == "added one"
    assert cache.get(KEY) is not None


async def test_what_was_deleted_by_us_stays_so_while_older_news_arrives(
    follower: Follower,
) -> None:
    server, cache = follower.server, follower.cache
    server.put_list(10, item(5))
    assert await follower.told() == "added one"
    cache.forget(KEY, "uid-one")
    assert await follower.told() == "gone one"
    server.say("MODIFIED", item(11))
    server.say("DELETED", item(12))
    server.say("ADDED", item(13, "other"))
    assert await follower.told() == "added other"
    assert cache.get(KEY) is None


async def test_a_server_that_has_forgotten_where_we_were_is_listed_again(
    follower: Follower,
) -> None:
    server, cache = follower.server, follower.cache
    server.put_list(10, item(5, "went"), item(6, "stays"))
    assert [await follower.told(), await follower.told()] == ["added went", "added stays"]
    assert await follower.watched() == "10"
    cache.absorb(item(30, "ours"))
    assert await follower.told() == "added ours"
    server.put_list(20, item(6, "stays"), more="rest")
    server.put_list(20, item(12, "new"))
    server.say("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
    assert [await follower.told(), await follower.told()] == ["added new", "gone went"]
    assert await follower.watched() == "20"
    # Made after the moment that the list shows.
    assert sorted(one["metadata"]["name"] for one in cache) == ["new", "ours", "stays"]
    assert cache.lists == 2


async def test_a_watch_that_says_nothing_for_long_is_begun_again_where_it_was(
    follower: Follower,
) -> None:
    server, cache = follower.server, follower.cache
    server.put_list(10)
    assert await follower.watched() == "10"
    server.say("BOOKMARK", {"kind": "Sandbox", "metadata": {"resourceVersion": "15"}})
    assert await follower.watched() == "15"
    assert cache.lists == 1


async def test_a_server_whose_store_was_set_back_is_believed(follower: Follower) -> None:
    server, cache = follower.server, follower.cache
    server.put_list(100, item(50, "later"))
    assert await follower.told() == "added later"
    server.put_list(40, item(30, "earlier"))
    server.say("BOOKMARK", {"kind": "Sandbox", "metadata": {"resourceVersion": "40"}})
    assert [await follower.told(), await follower.told()] == ["gone later", "added earlier"]
    assert [one["metadata"]["name"] for one in cache] == ["earlier"]


async def test_an_object_that_was_made_again_under_its_name_is_another_one(
    follower: Follower,
) -> None:
    server, cache = follower.server, follower.cache
    server.put_list(10, item(5))
    assert await follower.told() == "added one"
    cache.absorb(item(12, uid="second"))
    assert await follower.told() == "changed one"
    server.say("DELETED", item(11))
    server.say("ADDED", item(12, uid="second"))
    server.say("ADDED", item(13, "last"))
    assert await follower.told() == "added last"
    found = cache.get(KEY)
    assert found is not None
    assert found["metadata"]["uid"] == "second"
