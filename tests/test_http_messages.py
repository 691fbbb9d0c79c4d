"""Heads and bodies of HTTP that are only there to make work."""

from __future__ import annotations

from typing import Any

import h11
import pytest

from k8e.http_messages import CRUMB, MAX_CRUMBS, MAX_FIELDS, HttpConnection, HttpStream

POST = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
MAX_HEAD = 64 << 10


def served(data: bytes, kind: type[HttpConnection] = HttpConnection) -> list[Any]:
    """All events of one request."""
    http = kind(h11.SERVER, MAX_HEAD)
    http.receive_data(data)
    events: list[Any] = []
    while (event := http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        events.append(event)
    return events


def crumbs(count: int, size: int) -> bytes:
    return (b"%x\r\n" % size + b"a" * size + b"\r\n") * count + b"0\r\n\r\n"


def test_a_head_of_too_many_fields_is_refused_before_it_is_read() -> None:
    head = b"GET / HTTP/1.1\r\nHost: a\r\n"
    request, _ = served(head + b"a: b\r\n" * (MAX_FIELDS - 2) + b"\r\n")
    assert len(request.headers) == MAX_FIELDS - 1
    for end in (b"", b"\r\n"):  # also one that never ends
        with pytest.raises(h11.RemoteProtocolError) as refused:
            served(head + b"a:\r\n" * MAX_FIELDS + end)
        assert refused.value.error_status_hint == 431


def test_lines_of_a_body_are_no_fields() -> None:
    body = b"\n" * (10 * MAX_FIELDS)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert served(head + body)[1].data == body


def test_an_answer_of_too_many_fields_is_refused_too() -> None:
    http = HttpStream(h11.CLIENT, MAX_HEAD)
    http.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    http.send(h11.EndOfMessage())
    http.receive_data(b"HTTP/1.1 200 OK\r\n" + b"a:\r\n" * (MAX_FIELDS + 1) + b"\r\n")
    with pytest.raises(h11.RemoteProtocolError):
        http.next_event()


def test_a_body_of_single_bytes_is_refused_and_one_of_fair_pieces_is_not() -> None:
    with pytest.raises(h11.RemoteProtocolError, match="small pieces"):
        served(POST + crumbs(MAX_CRUMBS + 1, 1))
    assert len(served(POST + crumbs(MAX_CRUMBS, 1))) == MAX_CRUMBS + 2
    assert len(served(POST + crumbs(4 * MAX_CRUMBS, CRUMB))) == 4 * MAX_CRUMBS + 2
    assert len(served(POST + crumbs(2 * MAX_CRUMBS, 1), HttpStream)) == 2 * MAX_CRUMBS + 2
