"""The link to a pod: who proves what to whom, and what an attacker gets who tries."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from k8e import errors, link
from k8e.guest import wire
from k8e.guest.pod import GATEWAY_NAME, MOST_CALLERS, POD_PORT
from k8e.runtimes.kubernetes.authority import LinkAuthority
from k8e.runtimes.kubernetes.identity import IdentityRefused, PodIdentity, TokenVerifier
from k8e.runtimes.kubernetes.link import Dialler, introduce
from tests.runtimes.pods import Issuer, PodProcess, new_address, pod_process

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="it makes namespaces"),
]

SECONDS = 20.0
REFUSED = (ssl.SSLError, ConnectionError)
POD = PodIdentity("sandboxes", "k8e-sandbox", "pod-1", "11111111-aaaa")
OTHER = PodIdentity("sandboxes", "k8e-sandbox", "pod-2", "22222222-bbbb")
TOKEN_AND_ENVIRONMENT = """
import os
_NAMES = "K8E_LINK", "KUBERNETES", "IMAGE", "LD_", "OPENSSL"
for path in ("/run/k8e/identity/token", "/proc/1/environ"):
    try:
        print(open(path, "rb").read())
    except OSError as error:
        print(type(error).__name__)
print(sorted(name for name in os.environ if name.startswith(_NAMES)))
"""
ATTACK = """
import socket, ssl, sys
got = []
for attempt in range({attempts}):
    connection = socket.create_connection(("{address}", {port}), 5)
    connection.settimeout(5)
    connection.sendall({words!r})
    try:
        while data := connection.recv(4096):
            got.append(data)
    except OSError:
        pass
print(len(b"".join(got)) > 1000 * {attempts}, b"eyJ" in b"".join(got))
"""


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> LinkAuthority:
    return LinkAuthority(tmp_path_factory.mktemp("authority"))


class Gateway:
    """A gateway's side of one pod."""

    def __init__(self, pod: PodProcess, authority: LinkAuthority, issuer: Issuer) -> None:
        self.pod, self.authority, self.issuer = pod, authority, issuer
        self.verifier = TokenVerifier(issuer.fetch)
        self.key = secrets.token_bytes(link.KEY_SIZE)
        self.breaches: list[str] = []
        self.diallers: list[Dialler] = []

    def dial(self, *, key: bytes = b"", is_taken: bool = False) -> Dialler:
        async def verify(token: bytes) -> None:
            await self.verifier.verify(token, POD)

        made = Dialler(
            self.pod.address,
            context=self.authority.context,
            verify=verify,
            key=key or self.key,
            is_taken=is_taken,
        )
        made.on_breach = self.breaches.append
        made.start()
        self.diallers.append(made)
        return made

    async def run(self, argv: list[str], **call: Any) -> bytes:
        """What a program in the sandbox prints."""
        made = await self.diallers[-1].ready(SECONDS)
        printed = bytearray()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_frame(kind: int, body: bytes) -> None:
            if kind in (wire.OUT, wire.ERR):
                printed.extend(data := body[wire.SEQ.size :])
                channel.send(wire.CREDIT, wire.CREDIT_BODY.pack(len(data)))
            elif kind in (wire.EXIT, wire.ERROR) and not done.done():
                done.set_result(None)

        channel = made.open({"op": "exec", "argv": argv, **call}, on_frame, lambda: None)
        try:
            await asyncio.wait_for(done, SECONDS)
        finally:
            channel.close()
        return bytes(printed)


@pytest.fixture
async def gateway(
    tmp_path: Path, authority: LinkAuthority, issuer: Issuer
) -> AsyncGenerator[Gateway]:
    with pod_process(tmp_path / "pod", authority.pem) as pod:
        pod.show(issuer.token(POD))
        found = Gateway(pod, authority, issuer)
        try:
            yield found
        finally:
            for dialler in found.diallers:
                dialler.close(errors.SandboxDied("the test is over"))


async def refusal(gateway: Gateway) -> str:
    """Why the gateway does not believe the pod."""

    async def verify(token: bytes) -> None:
        await gateway.verifier.verify(token, POD)

    with pytest.raises(IdentityRefused) as caught:
        await introduce(gateway.pod.address, gateway.authority.context(), verify)
    return str(caught.value)


# Those who are who they say.


async def test_a_pod_that_proves_itself_has_a_link_over_which_programs_run(
    gateway: Gateway,
) -> None:
    gateway.pod.start()
    gateway.dial()
    ready = await gateway.diallers[0].ready(SECONDS)
    await link.request(ready, {"op": "bind", "env": {"OWN": "1"}, "warm": {}})
    assert await gateway.run(["/bin/sh", "-c", "echo $OWN $IMAGE; id -u"]) == b"1 yes\n1000\n"
    large = await gateway.run(["/bin/sh", "-c", "head -c 900000 /dev/zero"])
    assert large == bytes(900_000), "what comes in many records is whole"


async def test_output_of_many_programs_at_once_passes_a_link_whole(gateway: Gateway) -> None:
    gateway.pod.start()
    gateway.dial()
    ready = await gateway.diallers[0].ready(SECONDS)
    await link.request(ready, {"op": "bind", "env": {}, "warm": {}})
    script = "import sys; sys.stdout.write((sys.argv[1] + chr(10)) * 40000)"

    async def print_much(number: int) -> None:
        word = f"line of program {number}"
        said = await gateway.run(["/usr/bin/python3", "-c", script, word])
        assert said == f"{word}\n".encode() * 40_000

    async def be_slow() -> None:
        """Read so seldom that the guest cannot send."""
        while True:
            time.sleep(0.05)  # noqa: ASYNC251 - the whole loop is to stand still
            await asyncio.sleep(0)

    slow = asyncio.create_task(be_slow())
    await asyncio.gather(*map(print_much, range(8)))
    slow.cancel()
    assert await gateway.diallers[0].ready(SECONDS) is ready, "it was lost"


async def test_a_new_gateway_with_the_key_takes_the_link_over_and_the_old_one_loses_it(
    gateway: Gateway,
) -> None:
    gateway.pod.start()
    first = gateway.dial()
    old = await first.ready(SECONDS)
    lost = asyncio.Event()
    old.open({"op": "exec", "argv": ["/bin/sleep", "60"]}, ignore, lost.set)
    await link.request(old, {"op": "ping"})
    second = gateway.dial(is_taken=True)
    await link.request(await second.ready(SECONDS), {"op": "ping"})
    await asyncio.wait_for(lost.wait(), SECONDS)


async def test_a_container_that_was_started_anew_is_not_taken_for_the_guest_that_it_was(
    gateway: Gateway,
) -> None:
    gateway.pod.start()
    first = gateway.dial()
    await first.ready(SECONDS)
    first.close(errors.SandboxDied("its gateway ended"))
    gateway.pod.stop()
    gateway.pod.start()
    gateway.dial(is_taken=True)
    await eventually(lambda: gateway.breaches)
    assert "started anew" in gateway.breaches[0]


async def test_the_key_of_a_link_is_given_once(gateway: Gateway) -> None:
    gateway.pod.start()
    first = gateway.dial()
    await first.ready(SECONDS)
    first.close(errors.SandboxDied("its gateway ended"))
    thief = gateway.dial(key=secrets.token_bytes(link.KEY_SIZE), is_taken=True)
    with pytest.raises(errors.GuestFailed, match="did not answer"):
        await thief.ready(1.0)

    async def trust(_: bytes) -> None:
        """Whoever gives a key has a gateway's certificate."""

    transport, said = await introduce(gateway.pod.address, gateway.authority.context(), trust)
    assert said.has_key
    closed = asyncio.get_running_loop().create_future()
    transport.set_protocol(Watching(closed))
    transport.write(wire.frame(wire.LINK_KEY, 0, bytes(link.KEY_SIZE)))
    assert await asyncio.wait_for(closed, SECONDS) == b"", "the guest takes no second key"
    gateway.dial(is_taken=True)
    assert await gateway.run(["/bin/echo", "still"]) == b"still\n"


# Those who lie about the pod.


async def test_the_token_of_another_pod_is_refused(gateway: Gateway, issuer: Issuer) -> None:
    gateway.pod.show(issuer.token(OTHER))
    gateway.pod.start()
    assert "its pod" in await refusal(gateway)
    gateway.dial()
    await eventually(lambda: gateway.breaches)


async def test_a_token_whose_time_is_over_is_asked_for_again_and_ends_nothing(
    gateway: Gateway, issuer: Issuer
) -> None:
    """A kubelet that was away for long has not renewed it yet."""
    gateway.pod.show(issuer.token(POD, exp=1_700_000_000))
    gateway.pod.start()
    made = gateway.dial()
    with pytest.raises(errors.GuestFailed, match="the time at which it ends"):
        await made.ready(1.0)
    gateway.pod.show(issuer.token(POD))
    assert await gateway.run(["/bin/echo", "in"]) == b"in\n"
    assert not gateway.breaches


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"aud": ["https://kubernetes.default.svc"]}, "its audience"),
        ({"aud": ["k8e-link", "other"]}, "its audience"),
        ({"exp": 1_700_000_000}, "at which it ends"),
        ({"exp": True}, "at which it ends"),
        ({"nbf": 4_000_000_000}, "at which it begins"),
        ({"iss": "https://elsewhere"}, "its issuer"),
        ({"kubernetes.io": {}}, "not bound to a pod"),
        ({"kubernetes.io": {"namespace": "sandboxes", "serviceaccount": {}, "pod": []}}, "bound"),
    ],
)
async def test_a_token_of_another_use_or_time_is_refused(
    issuer: Issuer, claims: dict[str, Any], why: str
) -> None:
    with pytest.raises(IdentityRefused, match=why):
        await TokenVerifier(issuer.fetch).verify(issuer.token(POD, **claims), POD)


async def test_the_clusters_keys_are_asked_for_once_however_many_pods_are_dialled(
    issuer: Issuer,
) -> None:
    async def fetch() -> tuple[str, dict[str, Any]]:
        told = await issuer.fetch()
        await asyncio.sleep(0)  # the others go on meanwhile
        return told

    verifier, token, asked = TokenVerifier(fetch), issuer.token(POD), issuer.asked
    await asyncio.gather(*(verifier.verify(token, POD) for _ in range(50)))
    assert issuer.asked == asked + 1


async def test_a_token_that_others_signed_or_that_was_changed_is_refused(issuer: Issuer) -> None:
    verifier = TokenVerifier(issuer.fetch)
    good = issuer.token(POD)
    await verifier.verify(good, POD)
    head, _, tail = good.split(b".")
    body = issuer.token(OTHER).split(b".")[1]
    unsigned = b"eyJhbGciOiJub25lIiwia2lkIjoib25lIn0"  # {"alg":"none","kid":"one"}
    symmetric = b"eyJhbGciOiJIUzI1NiIsImtpZCI6Im9uZSJ9"  # {"alg":"HS256","kid":"one"}
    rest = good.split(b".", 1)[1]
    for forged, why in (
        (b".".join((head, body, tail)), "signature"),
        (Issuer().token(POD), "signature"),
        (unsigned + b"." + rest, "not for"),
        (symmetric + b"." + rest, "not for"),
        (issuer.token(POD, kid="two"), "not the cluster's"),
        (b"no token", "no token"),
        (b"a.b.c", "no token"),
        (b"x" * 9000, "no token"),
    ):
        with pytest.raises(IdentityRefused, match=why):
            await verifier.verify(forged, POD)
    asked = issuer.asked
    for _ in range(5):
        with pytest.raises(IdentityRefused):
            await verifier.verify(issuer.token(POD, kid="three"), POD)
    assert issuer.asked == asked, "names of keys that nobody has do not keep the API server busy"


# Those who lie about the gateway.


async def test_the_token_is_shown_to_nobody_without_a_certificate_of_the_authority(
    gateway: Gateway, tmp_path: Path
) -> None:
    gateway.pod.start()
    shown: list[bytes] = []

    async def note(token: bytes) -> None:
        shown.append(token)

    strangers = LinkAuthority(tmp_path / "another").context()
    with pytest.raises(REFUSED):
        await introduce(gateway.pod.address, strangers, note)
    assert shown == []


async def test_an_older_tls_is_refused_by_both_ends(gateway: Gateway) -> None:
    gateway.pod.start()
    older = gateway.authority._make_context()  # pyright: ignore[reportPrivateUsage]
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2

    async def fail(_: bytes) -> None:
        pytest.fail("the token was shown")

    with pytest.raises(REFUSED):
        await introduce(gateway.pod.address, older, fail)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        client.load_verify_locations(cadata=gateway.authority.pem)

        def shake_hands() -> str:
            ours.settimeout(SECONDS)
            try:
                client.wrap_socket(ours, server_hostname=GATEWAY_NAME)
            except ssl.SSLError as error:
                return str(error)
            return ""

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            theirs.setblocking(False)
            context = gateway.authority.context()
            with pytest.raises(REFUSED):
                await loop.connect_accepted_socket(asyncio.Protocol, theirs, ssl=context)

        said, _ = await asyncio.gather(asyncio.to_thread(shake_hands), serve())
    assert said, "no handshake"


async def test_what_one_connection_said_is_worth_nothing_on_another(gateway: Gateway) -> None:
    """A recording of a whole conversation, played to the pod and to a gateway."""
    gateway.pod.start()
    towards_pod, towards_gateway = await record(gateway)
    assert len(towards_pod) > 1000 < len(towards_gateway)

    played = await asyncio.to_thread(play, (gateway.pod.address, POD_PORT), towards_pod)
    assert b"eyJ" not in played
    assert await gateway.run(["/bin/echo", "well"]) == b"well\n", "the link is as it was"

    server = socket.create_server(("127.0.0.1", 0))
    with server:
        answering = asyncio.to_thread(answer, server, towards_gateway)
        loop = asyncio.get_running_loop()
        opened = socket.socket()
        opened.setblocking(False)
        task = asyncio.ensure_future(answering)
        await loop.sock_connect(opened, server.getsockname())
        with pytest.raises(REFUSED):
            await loop.connect_accepted_socket(
                asyncio.Protocol, opened, ssl=gateway.authority.context()
            )
        await task


async def test_code_in_the_sandbox_gets_nothing_from_the_port_and_keeps_nobody_out(
    gateway: Gateway,
) -> None:
    gateway.pod.start()
    gateway.dial()
    await link.request(await gateway.diallers[0].ready(SECONDS), {"op": "bind", "warm": {}})
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", wire.frame(wire.CALL, 1, b"x") * 100):
        attack = ATTACK.format(
            attempts=1 if not words else 5,
            address=gateway.pod.address,
            port=POD_PORT,
            words=words or b"\x16\x03\x01\x40\x00",
        )
        assert await gateway.run(["python3", "-c", attack]) == b"False False\n"
    # More than may wait, all silent; a gateway comes through all the same.
    held = [
        socket.create_connection((gateway.pod.address, POD_PORT), SECONDS)
        for _ in range(3 * MOST_CALLERS)
    ]
    try:
        second = gateway.dial(is_taken=True)
        await link.request(await second.ready(SECONDS), {"op": "ping"})
    finally:
        for connection in held:
            connection.close()


async def test_code_in_the_sandbox_reads_neither_the_token_nor_what_its_guest_was_told(
    gateway: Gateway,
) -> None:
    gateway.pod.start()
    gateway.dial()
    ready = await gateway.diallers[0].ready(SECONDS)
    await link.request(ready, {"op": "bind", "env": {}, "warm": {}})
    said = (await gateway.run(["python3", "-c", TOKEN_AND_ENVIRONMENT])).decode()
    assert said == "PermissionError\nPermissionError\n['IMAGE']\n"


async def test_a_guest_whose_token_programs_could_read_does_not_start(
    gateway: Gateway, issuer: Issuer
) -> None:
    gateway.pod.show(issuer.token(POD), mode=0o644)
    gateway.pod.start()
    assert not gateway.pod.running
    assert "can be read by programs" in gateway.pod.log


# Helpers.


def ignore(_kind: int, _body: bytes) -> None:
    """A frame that nothing is done with."""


class Watching(asyncio.Protocol):
    """Tells what came until the connection ended."""

    def __init__(self, closed: asyncio.Future[bytes]) -> None:
        self._closed, self._got = closed, b""

    def data_received(self, data: bytes) -> None:
        self._got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set_result(self._got)


async def eventually(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def record(gateway: Gateway) -> tuple[bytes, bytes]:
    """A relay between gateway and pod, which hears all and understands nothing."""
    heard = bytearray(), bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: int) -> None:
        while data := await reader.read(65536):
            heard[to].extend(data)
            writer.write(data)

    async def on_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner = await asyncio.open_connection(before, POD_PORT)
        pumps = {
            asyncio.create_task(pump(reader, inner, 0)),
            asyncio.create_task(pump(inner_reader, writer, 1)),
        }
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for one in pumps:
            one.cancel()
        await asyncio.wait(pumps)
        inner.close()
        writer.close()

    address, before = new_address(), gateway.pod.address
    server = await asyncio.start_server(on_call, address, POD_PORT)
    gateway.pod.address = address
    try:
        relayed = gateway.dial()
        await link.request(await relayed.ready(SECONDS), {"op": "ping"})
        relayed.close(errors.SandboxDied("recorded"))
    finally:
        gateway.pod.address = before
        server.close()
        gateway.diallers.clear()
    gateway.dial(is_taken=True)
    await gateway.diallers[0].ready(SECONDS)
    return bytes(heard[0]), bytes(heard[1])


def play(address: tuple[str, int], words: bytes) -> bytes:
    """What comes back for words that were said before."""
    with socket.create_connection(address, SECONDS) as connection:
        connection.settimeout(SECONDS)
        connection.sendall(words)
        got = b""
        try:
            while data := connection.recv(65536):
                got += data
        except ConnectionResetError:
            pass
        return got


def answer(server: socket.socket, words: bytes) -> None:
    """Say what a pod said before to the gateway that dials."""
    server.settimeout(SECONDS)
    connection, _ = server.accept()
    with connection:
        connection.settimeout(SECONDS)
        connection.sendall(words)
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass
