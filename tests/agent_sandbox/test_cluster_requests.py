"""Requests through the router of a cluster: who may, to whom they lead, and hostile ones."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8e.agent_sandbox import principals, wake
from k8e.agent_sandbox.cluster_router import MAX_REQUESTS
from tests.agent_sandbox.serving import (
    ACCESS,
    KEY,
    Routed,
    address,
    head,
    pod,
    routed,
    sandbox,
    status,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
CLOSE = "Connection: close"


async def test_a_request_reaches_the_pod_without_what_is_the_routers_own(tmp_path: Path) -> None:
    answer = (
        b"HTTP/1.1 201 Created\r\nX-Own: kept\r\nSet-Cookie: a=b\r\nAlt-Svc: c\r\n"
        b"Content-Length: 4\r\n\r\nbody"
    )
    async with pod(answer) as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        fields = ("X-Forwarded-For: 1.2.3.4", "X-Sandbox-Pod-IP: 127.0.0.1", "X-Own: mine")
        more = ("Connection: close, X-Hop", "X-Hop: gone", "Content-Length: 3")
        said = await router.say(head("POST /a%2Fb?c=%20d HTTP/1.1", *fields, *more) + b"abc")
        assert status(said) == 201
        shown, _, body = said.partition(b"\r\n\r\n")
        assert body == b"body"
        assert b"x-own: kept" in shown.lower()
        assert b"set-cookie" not in shown.lower()
        assert b"alt-svc" not in shown.lower()
        (heard,) = found.heard
        first, *lines = bytes(heard).lower().split(b"\r\n")
        assert first == b"post /a%2fb?c=%20d http/1.1"
        names = {line.partition(b":")[0] for line in lines}
        assert b"x-own" in names
        assert not names & {b"authorization", b"x-forwarded-for", b"x-hop"}
        assert not {name for name in names if name.startswith(b"x-sandbox")}
        assert b"host: localhost" in lines


READY = {"type": "Ready", "status": "False", "reason": ""}
STATES: dict[str, tuple[dict[str, Any], int]] = {
    "running": ({}, 200),
    "suspended": ({"spec": {"operatingMode": "Suspended"}}, 409),
    "suspended by v1alpha1's word": ({"spec": {"replicas": 0}}, 409),
    "being deleted": ({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}}, 404),
    "expired": ({"ready": READY | {"reason": "SandboxExpired"}}, 409),
    "failed": ({"ready": {"type": "Finished", "status": "True", "reason": "PodFailed"}}, 409),
    "just resumed": ({"ready": READY | {"reason": "SandboxSuspended"}}, 503),
    "asleep, where nothing is asked of wake": (
        {
            "spec": {"operatingMode": "Suspended"},
            "metadata": {"annotations": {"sandbox.k8e.io/suspended-by": "idle"}},
        },
        409,
    ),
    "suspended by a person": (
        {
            "spec": {"operatingMode": "Suspended"},
            "metadata": {"annotations": {"sandbox.k8e.io/idle-seconds": "60"}},
        },
        409,
    ),
}


@pytest.mark.parametrize("state", STATES)
async def test_a_sandboxs_state_decides_the_status(tmp_path: Path, state: str) -> None:
    more, wanted = STATES[state]
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address, **more))
        assert status(await router.say(head("GET / HTTP/1.1", CLOSE))) == wanted
        assert len(found.heard) == (wanted == 200)


async def test_a_sandbox_without_a_pod_is_not_running_yet(tmp_path: Path) -> None:
    async with routed(tmp_path) as router:
        router.add(sandbox("box"))
        said = await router.say(head("GET / HTTP/1.1", CLOSE))
        assert status(said) == 503
        assert b"retry-after: 1" in said


async def test_what_is_not_the_callers_is_not_there(tmp_path: Path) -> None:
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        router.add(sandbox("theirs", found.address, metadata={"namespace": "other"}))
        others = "X-Sandbox-Namespace: other"
        asked = head("GET / HTTP/1.1", CLOSE, sandbox="theirs")
        foreign = asked.replace(b"X-Sandbox-Namespace: space", others.encode())
        missing = foreign.replace(b"theirs", b"nobody")
        first, second = await router.say(foreign), await router.say(missing)
        assert status(first) == status(second) == 404
        assert first.replace(b"theirs", b"nobody") == second, "it does not tell what there is"
        assert status(await router.say(asked)) == 404
        uid = head("GET / HTTP/1.1", CLOSE, "X-Sandbox-UID: another")
        assert status(await router.say(uid)) == 404
        assert not found.heard


@pytest.mark.parametrize("where", ["169.254.169.254", "127.0.0.1", "10.0.0.1", "nonsense", "::1"])
async def test_an_address_that_is_none_of_the_pods_network_is_never_dialled(
    tmp_path: Path, where: str
) -> None:
    async with routed(tmp_path) as router:
        router.add(sandbox("box", where))
        asked = head("GET / HTTP/1.1", CLOSE, f"X-Sandbox-Port: {router.port}")
        assert status(await router.say(asked)) == 502


async def test_a_closed_port_is_a_502(tmp_path: Path) -> None:
    async with routed(tmp_path) as router:
        router.add(sandbox("box", address()))
        assert status(await router.say(head("GET / HTTP/1.1", CLOSE))) == 502


async def test_what_was_heard_too_long_ago_leads_nowhere(tmp_path: Path) -> None:
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        api: Any = router.cluster.pods._api  # pyright: ignore[reportPrivateUsage]
        api.heard_at -= 3600
        assert status(await router.say(head("GET / HTTP/1.1", CLOSE))) == 503
        assert not found.heard


# Who may.


async def test_nobody_is_let_in_who_is_not_in_the_access_file(tmp_path: Path) -> None:
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        good = head("GET / HTTP/1.1", CLOSE)
        key = f"Authorization: Bearer {KEY}\r\n".encode()
        for shown in (
            b"",
            b"Authorization: Bearer k8e-wrong\r\n",
            b"Authorization: Basic a\r\n",
            key * 2,
        ):
            said = await router.say(good.replace(key, shown))
            assert status(said) == 401
            assert b"www-authenticate" in said
        assert (
            status(
                await router.say(
                    b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + CLOSE.encode() + b"\r\n\r\n"
                )
            )
            == 200
        )
        assert not found.heard


def change(file: Path, access: Any) -> None:
    part = file.with_suffix(".part")
    part.write_text(access if isinstance(access, str) else yaml.safe_dump(access), "utf-8")
    part.replace(file)


async def test_a_key_that_is_taken_out_of_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(principals, "LOOK_SECONDS", 0.0)
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        asked = head("GET / HTTP/1.1", CLOSE)
        assert status(await router.say(asked)) == 200
        change(tmp_path / "access.yaml", {"principals": []})
        assert status(await router.say(asked)) == 401
        change(tmp_path / "access.yaml", "principals: [")
        assert status(await router.say(asked)) == 503, "nobody is let in by a malformed file"
        change(tmp_path / "access.yaml", ACCESS)
        assert status(await router.say(asked)) == 200


async def test_a_caller_may_be_known_by_its_address_but_no_page_in_its_browser(
    tmp_path: Path,
) -> None:
    here = {"name": "here", "addresses": ["127.0.0.1/32"], "namespaces": ["space"]}
    async with pod() as found, routed(tmp_path, {"principals": [here]}) as router:
        router.add(sandbox("box", found.address))
        asked = head("GET / HTTP/1.1", CLOSE)
        asked = asked.replace(f"Authorization: Bearer {KEY}\r\n".encode(), b"")
        local = asked.replace(b"Host: router", b"Host: 127.0.0.1:8080")
        assert status(await router.say(local)) == 200
        assert status(await router.say(asked)) == 421, "a name that leads here is not ours"
        for field in (b"Origin: http://evil.example", b"Sec-Fetch-Site: cross-site"):
            page = local.replace(b"\r\n\r\n", b"\r\n" + field + b"\r\n\r\n")
            assert status(await router.say(page)) == 403
        assert len(found.heard) == 1


MALFORMED = [
    "[]",
    "principals: {}",
    "principals: [a]",
    "principals: [{name: a, namespaces: [b]}]",
    "principals: [{name: a, keys: [secret], namespaces: [b]}]",
    "principals: [{name: a, addresses: [10.0.0.1/8], namespaces: [b]}]",
    "principals: [{name: a, addresses: ['::/0'], namespaces: [b/c]}]",
    "principals: [{name: a, addresses: ['::/0'], namespaces: b}]",
    "principals: [{name: a, addresses: ['::/0'], namespaces: [b], more: 1}]",
    "&a [*a]",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_access_file_is_refused_as_a_whole(text: str) -> None:
    with pytest.raises(principals.errors.InvalidRequest, match="malformed"):
        principals.parse(text.encode())


# Smuggled requests: what the two sides could understand differently.

SECOND = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
HOSTILE = {
    "a length and chunks": (
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        "0\r\n\r\n" + SECOND,
    ),
    "chunks and a length": (
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        "0\r\n\r\n" + SECOND,
    ),
    "two lengths": (("Content-Length: 0", f"Content-Length: {len(SECOND)}"), SECOND),
    "a list of lengths": ((f"Content-Length: 0, {len(SECOND)}",), SECOND),
    "a signed length": ((f"Content-Length: +{len(SECOND)}",), SECOND),
    "a length in hexadecimal": ((f"Content-Length: {len(SECOND):#x}",), SECOND),
    "an unknown encoding": (("Transfer-Encoding: xchunked",), "0\r\n\r\n" + SECOND),
    "chunks twice": (("Transfer-Encoding: chunked, chunked",), "0\r\n\r\n" + SECOND),
    "chunks that are not last": (("Transfer-Encoding: chunked, identity",), "0\r\n\r\n" + SECOND),
    "a tab in the encoding": (
        ("Transfer-Encoding:\tchunked", "Content-Length: 4"),
        "0\r\n\r\n" + SECOND,
    ),
    "a space before the colon": (("Transfer-Encoding : chunked",), "0\r\n\r\n" + SECOND),
    "a folded line": (("X-A: b", " Transfer-Encoding: chunked"), "0\r\n\r\n" + SECOND),
    "a folded encoding": (("Transfer-Encoding:", " chunked"), "0\r\n\r\n" + SECOND),
    "a bare line feed": (("X-A: b\nTransfer-Encoding: chunked",), "0\r\n\r\n" + SECOND),
    "a bare carriage return": (("X-A: b\rTransfer-Encoding: chunked",), "0\r\n\r\n" + SECOND),
    "a NUL": (("X-A: b\0c",), SECOND),
    "an underscore": ((f"Content_Length: {len(SECOND)}",), SECOND),
    "an empty name": ((": b",), SECOND),
    "a negative chunk": (("Transfer-Encoding: chunked",), "-1\r\n" + SECOND),
    "a huge chunk": (("Transfer-Encoding: chunked",), "f" * 17 + "\r\n" + SECOND),
    "a chunk with a line feed": (("Transfer-Encoding: chunked",), "0\n\n" + SECOND),
    "a trailer": (("Transfer-Encoding: chunked",), "0\r\nX-Sandbox-ID: other\r\n\r\n" + SECOND),
    "a length that is for one connection": (
        (f"Content-Length: {len(SECOND)}", "Connection: content-length"),
        SECOND,
    ),
    "an upgrade with a body": (
        (f"Content-Length: {len(SECOND)}", "Connection: Upgrade", "Upgrade: websocket"),
        SECOND,
    ),
    "another protocol": (("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"), SECOND),
}


@pytest.mark.parametrize("how", HOSTILE)
async def test_no_request_is_smuggled_into_a_pod(tmp_path: Path, how: str) -> None:
    fields, body = HOSTILE[how]
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        data = head("POST /a HTTP/1.1", *fields) + body.encode()
        reader, writer = await router.connect()
        writer.write(data + head("GET /last HTTP/1.1", CLOSE))
        async with asyncio.timeout(30):
            await reader.read()
        writer.transport.abort()
        for heard in found.heard:
            assert bytes(heard).count(b"Host: localhost") <= 1, "one request for a connection"
            first, _, rest = bytes(heard).partition(b"\r\n\r\n")
            assert not first.startswith(b"GET /smuggled")
            names = [line.partition(b":")[0].lower() for line in first.split(b"\r\n")[1:]]
            assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
            if b"content-length" in names:
                assert b"/smuggled" not in first
            elif b"transfer-encoding" not in names:
                assert rest in (b"", b"<end>"), "bytes that belong to no request"


LINES = [
    "GET http://evil.example/ HTTP/1.1",
    "GET //evil.example/../a HTTP/1.1",
    "CONNECT evil.example:443 HTTP/1.1",
    "OPTIONS * HTTP/1.1",
    "GET /a HTTP/0.9",
    "GET /a HTTP/1.1 HTTP/1.1",
    "GET /a\tb HTTP/1.1",
    "G\0ET /a HTTP/1.1",
    "GET /\xe9 HTTP/1.1",
]


@pytest.mark.parametrize("line", LINES)
async def test_a_strange_first_line_leads_to_the_sandbox_or_nowhere(
    tmp_path: Path, line: str
) -> None:
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        said = status(await router.say(head(line, CLOSE)))
        if line.startswith("GET //evil"):
            assert said == 200
            assert found.heard[0].startswith(b"GET //evil.example/../a HTTP/1.1\r\n")
        else:
            assert said in (0, 400, 405, 505)
            assert not found.heard


IDS = ["127.0.0.1", "a/b", "box.other.svc", "box@evil", "box%2f", "-box", "b\u00f6x"]


@pytest.mark.parametrize("name", IDS)
async def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        asked = head("GET / HTTP/1.1", CLOSE).replace(b"box", name.encode())
        assert status(await router.say(asked)) == 400
        assert not found.heard


async def test_a_head_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with routed(tmp_path) as router:
        many = [f"X-{number}: a" for number in range(500)]
        for fields in (["X-A: " + "a" * (1 << 20)], many):
            assert status(await router.say(head("GET / HTTP/1.1", *fields))) in (0, 400, 431)


# Answers that are hostile.

ANSWERS = {
    "two answers": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\nevil",
    "a length and chunks": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nok\r\n0\r\n\r\nevil"
    ),
    "a header that ends the head": (
        b"HTTP/1.1 200 OK\r\nX-A: b\r\n\x20c\r\nContent-Length: 2\r\n\r\nokevil"
    ),
    "a hidden 101": (
        b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nevil"
    ),
    "no HTTP": b"nonsense\r\n\r\n",
    "a length that is for one connection": (
        b"HTTP/1.1 200 OK\r\nConnection: content-length\r\nContent-Length: 2\r\n\r\nokevil"
    ),
    "a 204 with a body": b"HTTP/1.1 204 No\r\nContent-Length: 4\r\n\r\nevil",
}


@pytest.mark.parametrize("how", ANSWERS)
async def test_what_follows_an_answer_is_no_part_of_the_next_one(tmp_path: Path, how: str) -> None:
    async with pod(ANSWERS[how]) as bad, pod() as good, routed(tmp_path) as router:
        router.add(sandbox("bad", bad.address))
        router.add(sandbox("box", good.address))
        asked = head("GET / HTTP/1.1", sandbox="bad") + head("GET / HTTP/1.1", CLOSE)
        said = await router.say(asked)
        assert b"evil" not in said
        assert said.count(b"HTTP/1.1 ") == 2
        assert said.endswith(b"ok")


async def test_a_server_that_leaves_in_the_middle_cuts_its_client_off(tmp_path: Path) -> None:
    part = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    async with pod(part) as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        reader, writer = await router.connect()
        writer.write(head())
        async with asyncio.timeout(30):
            await reader.readuntil(b"half")
            found.writers[0].close()
            assert await reader.read() == b""
        writer.transport.abort()


async def test_an_answer_of_single_bytes_is_passed_on_in_larger_pieces(tmp_path: Path) -> None:
    start = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = start + b"1\r\na\r\n" * 2000 + b"0\r\n\r\n"
    async with pod(answer) as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        said = await router.say(head("GET / HTTP/1.1", CLOSE))
        _, _, body = said.partition(b"\r\n\r\n")
        assert body.count(b"a") == 2000
        assert body.count(b"\r\n") < 500, "each piece is work for the router and its client"


async def test_a_client_that_leaves_leaves_nothing_behind(tmp_path: Path) -> None:
    async with pod(b"") as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        for half in (False, True):
            reader, writer = await router.connect()
            writer.write(head("POST / HTTP/1.1", "Content-Length: 100") + b"half a body")
            await found.until(lambda: bool(found.heard) and b"half a body" in found.heard[-1])
            if half:
                writer.write_eof()
                assert await reader.read() == b""
            else:
                writer.transport.abort()
            await found.until(lambda: found.heard[-1].endswith(b"<end>"))
            writer.transport.abort()
            found.heard.clear()


async def test_a_client_that_leaves_is_noticed_though_its_body_was_not_taken(
    tmp_path: Path,
) -> None:
    part = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n"
    async with pod(part) as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        reader, writer = await router.connect()
        # Its length is for one connection only, so to the server it has no body.
        fields = ("Content-Length: 4", "Connection: content-length")
        writer.write(head("POST / HTTP/1.1", *fields) + b"body")
        async with asyncio.timeout(30):
            await reader.readuntil(b"part")
        writer.transport.abort()
        await found.until(lambda: found.heard[0].endswith(b"<end>"))


async def test_marks_of_use_have_the_time_of_the_api_server(tmp_path: Path) -> None:
    async with routed(tmp_path) as router:
        api: Any = router.cluster.pods._api  # pyright: ignore[reportPrivateUsage]
        api._ahead = 300.0
        now: Any = router.cluster.activity._now  # pyright: ignore[reportPrivateUsage]
        assert now() == pytest.approx(time.time() + 300, abs=30)


async def test_one_caller_cannot_have_all_requests(tmp_path: Path) -> None:
    async with pod(b"") as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        writers: list[asyncio.StreamWriter] = []
        for _ in range(MAX_REQUESTS):
            _, writer = await router.connect()
            writer.write(head())
            writers.append(writer)
        await found.until(
            lambda: sum(b"\r\n\r\n" in heard for heard in found.heard) == MAX_REQUESTS
        )
        assert status(await router.say(head("GET / HTTP/1.1", CLOSE))) == 429
        for writer in writers:
            writer.transport.abort()
        await found.until(lambda: all(heard.endswith(b"<end>") for heard in found.heard))


async def test_bodies_pass_in_constant_memory_both_ways(tmp_path: Path) -> None:
    piece, count = os.urandom(1 << 20), 64
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (count << 20)
    async with pod(answer) as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        _, writer = await router.connect()
        writer.write(head())
        await found.until(lambda: bool(found.writers) and b"\r\n\r\n" in found.heard[0])
        pod_writer = found.writers[0]
        sent = 0
        # Nobody reads: what the pod can send is what the router and the kernel hold.
        async with asyncio.timeout(30):
            while True:
                pod_writer.write(piece)
                sent += 1
                try:
                    async with asyncio.timeout(1):
                        await pod_writer.drain()
                except TimeoutError:
                    break
        assert sent < 40
        writer.transport.abort()
        await found.until(lambda: found.heard[0].endswith(b"<end>"))


# Requests that are held until their sandbox has a pod again.

SLEEPER = {"metadata": {"annotations": {"sandbox.k8e.io/idle-seconds": "20"}}}


async def test_a_held_request_goes_on_when_its_pod_is_there(tmp_path: Path) -> None:
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", **SLEEPER))
        asking = asyncio.create_task(router.say(head("GET / HTTP/1.1", CLOSE)))
        await held(router, 1)
        router.add(sandbox("box", found.address))
        async with asyncio.timeout(30):
            assert status(await asking) == 200
        await held(router, 0)


async def test_a_held_request_ends_with_its_time_its_sandbox_or_its_client(tmp_path: Path) -> None:
    async with routed(tmp_path) as router:
        router.add(sandbox("box", **SLEEPER))
        late = head("GET / HTTP/1.1", CLOSE, "X-Sandbox-Timeout: 0.2")
        assert status(await router.say(late)) == 504
        asking = asyncio.create_task(router.say(head("GET / HTTP/1.1", CLOSE)))
        await held(router, 1)
        router.add(sandbox("box", spec={"operatingMode": "Suspended"}, **SLEEPER))
        assert status(await asking) == 409, "somebody suspended it"
        router.add(sandbox("box", **SLEEPER))
        _, writer = await router.connect()
        writer.write(head())
        await held(router, 1)
        writer.transport.abort()
        await held(router, 0)


async def test_a_sandbox_holds_a_bounded_number_of_requests(tmp_path: Path) -> None:
    async with pod() as found, routed(tmp_path) as router:
        router.add(sandbox("box", **SLEEPER))
        asked = head("GET / HTTP/1.1", CLOSE)
        asking = [asyncio.create_task(router.say(asked)) for _ in range(wake.MAX_HELD_OF_SANDBOX)]
        await held(router, wake.MAX_HELD_OF_SANDBOX)
        assert status(await router.say(asked)) == 503
        router.add(sandbox("box", found.address))
        async with asyncio.timeout(60):
            assert {status(said) for said in await asyncio.gather(*asking)} == {200}


async def held(router: Routed, count: int) -> None:
    """Wait until so many requests are held."""
    counts: Any = router.cluster.waker._held  # pyright: ignore[reportPrivateUsage]
    async with asyncio.timeout(30):
        while counts.total() != count:  # noqa: ASYNC110 - the router has no event for tests
            await asyncio.sleep(0.01)
