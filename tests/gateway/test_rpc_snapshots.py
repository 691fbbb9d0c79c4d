"""K8E's registry of snapshots over gRPC, and what was saved here in it."""

from __future__ import annotations

from collections.abc import Generator

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.serving import RUNTIMES, Frames, failing

Stub = pb_grpc.SandboxServiceStub
Status = grpc.StatusCode


def put(stub: Stub, name: str, *layers: str) -> pb.SnapshotPutResponse:
    return stub.SnapshotPut(pb.SnapshotPutRequest(name=name, layers=layers), timeout=20)


def get(stub: Stub, name: str) -> pb.SnapshotGetResponse:
    return stub.SnapshotGet(pb.SnapshotGetRequest(name=name), timeout=20)


def names(stub: Stub) -> list[str]:
    return list(stub.SnapshotList(pb.SnapshotListRequest(), timeout=20).names)


@pytest.fixture
def frames(channel: grpc.Channel) -> Generator[Frames]:
    with Frames(channel) as frames:
        yield frames


def test_names_for_digests_are_remembered(stub: Stub, frames: Frames) -> None:
    answer = put(stub, "k8e-s", "sha256:a", "sha256:b")
    assert answer == pb.SnapshotPutResponse(name="k8e-s", layers=2)
    assert get(stub, "k8e-s").layers == ["sha256:a", "sha256:b"]
    assert put(stub, "k8e-s", "sha256:c").layers == 1
    assert list(get(stub, "k8e-s").layers) == ["sha256:c"]
    assert "k8e-s" in names(stub)
    frames.ask(1, op="delete_snapshot", name="k8e-s")
    frames.result(1)
    assert failing(lambda: get(stub, "k8e-s")).status is Status.NOT_FOUND


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_was_saved_here_is_in_the_registry(stub: Stub, runtime: str, frames: Frames) -> None:
    session = stub.CreateSession(pb.CreateSessionRequest(runtime_class=runtime)).session_id
    frames.ask(1, op="save_snapshot", session_id=session, name="ours", replace=True)
    saved = frames.result(1)
    assert list(get(stub, "ours").layers) == [saved["digest"]]
    assert saved["digest"].startswith("sha256:")
    assert "ours" in names(stub)
    failed = failing(lambda: put(stub, "ours", "sha256:x"))
    assert (failed.status, failed.code) == (Status.ALREADY_EXISTS, "conflict")
    frames.ask(2, op="delete_snapshot", name="ours")
    frames.result(2)
    stub.DestroySession(pb.DestroySessionRequest(session_id=session))


def test_failures_have_their_codes(stub: Stub) -> None:
    failed = failing(lambda: get(stub, "nobody-s"))
    assert (failed.status, failed.code) == (Status.NOT_FOUND, "snapshot_not_found")
    for work in (lambda: get(stub, ""), lambda: put(stub, "a/b"), lambda: put(stub, "a", "")):
        assert failing(work).status is Status.INVALID_ARGUMENT
    many = failing(lambda: put(stub, "a", *["sha256:x"] * 1001))
    assert many.status is Status.RESOURCE_EXHAUSTED
