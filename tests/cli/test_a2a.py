"""``k8e a2a``: the gateway serves A2A; the command says where, and keeps the gateway."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator

import httpx
import pytest

from k8e.cli.a2a import GONE
from tests.places import Place, eventually, wait_readable

pytestmark = pytest.mark.timeout(200)
PATIENCE = 60.0
FREE = ("--addr", "127.0.0.1:0")


@pytest.fixture
def place() -> Generator[Place]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    made = Place(K8E_HTTP="")
    yield made
    made.close()


def said(process: subprocess.Popen[bytes]) -> dict[str, str]:
    """What a command that goes on has printed."""
    assert process.stdout is not None
    assert wait_readable(process.stdout.fileno(), PATIENCE)
    return json.loads(process.stdout.readline())


def test_a_gateway_is_started_and_stays_as_long_as_the_command(place: Place) -> None:
    place.environ["K8E_IDLE_EXIT"] = "3"
    process = place.start("a2a", *FREE)
    told = said(process)
    assert process.stdout is not None
    assert not wait_readable(process.stdout.fileno(), 6), "it ends with its gateway"
    token = place.json("a2a", "token")["token"]
    card = httpx.get(told["card"], timeout=PATIENCE).json()
    assert card["url"] == told["url"]
    call = {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"id": "x"}}
    headers = {"Authorization": f"Bearer {token}"}
    answer = httpx.post(told["url"], json=call, headers=headers, timeout=PATIENCE)
    assert answer.json()["error"]["code"] == -32001
    assert place.json("status")["running"]
    process.terminate()
    out, problems = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, problems) == (0, b"", b"")
    eventually(lambda: not place.socket.exists())


def test_command_ends_with_its_gateway(place: Place) -> None:
    process = place.start("a2a", *FREE)
    said(process)
    other = place.start("a2a")  # the one that runs already
    assert "authorization" in said(other)
    assert "not 127.0.0.1:1" in place.error("a2a", "--addr", "127.0.0.1:1")
    place.cli("gateway", "stop")
    for item in (process, other):
        out, problems = item.communicate(timeout=PATIENCE)
        assert b"the gateway has ended" in out, problems
        assert item.returncode == 2


def test_gateway_without_an_http_endpoint_is_told(place: Place) -> None:
    place.json("gateway", "--background", "--http", "none")
    assert "without an HTTP endpoint" in place.error("a2a")


@pytest.mark.parametrize("flag", GONE)
def test_flag_of_former_times_says_what_to_do_instead(place: Place, flag: str) -> None:
    told = place.error("a2a", flag, "x")
    assert f"no flag {flag} any more" in told
    assert GONE[flag] in told


@pytest.mark.parametrize("words", [["researcher"], ["--revoke"]])
def test_tokens_of_callers_are_api_keys_now(place: Place, words: list[str]) -> None:
    assert "api-key create" in place.error("a2a", "token", *words)


def test_gateway_elsewhere_serves_a2a_itself(place: Place) -> None:
    told = place.error("a2a", K8E_SANDBOX_ENDPOINT="gateway.example:50051")
    assert "gateway.example:50051, which serves A2A itself" in told
