"""Fixtures for tests that need a real gateway. Run as root: sandboxes need it."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest

from k8e import SandboxClient
from k8e.conformance.lab.ports import free_port
from tests import ordering
from tests.places import NewPlace, Place

RUNTIMES = ("container", "gvisor")

# A shell starts what runs in its background with Ctrl-C ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    yield
    if hasattr(config, "workerinput"):  # one of several workers
        ordering.order(items)


@pytest.fixture(autouse=True)
def _files_stay_readable() -> Generator[None]:
    """A test that leaves another umask makes tests fail that come after it, in some order."""
    before = _umask()
    yield
    assert _umask() == before, "the test left another umask"


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def _need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")


@pytest.fixture(scope="session")
def place() -> Generator[Place]:
    """A gateway that many tests share, with a gRPC endpoint; it may leave nothing behind."""
    _need_root()
    place = Place(K8E_LISTEN=f"127.0.0.1:{free_port()}")
    yield place
    place.close()


@pytest.fixture
def new_place() -> Generator[NewPlace]:
    """Makes places whose gateways a test may start, stop and kill."""
    _need_root()
    places: list[Place] = []

    def make(**environ: str) -> Place:
        places.append(Place(**environ))
        return places[-1]

    yield make
    for place in places:
        place.close()


@pytest.fixture(scope="session", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def session_id(place: Place, runtime: str) -> Generator[str]:
    """A session of each runtime, shared by the tests that do not destroy it."""
    found = place.json("sandbox", "create", "--runtime", runtime)["session_id"]
    yield found
    place.json("sandbox", "destroy", found)


@pytest.fixture(params=["unix", "grpc"])
def endpoint(place: Place, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of reaching the shared gateway."""
    listening = place.listening()
    if request.param == "unix":
        return place.endpoint
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(place.data / "tls" / "ca.crt"))
    return listening


@pytest.fixture
def client(endpoint: str) -> Generator[SandboxClient]:
    with SandboxClient(endpoint) as client:
        yield client
