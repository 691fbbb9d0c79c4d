"""Tokens of one sandbox at the router: what they open, and all that they do not."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.agent_sandbox.test_router import CLAIMS, PATIENCE, SANDBOXES, ready
from tests.gateway import http_gateways

pytestmark = pytest.mark.timeout(300)
ROUTER = "k8e-router"


class Stage(NamedTuple):
    """A gateway, its owner's client, and two sandboxes of that owner."""

    root: str
    owner: httpx2.Client
    first: str
    second: str

    def mint(self, sandbox: str, **asked: Any) -> str:
        made = self.owner.post(f"/sandbox/{sandbox}/token", json=asked)
        assert made.status_code in (200, 201), made.text
        return made.json()["token"]

    def ask(
        self, token: str, method: str, path: str, sandbox: str = "", **more: Any
    ) -> httpx2.Response:
        """A request with a token, to the router if it is for a sandbox."""
        headers = {"authorization": f"Bearer {token}"}
        if sandbox:
            headers["x-sandbox-id"] = sandbox
            path = f"/agent-sandbox/router{path}"
        return httpx2.request(method, self.root + path, headers=headers, timeout=PATIENCE, **more)

    def run(self, token: str, sandbox: str) -> httpx2.Response:
        return self.ask(token, "POST", "/execute", sandbox, json={"command": "echo mine"})


@pytest.fixture(scope="module")
def stage() -> Generator[Stage]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with http_gateways.started(K8E_RUNTIME="container") as gateway:
        caller = gateway.key("somebody")
        with httpx2.Client(
            base_url=gateway.root, headers=caller.headers, timeout=PATIENCE
        ) as owner:
            names: list[str] = []
            owner.base_url = f"{gateway.root}/agent-sandbox"
            for name in ("one", "two"):
                claim = {"metadata": {"name": name}, "spec": {"warmPoolRef": {"name": "default"}}}
                assert owner.post(CLAIMS, json=claim).status_code == 201
                names.append(ready(owner, name))
            owner.base_url = gateway.root
            yield Stage(gateway.root, owner, *names)


def test_a_token_opens_its_sandbox_at_the_router_and_nothing_else(stage: Stage) -> None:
    token = stage.mint(stage.first, audience=ROUTER)
    assert stage.run(token, stage.first).json()["stdout"] == "mine\n"
    assert stage.ask(token, "GET", "/exists/a", stage.first).json() == {"exists": False}
    for refused in (
        stage.run(token, stage.second),
        stage.ask(token, "GET", f"/agent-sandbox{CLAIMS}"),
        stage.ask(token, "POST", f"/agent-sandbox{CLAIMS}", json={"metadata": {"name": "three"}}),
        stage.ask(token, "DELETE", f"/agent-sandbox{CLAIMS}/one"),
        stage.ask(token, "GET", f"/agent-sandbox{SANDBOXES}/{stage.second}"),
        stage.ask(token, "GET", f"/sandbox/{stage.first}"),
        stage.ask(token, "POST", "/mcp", json={}),
        stage.ask(token, "GET", "/metrics"),
    ):
        assert refused.status_code in (401, 403, 404, 422), refused.text
    assert stage.run(token, stage.first).status_code == 200


def test_a_token_for_another_audience_is_refused_at_the_router(stage: Stage) -> None:
    for asked in ({}, {"audience": "elsewhere"}):
        assert stage.run(stage.mint(stage.first, **asked), stage.first).status_code == 401


def test_a_token_allows_the_operations_that_it_names(stage: Stage) -> None:
    reading = stage.mint(stage.first, audience=ROUTER, operations=["get_session", "stat", "read"])
    assert stage.ask(reading, "GET", "/exists/a", stage.first).status_code == 200
    assert stage.run(reading, stage.first).status_code in (401, 403)


def test_a_token_ends_with_its_sandbox(stage: Stage) -> None:
    token = stage.mint(stage.second, audience=ROUTER)
    assert stage.run(token, stage.second).status_code == 200
    assert stage.owner.delete(f"/agent-sandbox{CLAIMS}/two").status_code == 200
    assert stage.run(token, stage.second).status_code == 401
