"""What sandboxes, clients and resolvers say to egress: words, questions, answers, first bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Generator

import dns.message
import dns.rrset
from hypothesis import example, given
from hypothesis import strategies as st

from k8e import errors
from k8e.egress import dns as egress_dns
from k8e.egress import dns_answers, sniff
from k8e.egress.policy import changed, is_public, parse_policy, parse_rule
from tests.fuzz.running import fuzz
from tests.fuzz.values import TEXTS, damaged

POLICY = parse_policy(["*.test.example", "pinned.example:443", "strict"])
QUERY = dns.message.make_query("a.test.example", "A", use_edns=0).to_wire()
WORDS = st.sampled_from(
    "none open strict default a.example *.b.example:443 1.2.3.4 10.0.0.1 1.2.3.0/24 [::1]:80 "
    "https://x.example xn--a 127.1 a..b *.* a:0 a:99999 ::ffff:10.0.0.1 a.example/path".split()
)


@fuzz(250)
@given(st.lists(WORDS | TEXTS, max_size=5), st.lists(WORDS | TEXTS, max_size=3))
def test_a_policy_is_read_or_refused_and_never_reaches_what_is_private(
    words: list[str], others: list[str]
) -> None:
    with contextlib.suppress(errors.K8eError):
        changed(words, add=others, remove=words[:1])
    try:
        policy = parse_policy(words)
    except errors.K8eError:
        return
    assert parse_policy(policy.words()) == policy
    for rule in policy.rules:
        assert parse_rule(str(rule)) == rule
        if rule.network is not None and rule.network.num_addresses == 1:
            assert is_public(rule.network.network_address)


# Names.


@fuzz(300)
@given(damaged(QUERY) | st.binary(max_size=80))
@example(b"")
@example(b"\0")
@example(QUERY[:12] + b"\xc0\x0c\0\1\0\1")
def test_a_question_is_judged_or_refused_and_always_answered(data: bytes) -> None:
    message = None
    try:
        message = dns_answers.parse(data)
        question = dns_answers.judge(message, POLICY)
    except dns_answers.DnsRefusal as refused:
        answer = dns_answers.refuse(message, data, refused)
        assert len(answer) <= 512 or message is not None
        return
    assert question.name.endswith(".test.example")
    assert dns_answers.respond(message, question, dns_answers.Resolved())
    assert dns_answers.ask(question).to_wire()


def _answer(*lines: tuple[str, str, str]) -> bytes:
    reply = dns.message.make_response(dns.message.from_wire(QUERY))
    for name, kind, text in lines:
        reply.answer.append(dns.rrset.from_text(name, 60, "IN", kind, text))
    return reply.to_wire()


GOOD = _answer(
    ("a.test.example.", "CNAME", "b.test.example."), ("b.test.example.", "A", "93.184.216.34")
)
BAD = _answer(("a.test.example.", "A", "10.0.0.1"), ("b.test.example.", "A", "169.254.169.254"))
LOOP = _answer(
    ("a.test.example.", "CNAME", "b.test.example."), ("b.test.example.", "CNAME", "a.test.example.")
)


@fuzz(250)
@given(damaged(GOOD) | damaged(BAD) | damaged(LOOP))
@example(LOOP)
@example(BAD)
def test_no_answer_of_the_world_pins_a_private_address(data: bytes) -> None:
    question = dns_answers.judge(dns_answers.parse(QUERY), POLICY)
    try:
        reply = egress_dns.read(data)
    except egress_dns.UNREADABLE:
        return
    resolved = dns_answers.reduce(question, dns_answers.read(question, reply))
    assert all(map(is_public, resolved.addresses))
    assert dns_answers.MIN_PIN <= resolved.seconds <= dns_answers.MAX_PIN
    assert len(resolved.addresses) <= dns_answers.MAX_ADDRESSES
    assert dns_answers.respond(dns_answers.parse(QUERY), question, resolved)


@contextlib.contextmanager
def resolver(said: bytes, over_tcp: bytes) -> Generator[egress_dns.Upstream]:
    """A resolver on loopback that answers with these bytes, over TCP with those."""
    with (
        socket.create_server(("127.0.0.1", 0)) as stream,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        port = stream.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        stream.settimeout(2)
        datagrams.settimeout(2)

        def serve() -> None:
            with contextlib.suppress(OSError):
                asked, where = datagrams.recvfrom(4096)
                datagrams.sendto(asked[:2] + said[2:], where)
                connection, _ = stream.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(over_tcp)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield egress_dns.Upstream("127.0.0.1", port)
        finally:
            # What it still waits for does not come.
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                pass
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wake:
                wake.sendto(b"", ("127.0.0.1", port))
            thread.join()


@fuzz(15)
@given(st.just(GOOD) | damaged(GOOD), st.binary(max_size=60))
@example(GOOD[:2] + b"\x83\x80" + GOOD[4:], b"\0\x04\0\0\0\0")
@example(GOOD[:2] + b"\x83\x80" + GOOD[4:], b"\xff\xffx")
def test_a_resolver_that_says_anything_gives_an_answer_or_none(said: bytes, stream: bytes) -> None:
    async def play(upstream: egress_dns.Upstream) -> None:
        query = dns.message.from_wire(QUERY)
        try:
            reply = await egress_dns.ask_upstream(query, [upstream], socket.socket)
        except egress_dns.NoAnswer:
            return
        assert query.is_response(reply)

    saved, egress_dns.SECONDS = egress_dns.SECONDS, 0.05
    try:
        with resolver(said, stream) as upstream:
            asyncio.run(play(upstream))
    finally:
        egress_dns.SECONDS = saved


# First bytes.


def hello(name: bytes) -> bytes:
    """A ClientHello with a server name."""
    entry = b"\0" + len(name).to_bytes(2, "big") + name
    listed = len(entry).to_bytes(2, "big") + entry
    extension = b"\0\0" + len(listed).to_bytes(2, "big") + listed
    extensions = len(extension).to_bytes(2, "big") + extension
    body = b"\3\3" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0" + extensions
    message = b"\1" + len(body).to_bytes(3, "big") + body
    return b"\x16\3\1" + len(message).to_bytes(2, "big") + message


HTTP = (
    b"POST /p?q HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\nX: y\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nabc"
)


@fuzz(300)
@given(damaged(hello(b"a.example")) | damaged(HTTP), st.sampled_from([80, 443]))
@example(hello(b"a.example"), 443)
@example(hello(b"a.example\0evil.example"), 443)
def test_first_bytes_name_one_host_or_are_refused(data: bytes, port: int) -> None:
    found = sniff.peek(data, port)
    if found is not None and found.said.name:
        assert parse_rule(found.said.name).name == found.said.name
        assert found.said.name.encode() in data.lower()
        if found.request is not None:
            again = sniff.read_head(sniff.rewrite(found.request), port)
            assert again is not None
            assert again[0].name == found.said.name
    sniff.peek_again(data, port)
    sniff.asks_again(data)
