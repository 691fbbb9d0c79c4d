"""Exposed ports over gRPC, as K8E's clients ask for them."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.serving import failing

Stub = pb_grpc.SandboxServiceStub
Status = grpc.StatusCode
PORT = 8300


def expose(stub: Stub, session: str, port: int = PORT, host: str = "") -> str:
    request = pb.ExposeServiceRequest(session_id=session, port=port, host=host)
    return stub.ExposeService(request, timeout=30).url


def unexpose(stub: Stub, session: str, port: int = PORT) -> bool:
    request = pb.UnexposeServiceRequest(session_id=session, port=port)
    return stub.UnexposeService(request, timeout=20).ok


def listed(stub: Stub, session: str) -> list[pb.ExposedService]:
    request = pb.ListExposedRequest(session_id=session)
    return list(stub.ListExposed(request, timeout=20).services)


def test_a_port_is_exposed_listed_reached_and_unexposed(stub: Stub, session: str) -> None:
    url = expose(stub, session)
    (found,) = listed(stub, session)
    assert (found.port, found.host, found.url) == (PORT, "127.0.0.1", url)
    assert abs(found.started_at - time.time()) < 60
    assert expose(stub, session, host="127.0.0.1") == url
    with pytest.raises(urllib.error.HTTPError, match="502"):
        urllib.request.urlopen(url, timeout=20)
    assert unexpose(stub, session) is True
    assert listed(stub, session) == []
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url, timeout=20)


def test_failures_have_codes(stub: Stub, session: str) -> None:
    missing = failing(lambda: unexpose(stub, session))
    assert (missing.status, missing.code) == (Status.NOT_FOUND, "not_exposed")
    assert failing(lambda: expose(stub, "nobody-s")).status is Status.NOT_FOUND
    assert failing(lambda: listed(stub, "nobody-s")).status is Status.NOT_FOUND
    for port, host in ((0, ""), (70000, ""), (-1, ""), (80, "192.0.2.1"), (80, "0.0.0.0")):
        failed = failing(lambda port=port, host=host: expose(stub, session, port, host))
        assert failed.status is Status.INVALID_ARGUMENT
