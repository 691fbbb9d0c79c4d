"""What goes wrong on the way to a gateway: each has an error class, which says what to do next.

Their twins for TypeScript are in ``sdk/typescript/tests/failures.test.ts``. A gateway that goes
away in the middle is in ``test_sdk.py``, ``test_lost_gateway.py`` and ``test_trunk.py``.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from k8e import SandboxClient, Stdout, errors
from tests.places import Place

SIZE = 128 << 20
WHERE = (
    "K8E_SANDBOX_ENDPOINT",
    "K8E_SANDBOX_PROFILE",
    "K8E_SANDBOX_APIKEY",
    "K8E_SANDBOX_CA",
    "K8E_SANDBOX_CERT",
    "K8E_SANDBOX_KEY",
    "K8E_SANDBOX_CERT_DIR",
)


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine leads to a gateway, or vouches for one."""
    for name in WHERE:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "K8E_DATA_DIR", "K8E_RUN_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def refused(kind: type[errors.K8eError], endpoint: str | None, api_key: str | None = None) -> str:
    """The message and the hint of a call that must fail so."""
    with SandboxClient(endpoint, api_key=api_key) as client, pytest.raises(kind) as caught:
        client.status()
    assert type(caught.value) is kind
    assert caught.value.hint
    return f"{caught.value.message} | {caught.value.hint}"


def test_no_gateway_listens_at_a_socket_that_was_named(tmp_path: Path) -> None:
    assert "no gateway listens on" in refused(errors.NoGateway, f"unix:{tmp_path}/gateway.sock")


def test_no_gateway_runs_and_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8E_RUN_DIR", "/proc/there-is-no-folder")
    assert "none can be started" in refused(errors.NoGateway, None)


def test_nobody_listens_elsewhere() -> None:
    assert "check the address" in refused(errors.GatewayUnreachable, "127.0.0.1:1")


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(place: Place) -> None:
    assert "K8E_SANDBOX_CERT" in refused(errors.UntrustedGateway, place.listening())


def test_a_key_that_the_gateway_does_not_know_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(place.data / "tls/ca.crt"))
    for key in (f"k8e-{'0' * 64}", "nonsense"):
        assert "api-key create" in refused(errors.KeyRefused, place.listening(), key)
    assert "the API key has characters" in refused(errors.InvalidRequest, place.listening(), "häß")


def test_a_session_that_is_not_there_is_an_error_of_its_own(place: Place) -> None:
    place.listening()
    with SandboxClient(place.endpoint) as client, pytest.raises(errors.SessionNotFound) as caught:
        client.exec("sess-of-nobody", "true")
    assert "k8e sandbox sessions" in caught.value.hint


def resident() -> int:
    """Bytes of memory that this program has."""
    status = Path("/proc/self/status").read_text("ascii")
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def test_a_slow_reader_of_much_output_needs_no_more_memory(place: Place) -> None:
    place.listening()
    with SandboxClient(place.endpoint) as client:
        session_id = client.create_session("container")
        before, most, size, paused = resident(), 0, 0, 0
        for event in client.exec_events(
            session_id, f"dd if=/dev/zero bs=1M count={SIZE >> 20} status=none"
        ):
            if isinstance(event, Stdout):
                size += len(event.data)
                if size - paused >= 1 << 20:
                    paused = size
                    time.sleep(0.004)  # slower than the program
                    most = max(most, resident() - before)
        client.destroy_session(session_id)
    assert size == SIZE
    assert most < 48 << 20
