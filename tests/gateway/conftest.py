from __future__ import annotations

import os
from collections.abc import Iterator

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway import serving
from tests.gateway.devices import Metadata, new_key


@pytest.fixture(scope="session")
def running() -> Iterator[serving.Running]:
    """A gateway for all tests that do not break it."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    with serving.gateway() as gateway:
        yield gateway


@pytest.fixture(scope="session")
def channel(running: serving.Running) -> Iterator[grpc.Channel]:
    with running.channel() as channel:
        yield channel


@pytest.fixture(scope="session")
def stub(channel: grpc.Channel) -> pb_grpc.SandboxServiceStub:
    return pb_grpc.SandboxServiceStub(channel)


@pytest.fixture(scope="session", params=serving.RUNTIMES)
def session(stub: pb_grpc.SandboxServiceStub, request: pytest.FixtureRequest) -> Iterator[str]:
    """A session on each runtime, shared by tests that keep to files of their own."""
    asked = pb.CreateSessionRequest(runtime_class=request.param, env={"GREETING": "hello you"})
    session_id = stub.CreateSession(asked).session_id
    yield session_id
    stub.DestroySession(pb.DestroySessionRequest(session_id=session_id))


@pytest.fixture(scope="session")
def agent(running: serving.Running) -> Metadata:
    return new_key(running, "agent")


@pytest.fixture(scope="session")
def other(running: serving.Running) -> Metadata:
    return new_key(running, "other")


@pytest.fixture(scope="session")
def session_of(
    stub: pb_grpc.SandboxServiceStub, agent: Metadata, other: Metadata
) -> Iterator[dict[str, str]]:
    """A session of the local user, and one of each key."""
    callers: dict[str, Metadata] = {"local": (), "agent": agent, "other": other}
    asked = pb.CreateSessionRequest(runtime_class="container")
    found = {
        name: stub.CreateSession(asked, metadata=metadata, timeout=50).session_id
        for name, metadata in callers.items()
    }
    yield found
    for name, session_id in found.items():
        ended = pb.DestroySessionRequest(session_id=session_id)
        stub.DestroySession(ended, metadata=callers[name], timeout=50)
