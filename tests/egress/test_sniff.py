"""What clients say first, honest and hostile, and however it is cut."""

from __future__ import annotations

import contextlib
import itertools
import ssl

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8e.egress import sniff
from k8e.egress.sniff import (
    HTTP,
    MAX_RECORDS,
    NOT_CHECKABLE,
    PEEK_LIMIT,
    TLS,
    Chunked,
    Peeked,
    Said,
    UnreadableRequest,
    asks_again,
    peek,
    peek_again,
    timed_out,
)
from tests.egress.diversion import GOOD, client_context, client_hello

GET = b"GET /path?q HTTP/1.1\r\nHost: good.example.org\r\nAccept: */*\r\n\r\n"


def said(data: bytes, port: int = 443) -> Said:
    found = peek(data, port)
    assert found is not None
    return found.said


def records(message: bytes, *sizes: int) -> bytes:
    """A handshake message in records of these sizes; the last takes the rest."""
    made, at = b"", 0
    for size in (*sizes, len(message)):
        part = message[at : at + size]
        at += size
        if part:
            made += b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
    return made


def field(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def server_names(*names: bytes, kind: int = 0) -> bytes:
    entries = b"".join(bytes([kind]) + field(2, name) for name in names)
    return b"\0\0" + field(2, field(2, entries))


def hello(*extensions: bytes, version: bytes = b"\x03\x03", rest: bytes = b"") -> bytes:
    """A ClientHello message of our own making."""
    body = version + bytes(32) + field(1, b"") + field(2, b"\x13\x01") + field(1, b"\0")
    if extensions:
        body += field(2, b"".join(extensions))
    return b"\x01" + field(3, body + rest)


# TLS.


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_server_name_of_a_real_hello_is_found(version: ssl.TLSVersion) -> None:
    context = client_context()
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    data = client_hello("Good.Example.ORG", context)
    found = peek(data + b"early data", 443)
    assert found == Peeked(Said(TLS, GOOD), len(data))


def test_a_hello_may_come_in_several_records() -> None:
    message = client_hello(GOOD)[5:]
    for sizes in [(1,), (3,), (4,), (100, 1, 1), (1,) * (MAX_RECORDS - 1)]:
        data = records(message, *sizes)
        assert peek(data, 443) == Peeked(Said(TLS, GOOD), len(data))
    assert "records" in said(records(message, *(1,) * MAX_RECORDS)).reason


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (client_hello(None), "no server name"),
        (records(hello()), "no server name"),
        (client_hello("93.184.216.34"), "no server name"),
        (records(hello(server_names(b"93.184.216.34"))), "address"),
        (records(hello(server_names(b"0x5db8d822"))), "address"),
        (records(hello(server_names(b"2606:4700::5"))), "not a host name"),
        (records(hello(server_names(b"good.example.org."))), "one server name"),
        (records(hello(server_names(b"good.example.org:443"))), "not a host name"),
        (records(hello(server_names(b" good.example.org"))), "not a host name"),
        (records(hello(server_names(b"good.example.org\0.evil"))), "not a host name"),
        (records(hello(server_names(b"g\xc3\xb6od.example.org"))), "not a host name"),
        (records(hello(server_names(b"good..example.org"))), "valid host name"),
        (records(hello(server_names(b""))), "not a host name"),
        (records(hello(server_names(b"good.example.org", b"evil.example.org"))), "one server"),
        (records(hello(server_names(b"good.example.org", kind=1))), "one server"),
        (records(hello(server_names(b"a.example"), server_names(b"b.example"))), "twice"),
        (records(hello(server_names(b"a.example"), b"\xfe\x0d\x00\x01\x00")), "ECH"),
        (records(hello(b"\xfe\x0d\x00\x00", server_names(b"a.example"))), "ECH"),
        (records(hello(server_names(b"a.example"), b"\xff\xce\x00\x00")), "encrypted"),
        (records(hello(server_names(b"a.example"), rest=b"x")), "malformed"),
        (records(hello(server_names(b"a.example")) + b"\x01\0\0\0"), "hidden behind"),
        (records(hello(server_names(b"a.example"), version=b"\x03\x05")), "version"),
        (records(b"\x02\0\0\0"), "begin"),
        (records(b"\x01\xff\xff\xff"), "longer"),
        (b"\x16\x03\x01\x00\x00", "malformed"),
        (b"\x16\x03\x01\x40\x01", "malformed"),
        (b"\x16\x02\x01\x00\x05", "malformed"),
    ],
)
def test_a_hello_without_one_readable_name_is_refused(data: bytes, words: str) -> None:
    found = said(data)
    assert (found.protocol, found.name) == (TLS, "")
    assert words in found.reason


def test_a_second_hello_is_found_behind_what_may_come_between() -> None:
    between = (
        b"\x14\x03\x03\x00\x01\x01" + b"\x17\x03\x03\x00\x02ab" + b"\x15\x03\x03\x00\x02\x01\x5a"
    )
    data = client_hello(GOOD)
    assert peek_again(between + data, 443) == Peeked(Said(TLS, GOOD), len(between + data))
    assert peek_again(between, 443) is None
    assert peek_again(b"", 443) is None
    assert peek_again(between + GET, 80) != peek_again(between + data, 443)


def test_a_server_that_asks_again_is_told_from_one_that_does_not() -> None:
    retry = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
    message = b"\x02\0\0\x26\x03\x03" + retry + b"\0\0\0"
    usual = b"\x02\0\0\x26\x03\x03" + bytes(32) + b"\0\0\0"
    for sizes in [(), (1, 5), (20,)]:
        data = records(message, *sizes)
        assert asks_again(data) is True
        assert asks_again(records(usual, *sizes)) is False
        answers = [asks_again(data[:count]) for count in range(len(data))]
        assert set(answers) <= {None, True}
    assert asks_again(b"\x15\x03\x03\x00\x02\x02\x28") is False
    assert asks_again(b"HTTP/1.1 400 Bad Request") is False
    assert asks_again(b"") is None


# Neither TLS nor HTTP.


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\x00\x00\x08\x04\xd2\x16\x2f",  # PostgreSQL asks for TLS
        b"NICK someone\r\n",
        b"get / http/1.1\r\n",
        b"GET /\r\n",
        b" GET / HTTP/1.1\r\n",
        b"\r\nGET / HTTP/1.1\r\n",
        b"A" * 33,
        b"\x80\x00\x05",
    ],
)
def test_other_protocols_are_refused_by_name(data: bytes) -> None:
    assert said(data) == Said("", reason=NOT_CHECKABLE)


def test_an_old_hello_is_refused() -> None:
    assert "SSLv2" in said(b"\x80\x2e\x01\x03\x01\x00\x15").reason


def test_silence_and_stammering_have_words() -> None:
    assert NOT_CHECKABLE in timed_out(b"").reason
    assert timed_out(b"\x16\x03").protocol == TLS
    assert timed_out(b"GET /").protocol == HTTP
    assert timed_out(b"\x01").protocol == ""


def test_an_endless_beginning_is_refused() -> None:
    for data in (
        b"GET /" + b"a" * PEEK_LIMIT,
        records(b"\x01\0\xff\xff" + bytes(50000), *[16000] * 4),
    ):
        assert peek(data[:1000], 80) is None
        assert str(PEEK_LIMIT) in said(data + bytes(PEEK_LIMIT)).reason


# HTTP.


def request(data: bytes, port: int = 80) -> sniff.HttpHead:
    found = peek(data, port)
    assert found is not None
    assert found.request is not None, found.said.reason
    return found.request


def test_a_request_is_written_anew_for_one_answer_from_its_host() -> None:
    data = (
        b"POST http://GOOD.example.org/a?b HTTP/1.1\r\nAccept: */*\r\n"
        b"host:  Good.Example.org.:80 \r\nConnection: keep-alive, X-Thing\r\n"
        b"Keep-Alive: 5\r\nProxy-Connection: x\r\nTE: trailers\r\n"
        b"Content-Length: 3\r\nExpect: 100-continue\r\nX-Thing: a:b\r\n\r\nabcGET /"
    )
    found = peek(data, 80)
    assert found is not None
    assert found.said == Said(HTTP, GOOD)
    assert data[found.length :] == b"abcGET /"
    assert found.request is not None
    assert found.request.body == 3
    assert sniff.rewrite(found.request) == (
        b"POST /a?b HTTP/1.1\r\nHost: good.example.org:80\r\nAccept: */*\r\nContent-Length: 3\r\n"
        b"Expect: 100-continue\r\nX-Thing: a:b\r\nConnection: close\r\n\r\n"
    )
    again = peek(sniff.rewrite(found.request), 80)
    assert again is not None
    assert again.said == found.said


def test_forms_of_targets() -> None:
    head = b" HTTP/1.1\r\nHost: good.example.org\r\n\r\n"
    assert request(b"OPTIONS *" + head).target == b"*"
    assert request(b"GET http://good.example.org" + head).target == b"/"
    assert request(b"GET HTTP://good.example.org:80?x" + head).target == b"/?x"
    assert request(b"M-SEARCH /" + head).body == 0
    assert request(b"GET / HTTP/1.0\r\nHost: good.example.org\r\n\r\n").version == b"1.0"


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "no Host"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nHost: a.example\r\n\r\n", "more than one Host"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nhost: b.example\r\n\r\n", "more than one Host"),
        (b"GET / HTTP/1.1\r\nHost: a.example, b.example\r\n\r\n", "not a host name"),
        (b"GET / HTTP/1.1\r\nHost: a.example@b.example\r\n\r\n", "not a host name"),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", "not a host name"),
        (b"GET / HTTP/1.1\r\nHost: 93.184.216.34\r\n\r\n", "address"),
        (b"GET / HTTP/1.1\r\nHost: [2606:4700::5]\r\n\r\n", "not a host name"),
        (b"GET / HTTP/1.1\r\nHost: a.example:8080\r\n\r\n", "another port"),
        (b"GET http://b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "differ"),
        (b"GET http://a.example@b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "not a host"),
        (b"GET https://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "not a path"),
        (b"GET a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "not a path"),
        (b"GET * HTTP/1.1\r\nHost: a.example\r\n\r\n", "not a path"),
        (b"CONNECT b.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n", "CONNECT"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nUpgrade: h2c\r\n\r\n", "Upgrade"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nupgrade: websocket\r\n\r\n", "Upgrade"),
        (b"GET / HTTP/1.2\r\nHost: a.example\r\n\r\n", "version"),
        (b"GET /a b HTTP/1.1\r\nHost: a.example\r\n\r\n", "request line"),
        (b"GET  / HTTP/1.1\r\nHost: a.example\r\n\r\n", "request line"),
        (b"GET /\t HTTP/1.1\r\nHost: a.example\r\n\r\n", "request line"),
        (b"GET / HTTP/1.1\nHost: a.example\r\n\r\n", "stray"),
        (b"GET / HTTP/1.1\r\nHost: a.example\n\r\n\r\n", "stray"),
        (b"GET / HTTP/1.1\r\nHost: a.example\rX: y\r\n\r\n", "stray"),
        (b"GET / HTTP/1.1\r\nX: \x00\r\nHost: a.example\r\n\r\n", "stray"),
        (b"GET /\x00 HTTP/1.1\r\n", "stray"),
        (b"GET / HTTP/1.1\r\nX: a\r\n b\r\nHost: a.example\r\n\r\n", "malformed line"),
        (b"GET / HTTP/1.1\r\n Host: b.example\r\nHost: a.example\r\n\r\n", "malformed line"),
        (b"GET / HTTP/1.1\r\nHost : b.example\r\nHost: a.example\r\n\r\n", "malformed line"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n: x\r\n\r\n", "malformed line"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nword\r\n\r\n", "malformed line"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nX: \x0b\r\n\r\n", "malformed line"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n" + b"A: b\r\n" * 128 + b"\r\n", "more than 128"),
    ],
)
def test_an_ambiguous_request_is_refused(head: bytes, words: str) -> None:
    found = said(head, 80)
    assert (found.protocol, found.name) == (HTTP, "")
    assert words in found.reason


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked",
        b"Content-Length: 3\r\nContent-Length: 3",
        b"Content-Length: 3, 3",
        b"Content-Length: +3",
        b"Content-Length: 0x3",
        b"Content-Length:",
        b"Content-Length: 1000000000000000000000",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding:",
    ],
)
def test_a_body_whose_end_is_ambiguous_is_refused(headers: bytes) -> None:
    assert said(b"POST / HTTP/1.1\r\nHost: a.example\r\n" + headers + b"\r\n\r\n", 80).reason


def test_old_http_has_no_chunks() -> None:
    head = b"POST / HTTP/1.0\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert "1.0" in said(head, 80).reason


# Chunks.

CHUNKS = b"5\r\nhello\r\n00A\r\n0123456789\r\n0\r\nX-Sum: 1\r\n\r\n"


@given(st.lists(st.integers(0, len(CHUNKS))), st.binary())
def test_a_chunked_body_ends_where_it_ends_however_it_is_cut(cuts: list[int], rest: bytes) -> None:
    chunks, used = Chunked(), 0
    edges = [0, *sorted(cuts), len(CHUNKS)]
    pieces = [CHUNKS[a:b] for a, b in itertools.pairwise(edges)]
    for piece in [*pieces[:-1], pieces[-1] + rest]:
        used += chunks.feed(piece)
    assert chunks.done
    assert used == len(CHUNKS)
    assert chunks.feed(GET) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"5;name=value\r\nhello\r\n",
        b"5\nhello\r\n",
        b"-5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"\r\n",
        b"5\r\nhello!\r\n",
        b"5\r\nhelloGET / HTTP/1.1\r\n",
        b"0\r\nbad trailer\r\n",
        b"0\r\n\n",
        b"0" * 5000,
        b"1000000000000000\r\n",
        b"0\r\n" + b"a: b\r\n" * 129,
    ],
)
def test_a_malformed_chunk_is_refused(body: bytes) -> None:
    with pytest.raises(UnreadableRequest):
        Chunked().feed(body)
    chunks = Chunked()
    with pytest.raises(UnreadableRequest):
        _ = [chunks.feed(body[count : count + 1]) for count in range(len(body))]


# Whatever comes.


def mangled(data: bytes) -> st.SearchStrategy[bytes]:
    """``data`` with some of it replaced by anything."""
    return st.tuples(st.integers(0, len(data)), st.integers(0, 8), st.binary(max_size=8)).map(
        lambda t: data[: t[0]] + t[2] + data[t[0] + t[1] :]
    )


INPUTS = st.one_of(
    st.binary(),
    mangled(GET),
    mangled(client_hello(GOOD)),
    mangled(records(hello(server_names(b"a.example")), 1, 9)),
    st.lists(
        st.sampled_from([b"GET ", b"/ ", b"HTTP/1.1", b"\r", b"\n", b"\0", b"Host: a.b", b":"])
    ).map(b"".join),
)


@given(INPUTS, st.data())
@example(b"GET /\0\nX HTTP/1.1", None)
@example(b"GET / HTTP/1.1\r\n\0", None)
def test_an_answer_never_changes_when_more_comes(data: bytes, draw: st.DataObject | None) -> None:
    whole = peek(data, 80)
    cuts = range(len(data)) if draw is None else [draw.draw(st.integers(0, len(data)))]
    for cut in cuts:
        assert peek(data[:cut], 80) in (None, whole)
    assert whole is None or bool(whole.said.name) != bool(whole.said.reason)
    assert whole is None or whole.length <= len(data)


@given(INPUTS, st.integers(0, 400))
def test_second_hellos_and_answers_are_read_without_trust(data: bytes, cut: int) -> None:
    assert peek_again(data[:cut], 443) in (None, peek_again(data, 443))
    assert asks_again(data[:cut]) in (None, asks_again(data))


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_chunks_are_read_without_trust(pieces: list[bytes]) -> None:
    chunks = Chunked()
    with contextlib.suppress(UnreadableRequest):
        for piece in pieces:
            assert 0 <= chunks.feed(piece) <= len(piece)


@given(INPUTS)
def test_what_is_written_is_read_in_the_same_way(data: bytes) -> None:
    found = peek(data, 80)
    if found is not None and found.request is not None:
        head = sniff.rewrite(found.request)
        again = peek(head, 80)
        assert again is not None
        assert (again.said, again.length) == (found.said, len(head))
        assert again.request is not None
        assert again.request.body == found.request.body
