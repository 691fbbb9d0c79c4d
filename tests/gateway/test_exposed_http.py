"""Exposed servers in real sandboxes: who gets in, what passes, and what the sandbox never sees."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import socket
import subprocess
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from k8e import SandboxClient
from k8e.gateway.ports.listener import MAX_STRANGERS
from tests.gateway.echo_server import PIECE, frame
from tests.gateway.exposed import PATIENCE, Service, start_server, take
from tests.places import Place, eventually

PORT = 8123
CROSS_SITE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
NAVIGATION = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.fixture(scope="module")
def service(place: Place, session_id: str) -> Generator[Service]:
    """The echo server, on each runtime."""
    with SandboxClient(place.endpoint) as client:
        start_server(client, session_id, PORT)
        exposed = client.expose(session_id, PORT)
        yield Service(exposed)
        client.unexpose(session_id, PORT)


@pytest.fixture(scope="module")
def other(place: Place, session_id: str) -> Generator[Service]:
    """The same server, exposed a second time by another port that leads nowhere."""
    with SandboxClient(place.endpoint) as client:
        yield Service(client.expose(session_id, PORT + 1))
        client.unexpose(session_id, PORT + 1)


# Who gets in.


def test_the_token_opens_in_the_url_in_the_header_and_in_the_cookie(service: Service) -> None:
    assert service.ask(f"/?k8e-token={service.token}", token=False).status == 200
    assert service.ask("/").status == 200
    greeted = service.ask(f"/a?k8e-token={service.token}&b=1", NAVIGATION, token=False)
    assert greeted.status == 303
    assert greeted.headers["Location"] == f"http://{service.authority}/a?b=1"
    cookie = greeted.headers["Set-Cookie"]
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
    pair = cookie.partition(";")[0]
    assert service.ask("/", token=False, Cookie=f"mine=1; {pair}").status == 200


def test_without_the_services_own_token_nothing_reaches_the_sandbox(
    service: Service, other: Service
) -> None:
    before = service.state()["requests"]
    wrong = service.token[:-1] + ("a" if service.token[-1] != "a" else "b")
    cookie = other.ask(f"/?k8e-token={other.token}", NAVIGATION, token=False).headers["Set-Cookie"]
    refused = [
        service.ask("/", token=False),
        service.ask(f"/?k8e-token={wrong}", token=False),
        service.ask(f"/?k8e-token={other.token}", token=False),
        service.ask("/", token=False, X_K8e_Token=other.token),
        service.ask("/", token=False, Cookie=cookie.partition(";")[0]),
        service.ask("/", token=False, method="POST", body=b"x" * 100_000),
    ]
    for answer in refused:
        assert answer.status == 403
        assert "k8e sandbox exposed" in answer.text
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert service.state()["requests"] == before + 1, "only the question itself"


def ask_as(uid: int, service: Service, pair: str) -> int:
    """The status that another user of the machine gets with a cookie."""
    asking = (
        "import http.client, sys\n"
        "connection = http.client.HTTPConnection(sys.argv[1], timeout=20)\n"
        "connection.request('GET', '/', headers={'Cookie': sys.argv[2]})\n"
        "print(connection.getresponse().status)"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", asking, service.authority, pair],
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return int(done.stdout)


def test_a_cookie_is_no_token_and_of_no_use_to_other_services_and_users(
    service: Service, other: Service
) -> None:
    greeted = service.ask(f"/?k8e-token={service.token}", NAVIGATION, token=False)
    pair = greeted.headers["Set-Cookie"].partition(";")[0]
    value = pair.partition("=")[2]
    assert service.token not in pair
    assert ask_as(os.getuid(), service, pair) == 200
    assert ask_as(65534, service, pair) == 403, "a thief with another uid"
    answers = [
        service.ask("/", token=False, X_K8e_Token=value),
        service.ask(f"/?k8e-token={value}", token=False),
        other.ask("/", token=False, Cookie=pair),
        other.ask("/", token=False, Cookie=pair.replace(f"-{service.url.port}-", "-1-")),
    ]
    assert [answer.status for answer in answers] == [403] * 4


def test_every_request_on_a_connection_is_judged_and_not_only_the_first(service: Service) -> None:
    connection = service.connect()
    for _ in range(2):
        connection.request("GET", "/", headers=service.exposed.headers)
        assert take(connection).status == 200
    connection.request("GET", "/")
    assert take(connection).status == 403
    connection.close()


def test_another_name_for_our_address_leads_nowhere(service: Service) -> None:
    for host in ("rebound.example", f"localhost:{service.url.port}", f"{service.authority}0"):
        answer = service.ask("/", Host=host)
        assert answer.status == 421
        assert service.authority in answer.text


def test_other_sites_pages_get_nothing_even_with_the_token(service: Service) -> None:
    assert service.ask("/", CROSS_SITE).status == 403
    assert service.ask(f"/?k8e-token={service.token}", CROSS_SITE).status == 403
    assert service.ask("/", Origin="https://evil.example").status == 403
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "a2V5"}
    assert service.ask("/ws", upgrade, Origin="https://evil.example").status == 403
    link = {"Sec-Fetch-Site": "cross-site", **NAVIGATION}
    assert service.ask("/", link).status == 403
    page = service.ask(f"/?k8e-token={service.token}", link, token=False)
    assert page.status == 200
    assert service.token not in page.text
    assert "Set-Cookie" in page.headers


def test_no_answer_of_ours_opens_the_service_to_other_origins(service: Service) -> None:
    own = f"http://{service.authority}"
    for answer in (service.ask("/", Origin=own), service.ask("/", token=False, Origin=own)):
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert service.ask("/").headers["Referrer-Policy"] == "same-origin"


# What the sandbox sees.


def test_the_sandbox_never_sees_the_token(service: Service, other: Service) -> None:
    names = [
        item.ask(f"/?k8e-token={item.token}", NAVIGATION, token=False).headers["Set-Cookie"]
        for item in (service, other)
    ]
    pairs = "; ".join(name.partition(";")[0] for name in names)
    seen = service.ask(
        f"/p?a=1&k8e-token={service.token}&b=2",
        Cookie=f"one=1; {pairs}; two=2",
        Referer=f"{service.exposed.url}&c=3",
        Authorization=f"Bearer {service.token}",
    ).json()["head"]
    assert seen.startswith("GET /p?a=1&b=2 HTTP/1.1\r\n")
    assert service.token not in seen
    assert other.token not in seen
    assert "k8e-" not in seen
    assert "Cookie: one=1; two=2\r\n" in seen
    assert f"Referer: http://{service.authority}/?c=3\r\n" in seen
    assert f"Host: {service.authority}\r\n" in seen


def test_the_sandbox_cannot_set_cookies_of_ours(service: Service) -> None:
    greeted = service.ask(f"/?k8e-token={service.token}", NAVIGATION, token=False)
    ours = greeted.headers["Set-Cookie"].partition("=")[0]
    answer = service.ask("/set-cookies", X_Names=f"app {ours} K8E-x =k8e-y")
    assert answer.headers.get_all("Set-Cookie") == ["app=evil"]


# What passes.


def test_bodies_pass_both_ways_whole_with_a_length_and_in_chunks(service: Service) -> None:
    body = os.urandom(5 << 20)
    digest = hashlib.sha256(body).hexdigest()
    told = service.ask("/", method="POST", body=body).json()
    assert (told["size"], told["digest"]) == (len(body), digest)
    pieces = (body[at : at + 70_000] for at in range(0, len(body), 70_000))
    told = service.ask("/", method="PUT", body=pieces).json()
    assert (told["size"], told["digest"]) == (len(body), digest)
    assert "Transfer-Encoding: chunked" in told["head"]
    answer = service.ask("/big", X_Pieces="200")
    assert answer.body == PIECE * 200


def test_a_head_and_an_expectation_are_understood(service: Service) -> None:
    answer = service.ask("/big", method="HEAD", X_Pieces="0")
    assert (answer.status, answer.body) == (200, b"")
    with service.raw() as client:
        client.sendall(
            f"POST / HTTP/1.1\r\nHost: {service.authority}\r\nX-K8e-Token: {service.token}\r\n"
            "Content-Length: 4\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"body")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")


def test_events_come_at_once(service: Service) -> None:
    connection = service.connect()
    connection.request("GET", "/events", headers=service.exposed.headers)
    stream = connection.getresponse()
    for number in range(4):
        assert stream.readline() == b"data: %d\n" % number
        assert stream.readline() == b"\n"
        service.ask("/more")
    assert stream.read() == b""
    connection.close()


def send_message(client: socket.socket, opcode: int, payload: bytes) -> None:
    plain = frame(0x80 | opcode, payload)
    head = plain[: len(plain) - len(payload)]
    mask = b"\1\2\3\4"
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    client.sendall(bytes((head[0], head[1] | 0x80)) + head[2:] + mask + masked)


def test_a_websocket_carries_messages_both_ways_to_its_end(service: Service) -> None:
    with service.raw() as client:
        client.sendall(
            f"GET /ws HTTP/1.1\r\nHost: {service.authority}\r\nX-K8e-Token: {service.token}\r\n"
            f"Origin: http://{service.authority}\r\nSec-Fetch-Site: same-origin\r\n"
            "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        stream = client.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 101 Switching Protocols\r\n"
        head = b"".join(iter(stream.readline, b"\r\n"))
        assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in head
        for payload in (b"hello", b"", b"x" * 70_000, bytes(range(256)) * 3):
            send_message(client, 2, payload)
            wanted = frame(0x82, payload)
            assert stream.read(len(wanted)) == wanted
        send_message(client, 8, b"")
        assert stream.read() == frame(0x88, b"")


# Clients that are slow or leave.


def test_a_client_that_reads_nothing_holds_the_server_back(service: Service) -> None:
    before = service.state()["endless"]
    connection = service.connect()
    connection.request("GET", "/endless", headers=service.exposed.headers)
    stream = connection.getresponse()
    assert stream.read(100)
    seen = [-1]

    def stands() -> bool:
        seen.append(service.state()["endless"])
        return seen[-1] == seen[-2]

    eventually(stands, PATIENCE)
    assert seen[-1] - before < 32 << 20
    left = service.state()["left"]
    stream.close()
    connection.close()
    eventually(lambda: service.state()["left"] > left, PATIENCE)


def test_a_client_that_leaves_is_missed_by_the_server_at_once(service: Service) -> None:
    left = service.state()["left"]
    connection = service.connect()
    connection.request("GET", "/hold", headers=service.exposed.headers)
    connection.close()
    eventually(lambda: service.state()["left"] > left, PATIENCE)


def test_strangers_make_room_for_others(service: Service) -> None:
    strangers = [service.raw() for _ in range(MAX_STRANGERS + 40)]
    for _ in range(3):
        assert service.ask("/").status == 200
    gone = 0
    for stranger in strangers:
        stranger.settimeout(0)
        try:
            stranger.recv(1)
        except ConnectionResetError:
            gone += 1
        except BlockingIOError:
            pass
        stranger.close()
    assert gone >= 40


def test_so_many_connections_are_served_and_no_more(service: Service) -> None:
    held: list[http.client.HTTPConnection] = []
    for _ in range(128):
        connection = service.connect()
        connection.request("GET", "/", headers=service.exposed.headers)
        assert take(connection).status == 200
        held.append(connection)
    answer = service.ask("/")
    assert answer.status == 503
    assert "too many connections" in answer.text
    for connection in held:
        connection.close()
    eventually(lambda: service.ask("/").status == 200, PATIENCE)


def test_many_clients_at_once_are_all_served(service: Service) -> None:
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(service.ask, ["/"] * 200))
    assert {answer.status for answer in answers} == {200}


# Servers that are not there.


def test_an_answer_whose_server_is_killed_does_not_look_whole(
    place: Place, session_id: str
) -> None:
    with SandboxClient(place.endpoint) as client:
        start_server(client, session_id, PORT + 2)
        service = Service(client.expose(session_id, PORT + 2))
        with contextlib.closing(service.connect()) as connection:
            connection.request("GET", "/endless", headers=service.exposed.headers)
            with connection.getresponse() as stream:
                assert stream.read(10)
                client.exec(session_id, f"pkill -9 -f 'echo_server.py {PORT + 2}'")
                with pytest.raises((ConnectionError, http.client.IncompleteRead)):
                    read_all(stream)
        assert service.ask("/").status == 502
        client.unexpose(session_id, PORT + 2)


def read_all(stream: http.client.HTTPResponse) -> None:
    while stream.read(1 << 20):
        pass


def test_a_port_on_which_nothing_listens_is_explained_until_something_does(
    place: Place, other: Service, session_id: str
) -> None:
    answer = other.ask("/")
    assert answer.status == 502
    assert "Nothing listens on this port in the sandbox" in answer.text
    with SandboxClient(place.endpoint) as client:
        run = client.start(
            session_id,
            ["python3", "-u", "-m", "http.server", str(PORT + 1), "--bind", "127.0.0.1"],
        )
        client.write_file(session_id, "page.txt", "from a file")
        eventually(lambda: other.ask("/page.txt").status == 200, PATIENCE)
        assert other.ask("/page.txt").body == b"from a file"
        assert other.ask("/missing").status == 404
        run.kill()
